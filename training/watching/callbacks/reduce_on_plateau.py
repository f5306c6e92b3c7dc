"""Reduce all updates when a metric no longer improves."""

import logging
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from training.base import Callback
from training.options import monitor_for, sign_of
from training.watching.callbacks.common import after_evaluation, monitored
from training.watching.view import View
from utils.forms import Count, CountOrZero, NonNegative, Share, between_0_and_1, checked

logger = logging.getLogger("main")


@checked
def reduce_on_plateau(
    monitor: str = "auto",
    mode: Literal["auto", "min", "max"] = "auto",
    factor: Annotated[float, between_0_and_1] = 0.1,
    patience: Count = 3,
    min_delta: NonNegative = 0.0,
    cooldown: CountOrZero = 0,
    min_scale: Share = 0.0,
) -> Callback:
    """Multiply all updates by `factor` after `patience` evaluations without an improvement.

    The metric is val_loss, or test_loss without a validation set, unless `monitor` names another.
    An improvement is larger than `min_delta`. After a reduction, `cooldown` evaluations do not
    count; the product of its factors never falls below `min_scale`. The evaluations at which it
    reduces are the same as with Optax's reduce_on_plateau; with PyTorch's ReduceLROnPlateau, give
    one less as the patience.
    """
    numbers = factor, patience, min_delta, cooldown, min_scale
    return ReduceOnPlateau(monitor, mode, *numbers)


@dataclass
class ReduceOnPlateau:
    lowers_rate = True

    monitor: str
    mode: str
    factor: float
    patience: int
    min_delta: float
    cooldown: int
    min_scale: float

    def sign(self) -> int:
        """1 if lower values of the metric are better, -1 if higher ones are."""
        return sign_of(self.monitor, self.mode, "reduce_on_plateau: mode")

    def on_start(self, run: View) -> None:
        self.memory = {"best": None, "waited": 0, "cooling": 0, "scale": 1.0}

    def on_row(self, run: View, row: dict[str, Any]) -> dict[str, float] | None:
        monitor = monitor_for(self.monitor, run.sets, "test_loss")
        value = monitored(monitor, self.sign(), row)
        if value is None:
            return None
        now = after_evaluation(self.memory, value, self.min_delta)
        if now["cooling"]:
            now |= {"cooling": now["cooling"] - 1, "waited": 0}
        self.memory = now
        return self.reduce(run) if now["waited"] >= self.patience else None

    def reduce(self, run: View) -> dict[str, float] | None:
        """The reply that reduces every later update, or None if the scale is at its minimum."""
        before = self.memory["scale"]
        after = max(before * self.factor, self.min_scale)
        self.memory = self.memory | {"waited": 0, "cooling": self.cooldown, "scale": after}
        if after == before:
            return None
        length = f"{self.patience} evaluations" if self.patience > 1 else "1 evaluation"
        logger.info(
            "Epoch %d: %s has not improved in %s: from now on reduce_on_plateau multiplies every "
            "update by %g instead of %g",
            run.epoch, monitor_for(self.monitor, run.sets, "test_loss"), length, after, before,
        )  # fmt: skip
        return {"lr_scale": after}
