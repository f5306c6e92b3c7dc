"""learning_rate_monitor: that it asks for the rate, and says it; that rows hold it is seen in test_whole_runs.py."""

import logging

import pytest

from tests.training.watching.callbacks.fake import view
from training.watching.callbacks.learning_rate_monitor import learning_rate_monitor


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ({"learning_rate": 0.0025}, "Epoch 2: learning rate 0.0025"),
        (
            {"learning_rate": 3e-5, "adamw_learning_rate": 0.001},
            "Epoch 2: learning rate 3e-05, adamw learning rate 0.001",
        ),
    ],
)
def test_it_says_the_rate(caplog, rates, said):
    caplog.set_level(logging.INFO, "main")
    learning_rate_monitor().on_epoch_end(view(learning_rate=lambda: rates))
    assert caplog.records[0].getMessage() == said


def test_it_says_nothing_of_what_nobody_knows(caplog):
    caplog.set_level(logging.INFO, "main")
    learning_rate_monitor().on_epoch_end(view(learning_rate=dict))
    assert not caplog.records


def test_it_asks_for_the_measuring_and_refuses_no_epoch():
    assert learning_rate_monitor(every_n_epochs=3).needs == ("learning_rate",)
    assert learning_rate_monitor(every_n_epochs=3).every_n_epochs == 3
    with pytest.raises(ValueError, match=r"^every_n_epochs: must be at least 1, got 0"):
        learning_rate_monitor(every_n_epochs=0)
