"""A run that waits for its data says so once, with what to do."""

from types import SimpleNamespace

import pytest

from training.watching.metric_log import ADVICE, WaitingForData


def messages(caplog, shares, advice=None):
    """What is logged if each chunk of four seconds waits for this share of the time."""
    clock = SimpleNamespace(seconds=0.0, waited=0.0)
    observer = WaitingForData(clock, advice)
    for share in [*shares, *shares]:
        clock.seconds += 4
        clock.waited += 4 * share
        observer.on_steps(None)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("advice", [None, "use more workers"])
def test_a_run_that_waits_says_so_once_and_what_to_do(caplog, advice):
    (message,) = messages(caplog, [0.2, 0.9, 0.7, 1.0], advice)
    assert message == f"Training waits for data 60% of the time: {advice or ADVICE}"


def test_a_run_that_computes_says_nothing(caplog):
    assert messages(caplog, [0.5, 0.1, 0.1, 0.1]) == []
