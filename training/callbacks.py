"""What watches a run. A callback is any object with some of these hooks, each called with the Run, which it only reads:

on_training_start, on_epoch_start, on_step_end (after each chunk of steps), on_epoch_end, on_training_end

It changes the run by what it answers alone: {"stop": True} or {"lr_scale": 0.5}. To add one, write a function that returns
such an object, annotated `-> Callback`, and name it in the config.
"""

from typing import Literal

from training.base import Callback
from utils import UserError


def notify(callbacks, hook, run):
    """Call one hook of all callbacks and merge their answers."""
    answers = {}
    for callback in callbacks:
        if hasattr(callback, hook):
            answers |= getattr(callback, hook)(run) or {}
    unknown = answers.keys() - {"stop", "lr_scale"}
    if unknown:
        raise UserError(f"callbacks: {hook} answered {sorted(unknown)}; a callback may answer 'stop' and 'lr_scale'")
    return answers


def early_stopping(
    monitor: str = "test_loss", mode: Literal["min", "max"] = "min", patience: int = 3, min_delta: float = 0.0
) -> Callback:
    """Stop when a metric has not improved for `patience` epochs."""
    if patience < 1:
        raise ValueError(f"patience: must be at least 1, got {patience}")
    return EarlyStopping(monitor, 1 if mode == "min" else -1, patience, min_delta)


class EarlyStopping:
    def __init__(self, monitor, sign, patience, min_delta):
        self.monitor, self.sign, self.patience, self.min_delta = monitor, sign, patience, min_delta
        self.best, self.waited = float("inf"), 0

    def on_epoch_end(self, run):
        if self.monitor not in run.metrics:
            raise UserError(f"early_stopping: {self.monitor!r} is not measured ({', '.join(sorted(run.metrics))})")
        value = self.sign * run.metrics[self.monitor]
        self.waited = 0 if value < self.best - self.min_delta else self.waited + 1
        self.best = min(self.best, value)
        return {"stop": self.waited >= self.patience}
