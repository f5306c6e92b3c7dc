"""What watches a run. A callback is any object with some of these hooks, each called with a View of the run (training/watching/view.py):

on_training_start, on_epoch_start, on_step_end, on_validation_start, on_validation_end, on_test_start, on_test_end, on_epoch_end,
on_training_end

on_step_end comes at every log line within an epoch; what the steps between did, one by one, is in the View's `per_step`.

It changes the run by what it answers alone: {"stop": True}, or {"lr_scale": 0.5}, by which every later update is multiplied.
What it must remember is JSON in an attribute `memory`: every checkpoint holds it, and a run that goes on puts it back after
on_training_start. Other attributes that count, where there are any:

monitor         the name of a metric, which is checked before the run
every_n_epochs  call the hooks of epochs, validation and test in every n-th epoch only
needs           what must be measured for it, of training.tally.NEEDS: "gradient_norm", "per_step", ...
metrics         {label: tracked(function, mode, ...)}: measured with the others, on the device, and found in the View's `arrays`
observer        True: its on_step_end answers nothing, and reads no states(), so that the steps need not wait for it
                Of several processes only the first calls it; all others are called in each, and the first one's answers count
steps_left      step -> steps until its on_step_end must be called, besides the log lines

To add a callback, write a function that returns such an object, annotated `-> Callback`, in training/watching/callbacks/, and name it in
the config.
"""

import json
import logging
import math
import os
import traceback

from training.devices.processes import agreed
from training.tally import NEEDS, Tracked
from utils import RunError, UserError

logger = logging.getLogger("main")

OF_EPOCHS = (
    "on_epoch_start",
    "on_validation_start",
    "on_validation_end",
    "on_test_start",
    "on_test_end",
    "on_epoch_end",
)
HOOKS = ("on_training_start", "on_step_end", *OF_EPOCHS, "on_training_end")


class CallbackFailed(Exception):
    """A callback raised what it should not have."""


def check_hooks(callbacks):
    """Refuse a hook that nobody would call, and a need that nobody knows."""
    if not isinstance(callbacks, list | tuple):
        raise UserError(f"callbacks: must be a list, got {callbacks!r}")
    for callback in callbacks:
        name, needs = called(callback), getattr(callback, "needs", ())
        for hook in dir(callback):
            if hook.startswith("on_") and hook not in HOOKS:
                raise UserError(
                    f"callbacks: {name} has {hook!r}, which is no hook ({', '.join(HOOKS)})"
                )
        for need in needs:
            if need not in NEEDS:
                raise UserError(
                    f"callbacks: {name} needs {need!r}, which nobody measures ({', '.join(NEEDS)})"
                )
        for label, rule in getattr(callback, "metrics", {}).items():
            if not isinstance(rule, Tracked):
                raise UserError(
                    f"callbacks: {name}.metrics[{label!r}] must be tracked(function, ...) of training.tally"
                )
        every = getattr(callback, "every_n_epochs", 1)
        if not isinstance(every, int) or every < 1:
            raise UserError(
                f"callbacks: {name}.every_n_epochs must be a whole number from 1, is {every!r}"
            )
        if isinstance(callback, str | type) or not any(
            hasattr(callback, name) for name in (*HOOKS, "needs", "metrics")
        ):
            raise UserError(
                f"callbacks: {callback!r} has no hook; a callback is an object, as early_stopping(patience=3) makes one"
            )


def called(callback):
    """The name of a callback."""
    return type(callback).__name__


def notify(callbacks, hook, view, always=False):
    """Call one hook of all callbacks, whatever the epoch if `always`, and merge their answers: one stop is enough, and the last
    lr_scale counts."""
    answers = {}
    for callback in callbacks:
        if hasattr(callback, hook) and (always or is_its_turn(callback, hook, view)):
            answer = checked(callback, hook, ask(callback, hook, view))
            answers |= answer | {"stop": bool(answers.get("stop") or answer.get("stop"))}
            if answer.get("stop"):
                answers["by"] = called(callback)
    return answers


def common(answers, hook, callbacks):
    """The answers of process 0's callbacks, in every process: they may go by a clock, and what only observes runs there alone."""
    if not any(
        hasattr(c, hook) and (hook != "on_step_end" or not getattr(c, "observer", False))
        for c in callbacks
    ):
        return answers
    stop, scaled, scale = agreed(
        [
            float(bool(answers.get("stop"))),
            float("lr_scale" in answers),
            answers.get("lr_scale", 1.0),
        ]
    )
    found = {"stop": True, "by": answers.get("by", "a callback")} if stop else {}
    return found | ({"lr_scale": scale} if scaled else {})


def is_its_turn(callback, hook, view):
    """Whether a callback wants this epoch."""
    return hook not in OF_EPOCHS or view.epoch % getattr(callback, "every_n_epochs", 1) == 0


def ask(callback, hook, view):
    """What a callback answers."""
    return called_safely(callback, hook, f"in epoch {view.epoch} after step {view.step}", view)


def steps_left(callback, step):
    """The steps until a callback wants to be told of one."""
    left = called_safely(callback, "steps_left", f"after step {step}", step)
    if not isinstance(left, int) or left < 1:
        raise UserError(
            f"callbacks: {called(callback)}.steps_left answered {left!r}; it must be a whole number from 1"
        )
    return left


def called_safely(callback, method, when, argument):
    """What a method answers; if it fails, the run is told which one, where and when."""
    function = getattr(callback, method)
    try:
        return function(argument)
    except (UserError, RunError):
        raise
    except Exception as error:
        frames, own = traceback.extract_tb(error.__traceback__), getattr(function, "__code__", None)
        frame = [frame for frame in frames if own is None or frame.filename == own.co_filename][-1]
        where = f"{os.path.relpath(frame.filename)}, line {frame.lineno}: {type(error).__name__}: {error}"
        raise CallbackFailed(
            f"callbacks: {called(callback)}.{method} failed {when}: {where}"
        ) from error


def checked(callback, hook, answer):
    """The answer of a callback, if it is one."""
    where = f"callbacks: {called(callback)}.{hook}"
    if answer is not None and not isinstance(answer, dict):
        raise UserError(
            f"{where} answered {answer!r}; a callback answers nothing, or a dict of 'stop' and 'lr_scale'"
        )
    answer = answer or {}
    if unknown := answer.keys() - {"stop", "lr_scale"}:
        raise UserError(
            f"{where} answered {sorted(unknown)}; a callback may answer 'stop' and 'lr_scale'"
        )
    scale = answer.get("lr_scale", 1.0)
    try:
        sound = math.isfinite(scale) and scale >= 0
    except TypeError:
        sound = False
    if not sound:
        raise UserError(f"{where} answered lr_scale={scale!r}; it must be a number from 0")
    return answer


def memories(callbacks):
    """What the callbacks remember, as plain JSON."""
    found = []
    for callback in callbacks:
        try:
            found.append(
                [called(callback), json.loads(json.dumps(getattr(callback, "memory", None)))]
            )
        except (TypeError, ValueError) as error:
            raise UserError(
                f"callbacks: the memory of {called(callback)} is not JSON ({error}); keep plain numbers, lists and dicts"
            ) from error
    return found


def remember(callbacks, found):
    """Give each callback its memory back; with another list of callbacks than then, none has a claim to it."""
    if [called(callback) for callback in callbacks] != [name for name, _ in found]:
        logger.warning("The callbacks are not those of the checkpoint, so all of them start anew")
        return
    for callback, (_, memory) in zip(callbacks, found, strict=True):
        if hasattr(callback, "memory"):
            callback.memory = memory
