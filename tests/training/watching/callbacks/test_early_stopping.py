"""early_stopping against results by hand."""

from types import SimpleNamespace

import pytest

from training.watching.callbacks.early_stopping import early_stopping

pytestmark = pytest.mark.contract


RUN = SimpleNamespace(sets={})


def stops_after(values, **options):
    """The epoch after which the run stops, or None."""
    callback = early_stopping(**options)
    callback.on_start(None)
    for epoch, value in enumerate(values, 1):
        row = {"end_of_epoch": True} | ({} if value is None else {"test_loss": value})
        reply = callback.on_row(RUN, row) or {}
        if reply.get("stop"):
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
        # Small improvements add up.
        ([1.0, 0.94, 0.88, 0.82], {"patience": 2, "min_delta": 0.1}, None),
        ([1.0, 0.99, 0.98, 0.97], {"patience": 2, "min_delta": 0.1}, 3),
        # Epochs without an evaluation do not count.
        ([None, 5, None, None, 4, None, 3], {"patience": 1}, None),
        ([5, float("nan"), float("nan")], {"patience": 2}, 3),
    ],
)
def test_early_stopping(values, options, stop):
    assert stops_after(values, **options) == stop


def test_a_second_run_starts_without_the_memory_of_the_first():
    callback = early_stopping(patience=1)
    for _ in range(2):
        callback.on_start(None)
        row = {"evaluation": True, "test_loss": 3.0}
        assert callback.on_row(RUN, row) == {"stop": False}


def test_the_values_of_the_initial_params_and_of_the_last_test_do_not_count():
    callback = early_stopping(patience=1)
    callback.on_start(None)
    assert callback.on_row(RUN, {"initial": True, "test_loss": 3.0}) is None
    assert callback.on_row(RUN, {"final": "the last weights", "test_loss": 3.0}) is None
