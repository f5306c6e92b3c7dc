"""Log the learning rate."""

import logging

from ranges import Count, checked
from training.base import Callback

logger = logging.getLogger("main")


@checked
def learning_rate_monitor(every_n_epochs: Count = 1) -> Callback:
    """Add the learning rate to metrics.jsonl and the trackers, and log it after every n-th epoch.

    The first part is the same as `logging.learning_rate`.
    """
    return LearningRateMonitor(every_n_epochs)


class LearningRateMonitor:
    needs = ("learning_rate",)  # which the loop measures and writes

    def __init__(self, every_n_epochs):
        self.every_n_epochs = every_n_epochs

    def on_epoch_end(self, view):
        if rates := view.learning_rate():  # empty for an optimizer whose rate is unknown
            text = ", ".join(f"{name.replace('_', ' ')} {rate:g}" for name, rate in rates.items())
            logger.info("Epoch %d: %s", view.epoch, text)
