"""learning_rate_monitor: it has the rate measured and logs it.

test_whole_runs.py shows that the rows of metrics.jsonl hold it.
"""

import logging

import pytest

from tests.training.watching.callbacks.fake import view
from training.watching.callbacks.learning_rate_monitor import learning_rate_monitor

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(
    ("rates", "line"),
    [
        ({"learning_rate": 0.0025}, "Epoch 2: learning rate 0.0025"),
        (
            {"learning_rate": 3e-5, "adamw_learning_rate": 0.001},
            "Epoch 2: learning rate 3e-05, adamw learning rate 0.001",
        ),
    ],
)
def test_the_rate_is_logged(caplog, rates, line):
    caplog.set_level(logging.INFO, "main")
    learning_rate_monitor().on_steps(view(learning_rate=lambda: rates))
    assert caplog.records[0].getMessage() == line


def test_an_unknown_rate_is_not_logged(caplog):
    caplog.set_level(logging.INFO, "main")
    learning_rate_monitor().on_steps(view(learning_rate=dict))
    assert not caplog.records


def test_it_needs_the_rate_and_refuses_an_epoch_count_of_zero():
    assert learning_rate_monitor(every={"epochs": 3}).needs == ("learning_rate",)
    assert learning_rate_monitor(every={"epochs": 3}).every == {"epochs": 3}
    with pytest.raises(ValueError, match=r"^every.epochs: must be at least 1, got 0"):
        learning_rate_monitor(every={"epochs": 0})
