"""Callbacks: early stopping by hand, and what is refused."""

from types import SimpleNamespace

import pytest

from training.callbacks import check_hooks, early_stopping, notify
from utils import UserError


def stops_after(values, **options):
    """The epoch after which the run stops, or None."""
    callback = early_stopping(**options)
    callback.on_training_start(None)
    for epoch, value in enumerate(values, 1):
        answer = callback.on_epoch_end(SimpleNamespace(metrics={} if value is None else {"test_loss": value}))
        if (answer or {}).get("stop"):
            return epoch
    return None


@pytest.mark.parametrize(
    ("values", "options", "stop"),
    [
        ([5, 4, 3, 2, 1], {"patience": 1}, None),
        ([5, 4, 4, 4, 4], {"patience": 2}, 4),
        ([5, 4, 4, 3, 4, 4], {"patience": 2}, 6),
        ([1, 2, 3, 4], {"patience": 2, "mode": "max"}, None),
        ([4, 3, 2, 1], {"patience": 2, "mode": "max"}, 3),
        ([1.0, 0.94, 0.88, 0.82], {"patience": 2, "min_delta": 0.1}, None),  # small steps that add up
        ([1.0, 0.99, 0.98, 0.97], {"patience": 2, "min_delta": 0.1}, 3),
        ([None, 5, None, None, 4, None, 3], {"patience": 1}, None),  # epochs without an evaluation do not count
        ([5, float("nan"), float("nan")], {"patience": 2}, 3),
    ],
)
def test_early_stopping(values, options, stop):
    assert stops_after(values, **options) == stop


def test_a_second_run_starts_anew():
    callback = early_stopping(patience=1)
    for _ in range(2):
        callback.on_training_start(None)
        assert callback.on_epoch_end(SimpleNamespace(metrics={"test_loss": 3.0})) == {"stop": False}


def test_one_stop_is_enough_whatever_the_others_answer():
    stop, go_on = (SimpleNamespace(on_epoch_end=lambda run, s=s: {"stop": s}) for s in (True, False))
    assert notify([stop, go_on], "on_epoch_end", None)["stop"]
    assert notify([go_on, stop], "on_epoch_end", None)["stop"]
    assert not notify([go_on, go_on], "on_epoch_end", None)["stop"]


def test_answers_and_hooks_that_nobody_knows_are_refused():
    with pytest.raises(UserError, match=r"answered \['lr'\]"):
        notify([SimpleNamespace(on_epoch_end=lambda run: {"lr": 1})], "on_epoch_end", None)
    with pytest.raises(UserError, match="'on_epoch_ended', which is no hook"):
        check_hooks([SimpleNamespace(on_epoch_ended=print)])
