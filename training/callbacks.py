"""What watches a run. A callback is any object with some of these hooks, each called with the Run, which it only reads:

on_training_start, on_epoch_start, on_step_end (at every log line within an epoch), on_epoch_end, on_training_end

A Run (training/run.py) tells epoch, step, metrics (of the latest line; means over the replicas), states() and params. A
callback changes it by what it answers alone: {"stop": True}, or {"lr_scale": 0.5}, by which every later update is multiplied.
An attribute `monitor`, if it has one, is the name of a metric, and train.py checks it before the run. What a callback must
remember is JSON in an attribute `memory`: every checkpoint holds it, and a run that goes on puts it back after
on_training_start. To add a callback, write a function that returns such an object, annotated `-> Callback`, and name it in
the config.
"""

import json
import logging
from typing import Literal

from training.base import Callback
from training.options import sign_of
from utils import UserError

logger = logging.getLogger("main")

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


def memories(callbacks):
    """What the callbacks remember, as plain JSON."""
    found = []
    for callback in callbacks:
        name = type(callback).__name__
        try:
            found.append([name, json.loads(json.dumps(getattr(callback, "memory", None)))])
        except (TypeError, ValueError) as error:
            raise UserError(
                f"callbacks: the memory of {name} is not JSON ({error}); keep plain numbers, lists and dicts"
            ) from error
    return found


def remember(callbacks, found):
    """Give each callback its memory back; with another list of callbacks than then, none has a claim to it."""
    if [type(callback).__name__ for callback in callbacks] != [name for name, _ in found]:
        logger.warning("The callbacks are not those of the checkpoint, so all of them start anew")
        return
    for callback, (_, memory) in zip(callbacks, found, strict=True):
        if hasattr(callback, "memory"):
            callback.memory = memory


def early_stopping(
    monitor: str = "test_loss", mode: Literal["auto", "min", "max"] = "auto", patience: int = 3, min_delta: float = 0.0
) -> Callback:
    """Stop when a metric has not improved by more than `min_delta` in `patience` evaluations."""
    if patience < 1:
        raise ValueError(f"patience: must be at least 1, got {patience}")
    return EarlyStopping(monitor, mode, patience, min_delta)


class EarlyStopping:
    def __init__(self, monitor, mode, patience, min_delta):
        self.monitor, self.mode, self.patience, self.min_delta = monitor, mode, patience, min_delta

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
        self.memory = {"best": value, "waited": 0} if improved else {"best": best, "waited": self.memory["waited"] + 1}
        return {"stop": self.memory["waited"] >= self.patience}
