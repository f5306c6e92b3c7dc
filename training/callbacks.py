"""What watches a run. A callback is any object with some of these hooks, each called with the Run, which it only reads:

on_training_start, on_epoch_start, on_step_end (at every log line within an epoch), on_epoch_end, on_training_end

A Run (training/loop.py) tells epoch, step, metrics (of the latest line; means over the replicas), states() and params. A
callback changes it by what it answers alone: {"stop": True}, or {"lr_scale": 0.5}, by which every later update is multiplied.
An attribute `monitor`, if it has one, is the name of a metric, and train.py checks it before the run. To add a callback, write
a function that returns such an object, annotated `-> Callback`, and name it in the config.
"""

from typing import Literal

from training.base import Callback
from utils import UserError

HOOKS = ("on_training_start", "on_epoch_start", "on_step_end", "on_epoch_end", "on_training_end")


def check_hooks(callbacks):
    """Refuse a hook that nobody would call."""
    for callback in callbacks:
        for name in dir(callback):
            if name.startswith("on_") and name not in HOOKS:
                raise UserError(f"callbacks: {type(callback).__name__} has {name!r}, which is no hook ({', '.join(HOOKS)})")


def notify(callbacks, hook, run):
    """Call one hook of all callbacks and merge their answers: one stop is enough, and the last lr_scale counts."""
    answers = {}
    for callback in callbacks:
        if hasattr(callback, hook):
            answer = getattr(callback, hook)(run) or {}
            answers |= answer | {"stop": bool(answers.get("stop") or answer.get("stop"))}
    unknown = answers.keys() - {"stop", "lr_scale"}
    if unknown:
        raise UserError(f"callbacks: {hook} answered {sorted(unknown)}; a callback may answer 'stop' and 'lr_scale'")
    return answers


def early_stopping(
    monitor: str = "test_loss", mode: Literal["min", "max"] = "min", patience: int = 3, min_delta: float = 0.0
) -> Callback:
    """Stop when a metric has not improved by more than `min_delta` in `patience` evaluations."""
    if patience < 1:
        raise ValueError(f"patience: must be at least 1, got {patience}")
    return EarlyStopping(monitor, 1 if mode == "min" else -1, patience, min_delta)


class EarlyStopping:
    def __init__(self, monitor, sign, patience, min_delta):
        self.monitor, self.sign, self.patience, self.min_delta = monitor, sign, patience, min_delta

    def on_training_start(self, run):
        self.best, self.waited = float("inf"), 0

    def on_epoch_end(self, run):
        if self.monitor not in run.metrics:  # this epoch was not evaluated
            return None
        value = self.sign * run.metrics[self.monitor]
        improved = value < self.best - self.min_delta
        self.best, self.waited = (value, 0) if improved else (self.best, self.waited + 1)
        return {"stop": self.waited >= self.patience}
