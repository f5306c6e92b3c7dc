"""Stop when nothing gets better."""

from typing import Literal

from training.base import Callback
from training.options import sign_of
from training.ranges import at_least


def early_stopping(
    monitor: str = "test_loss",
    mode: Literal["auto", "min", "max"] = "auto",
    patience: int = 3,
    min_delta: float = 0.0,
    every_n_epochs: int = 1,
) -> Callback:
    """Stop when a metric has not improved by more than `min_delta` in `patience` evaluations."""
    at_least(1, patience=patience, every_n_epochs=every_n_epochs)
    return EarlyStopping(monitor, mode, patience, min_delta, every_n_epochs)


class EarlyStopping:
    def __init__(self, monitor, mode, patience, min_delta, every_n_epochs=1):
        self.monitor, self.mode, self.patience, self.min_delta = monitor, mode, patience, min_delta
        self.every_n_epochs = every_n_epochs

    def sign(self):
        """1 where the metric is to be low, -1 where it is to be high."""
        return sign_of(self.monitor, self.mode, "early_stopping: mode")

    def on_training_start(self, run):
        self.memory = {"best": None, "waited": 0}

    def on_epoch_end(self, run):
        if self.monitor not in run.metrics:  # this epoch was not evaluated
            return None
        value, best = self.sign() * run.metrics[self.monitor], self.memory["best"]
        improved = value < (float("inf") if best is None else best) - self.min_delta
        self.memory = (
            {"best": value, "waited": 0}
            if improved
            else {"best": best, "waited": self.memory["waited"] + 1}
        )
        return {"stop": self.memory["waited"] >= self.patience}
