"""Log the learning rate."""

import logging

from training.base import Callback
from training.observers import EVERY_EPOCH, Every
from training.watching.view import View
from utils.forms import checked

logger = logging.getLogger("main")


@checked
def learning_rate_monitor(every: Every = EVERY_EPOCH) -> Callback:
    """Add the learning rate to metrics.jsonl and the trackers, and log it after each epoch, or as
    often as `every` says.

    The first part is the same as `logging.learning_rate`.
    """
    return LearningRateMonitor(every)


class LearningRateMonitor:
    needs, late = ("learning_rate",), True  # which the loop measures and writes

    def __init__(self, every: Every) -> None:
        self.every = every

    def on_steps(self, view: View) -> None:
        if rates := view.learning_rate():  # empty for an optimizer whose rate is unknown
            text = ", ".join(f"{name.replace('_', ' ')} {rate:g}" for name, rate in rates.items())
            logger.info("Epoch %d: %s", view.epoch, text)
