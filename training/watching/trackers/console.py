"""Log all values of every line; without this tracker a line shows only the loss."""

import logging

from training.base import Tracker

logger = logging.getLogger("main")


def console() -> Tracker:
    """Log all values of every line."""
    return Console()


class Console:
    def scalars(self, step: int, values: dict[str, float]) -> None:
        text = ", ".join(f"{name} {value:.6g}" for name, value in values.items())
        logger.info("Step %d: %s", step, text)

    def text(self, step: int, name: str, text: str) -> None:
        logger.info("Step %d: %s\n%s", step, name, text)

    def back_to(self, step: int) -> None:
        logger.info("The values logged for the steps after %d are void", step)
