"""The learning rate, written down with the metrics."""

import logging

from training.base import Callback
from training.ranges import at_least

logger = logging.getLogger("main")


def learning_rate_monitor(every_n_epochs: int = 1) -> Callback:
    """The learning rate in every row of metrics.jsonl and in the trackers, as logging.learning_rate does, and on the console.

    The console tells it at the end of every n-th epoch.
    """
    at_least(1, every_n_epochs=every_n_epochs)
    return LearningRateMonitor(every_n_epochs)


class LearningRateMonitor:
    needs = ("learning_rate",)  # it is the loop that measures and writes it

    def __init__(self, every_n_epochs):
        self.every_n_epochs = every_n_epochs

    def on_epoch_end(self, view):
        if rates := view.learning_rate():  # an optimizer of one's own may not tell
            told = ", ".join(f"{name.replace('_', ' ')} {rate:g}" for name, rate in rates.items())
            logger.info("Epoch %d: %s", view.epoch, told)
