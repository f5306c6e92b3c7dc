"""A run that waits for its data says so once, with what to do."""

from types import SimpleNamespace

import pytest

from training.watching import waiting
from training.watching.waiting import WaitingForData


def messages(monkeypatch, caplog, shares, advice=None):
    """What is logged if each chunk of four seconds waits for this share of the time."""
    now, feed = [0.0], SimpleNamespace(waited=0.0)
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watcher = WaitingForData(feed, advice)
    for _ in range(2):
        watcher.on_epoch_start(None)
        now[0] += 100  # a compilation, during which data was waited for
        feed.waited += 100
        watcher.on_compiled(None)
        for share in shares:
            now[0] += 4
            feed.waited += 4 * share
            watcher.on_chunk(None, None)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("advice", [None, "use more workers"])
def test_a_run_that_waits_says_so_once_and_what_to_do(monkeypatch, caplog, advice):
    (message,) = messages(monkeypatch, caplog, [0.2, 0.9, 0.7, 1.0], advice)
    assert message == f"Training waits for data 60% of the time: {advice or waiting.ADVICE}"


def test_a_run_that_computes_says_nothing(monkeypatch, caplog):
    assert messages(monkeypatch, caplog, [0.5, 0.1, 0.1, 0.1]) == []
