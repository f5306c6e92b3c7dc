"""Every value of every line on the console, where otherwise a line tells of the loss alone."""

import logging

from training.base import Tracker

logger = logging.getLogger("main")


def console() -> Tracker:
    """Say every value of every line on the console."""
    return Console()


class Console:
    """Writes to the log, as everything else on the console."""

    def scalars(self, step, values):
        logger.info(
            "Step %d: %s", step, ", ".join(f"{name} {value:.6g}" for name, value in values.items())
        )

    def back_to(self, step):
        logger.info("What was said of the steps after %d is void", step)
