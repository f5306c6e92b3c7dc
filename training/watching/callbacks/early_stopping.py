"""Stop the run when a metric no longer improves."""

from dataclasses import dataclass
from typing import Any, Literal

from training.base import Callback
from training.options import monitor_for, sign_of
from training.watching.callbacks.common import after_evaluation, monitored
from training.watching.view import View
from utils.forms import Count, NonNegative, checked


@checked
def early_stopping(
    monitor: str = "auto",
    mode: Literal["auto", "min", "max"] = "auto",
    patience: Count = 3,
    min_delta: NonNegative = 0.0,
    restore_best: bool = False,
) -> Callback:
    """Stop when a metric has not improved by more than `min_delta` in `patience` evaluations.

    The metric is val_loss, or test_loss without a validation set, unless `monitor` names another.
    With `restore_best`, a run that has ended, early or not, returns the weights and the values of
    its best checkpoint; checkpoint.monitor must be the same metric.
    """
    return EarlyStopping(monitor, mode, patience, min_delta, restore_best)


@dataclass
class EarlyStopping:
    monitor: str
    mode: str
    patience: int
    min_delta: float
    restore_best: bool

    def sign(self) -> int:
        """1 if lower values of the metric are better, -1 if higher ones are."""
        return sign_of(self.monitor, self.mode, "early_stopping: mode")

    def on_start(self, run: View) -> None:
        self.memory = {"best": None, "waited": 0}

    def on_row(self, run: View, row: dict[str, Any]) -> dict[str, bool] | None:
        monitor = monitor_for(self.monitor, run.sets, "test_loss")
        value = monitored(monitor, self.sign(), row)
        if value is None:
            return None
        self.memory = after_evaluation(self.memory, value, self.min_delta)
        return {"stop": self.memory["waited"] >= self.patience}
