"""Callbacks. A callback is any object with some of these hooks, each called with a View of the run
(view.py): on_training_start, on_epoch_start, on_step_end, on_validation_start, on_validation_end,
on_test_start, on_test_end, on_epoch_end, on_training_end

on_step_end is called at every log line within an epoch; the View's `per_step` has the values of
each step since the previous line.

A callback changes the run only by its return value: {"stop": True}; {"lr_scale": 0.5}, its factor
for every later update, instead of its earlier one (the factors of several callbacks are
multiplied); from on_validation_end and on_test_end also {"values": {"test_x": 0.9}}, which join the
metrics of the set. What it must remember is JSON in an attribute `memory`: every
checkpoint holds it, and a resumed run sets it again after on_training_start. Other attributes, all
optional:

monitor         the name of a metric, which is checked before the run
every_n_epochs  call the hooks of epochs, validation and test only in every n-th epoch
needs           what must be measured for it, of training.metrics.NEEDS: "gradient_norm", ...
lowers_rate     True: it may return an lr_scale, so that a run with `lookahead` is refused at once
reports         the names of the values that it returns, such as ("val_auc",), which a `monitor` may
                then name; or a function that returns them from the names of the held-out sets
metrics         {label: tracked(function, mode, ...)}: measured with the others, on the device; the
                results are in the View's `arrays`
observer        True: its on_step_end returns nothing and does not read states(), so that the steps
                need not wait for it. With several processes only process 0 calls it; all other
                callbacks are called in each process, and the values returned in process 0 are used
check           (model, data): may raise a UserError before the run has a folder; `data` is a Data
                (data_loader/base.py), or the training set of `fit`
restore_best    True: a run that has ended returns the weights and the values of its best checkpoint
steps_left      step -> steps until its on_step_end must be called, besides the log lines

To add a callback, write a function that returns such an object, annotated `-> Callback`, in
training/watching/callbacks/, and name it in the config.
"""

import logging
import math
import re
import traceback
from contextlib import suppress

from training.devices.processes import agreed, from_first, is_first, several
from training.transforms import check_rate
from training.watchers import NEVER, Reply
from training.watching.memory import as_number, callback_name, memories, remember
from utils import RunError, UserError, relative_path

logger = logging.getLogger("main")

OF_EPOCHS = ("on_epoch_start", "on_validation_start", "on_validation_end", "on_test_start")
OF_EPOCHS += ("on_test_end", "on_epoch_end")
AFTER_EVALUATION = ("on_validation_end", "on_test_end")  # only these may return values
LARGEST = 3.4e38  # about the largest number of float32
HOOKS = ("on_training_start", "on_step_end", *OF_EPOCHS, "on_training_end")


class CallbackFailed(Exception):
    """A callback raised something that is neither a UserError nor a RunError."""


class Callbacks:
    """The watcher that calls the user's callbacks."""

    def __init__(self, callbacks, view, optimizer=None):
        self.all, self.view, self.optimizer = callbacks, view, optimizer
        # {id of a callback: its latest lr_scale}. The key None holds the scale of the checkpoint of
        # a resumed run whose callbacks were others.
        self.keys = [None, *map(id, callbacks)]
        self.scales = dict.fromkeys(self.keys, 1.0)
        self.replying = any(hasattr(c, "on_step_end") and not is_observer(c) for c in callbacks)
        self.waiting = 0  # a bit for each callback whose steps_left is the least

    def steps_left(self, ahead):
        planners = [(i, c) for i, c in enumerate(self.all) if hasattr(c, "steps_left")]
        left = {i: steps_left(c, ahead.step) for i, c in planners if is_called_here(c)}
        least = min(left.values(), default=NEVER)
        self.waiting = sum(1 << i for i, n in left.items() if n == least)
        return least

    def needs_state(self, due, line):
        return due or (line and self.replying)

    def on_chunk(self, run, report):
        if report.throughput:
            return self.call("on_step_end")
        if self in report.due:  # process 0 decides which callbacks are due; they may use its clock
            [bits] = agreed([self.waiting])
            due = [callback for i, callback in enumerate(self.all) if bits >> i & 1]
            return self.call("on_step_end", due)
        return None

    def call(self, hook, callbacks=None, always=False):
        """Call a hook of every callback, or of `callbacks`, and return their replies as a Reply."""
        callbacks = self.all if callbacks is None else callbacks
        replies = notify(filter(is_called_here, callbacks), hook, self.view, always)
        if replies["lr_scales"]:
            check_rate(self.optimizer, "callbacks: an lr_scale", "use a schedule")
        self.scales |= replies["lr_scales"]
        scale = math.prod(self.scales.values()) if replies["lr_scales"] else None
        reply = Reply(replies["stop"], lr_scale=scale, values=replies["values"])
        return common(reply, hook, callbacks) if several() else reply

    def on_training_start(self, run):
        return self.call("on_training_start")

    def on_epoch_start(self, run):
        return None if run.position else self.call("on_epoch_start")

    def on_epoch_end(self, run):
        check_reported(self.all, self.view)
        return self.call("on_epoch_end")

    def on_training_end(self, run):
        return self.call("on_training_end")

    # The test at the end of a run is for all callbacks, whatever their every_n_epochs.

    def on_validation_start(self, run):
        return self.call("on_validation_start", always=run.untested)

    def on_validation_end(self, run):
        return self.call("on_validation_end", always=run.untested)

    def on_test_start(self, run):
        return self.call("on_test_start", always=run.untested)

    def on_test_end(self, run):
        return self.call("on_test_end", always=run.untested)

    def memory(self):
        scales = [self.scales[key] for key in self.keys]
        return {"callbacks": memories(self.all), "lr_scales": scales}

    def on_resume(self, run, point):
        if point.checkpoint:
            same = remember(self.all, point.record["callbacks"], point.checkpoint.paths[0])
            # Earlier versions wrote no scales: the next lr_scale replaces that of the checkpoint.
            scales = point.record.get("lr_scales") or [1.0] * len(self.keys)
            if not same:
                scales = [float(point.states[0].lr_scale), *[1.0] * len(self.all)]
            self.scales = dict(zip(self.keys, scales, strict=True))


def is_observer(callback):
    return getattr(callback, "observer", False)


def is_called_here(callback):
    """Whether this process calls a callback."""
    return is_first() or not is_observer(callback)


def notify(callbacks, hook, view, always=False):
    """Call one hook of the callbacks that have it and whose turn it is, or of all that have it if
    `always`. Merge what they return: {"stop": the name of the last that stops the run, or None,
    "values": of all, "lr_scales": {id of a callback: its lr_scale}}."""
    replies = {"stop": None, "values": {}, "lr_scales": {}}
    for callback in callbacks:
        if hasattr(callback, hook) and (always or is_its_turn(callback, hook, view)):
            when = f"in epoch {view.epoch} after step {view.step}"
            reply = checked(callback, hook, called_safely(callback, hook, when, view))
            replies["stop"] = callback_name(callback) if reply.get("stop") else replies["stop"]
            replies["values"] |= reply.get("values", {})
            if "lr_scale" in reply:
                replies["lr_scales"][id(callback)] = float(reply["lr_scale"])
    return replies


def reported_by(callback, sets):
    """The names of the values that a callback reports about these held-out sets."""
    names = getattr(callback, "reports", ())
    names = names(sets) if callable(names) else names
    return [name for name in names if name.split("_")[0] in sets]


def check_reported(callbacks, view):
    """Refuse an epoch that ends without a value that a callback reports, since early stopping, or
    the choice of the best checkpoint, may wait for it."""
    for callback in (c for c in callbacks if hasattr(c, "reports")):
        for name in reported_by(callback, view.evaluated):
            if name not in view.metrics and is_its_turn(callback, "on_epoch_end", view):
                hook = f"on_{'test' if name.startswith('test_') else 'validation'}_end"
                raise UserError(
                    f"callbacks: {callback_name(callback)} reports {name!r}, but epoch "
                    f"{view.epoch} has no such value; {hook} must return "
                    f'{{"values": {{{name!r}: number}}}}'
                )


def common(reply, hook, callbacks):
    """The Reply of process 0, in every process: callbacks may use a clock, and observers run only
    in process 0."""
    calls = (hasattr(c, hook) and (hook != "on_step_end" or not is_observer(c)) for c in callbacks)
    if not any(calls):
        return reply
    numbers = [reply.stop is not None, reply.lr_scale is not None, reply.lr_scale or 0.0]
    stop, scaled, scale = agreed([float(number) for number in numbers])
    stop, values = (reply.stop or "a callback") if stop else None, reply.values
    if hook in AFTER_EVALUATION:
        values = from_first(lambda: {name: float(value) for name, value in values.items()})
    return reply._replace(stop=stop, lr_scale=scale if scaled else None, values=values)


def is_its_turn(callback, hook, view):
    """Whether a hook of a callback is called in this epoch, by its every_n_epochs."""
    return hook not in OF_EPOCHS or view.epoch % getattr(callback, "every_n_epochs", 1) == 0


def steps_left(callback, step):
    """The steps until a callback must see the run."""
    left = called_safely(callback, "steps_left", f"after step {step}", step)
    if not isinstance(left, int) or left < 1:
        where = f"callbacks: {callback_name(callback)}.steps_left"
        raise UserError(f"{where} returned {left!r}; it must be a whole number from 1")
    return left


def called_safely(callback, method, when, argument):
    """The return value of a method; if it fails, the error names the method, the line and when."""
    function = getattr(callback, method)
    try:
        return function(argument)
    except (UserError, RunError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        code = getattr(function, "__code__", None)
        own = [f for f in frames if code is None or f.filename == code.co_filename]
        frame = (own or frames)[-1]
        where = f"{relative_path(frame.filename)}, line {frame.lineno}"
        raise CallbackFailed(
            f"callbacks: {callback_name(callback)}.{method} failed {when}: "
            f"{where}: {type(error).__name__}: {error}"
        ) from error


def checked(callback, hook, reply):
    """A callback's return value as a dict; raises if it is not valid."""
    where = f"callbacks: {callback_name(callback)}.{hook}"
    if reply is not None and not isinstance(reply, dict):
        needed = "nothing, or a dict of 'stop', 'lr_scale' and 'values'"
        raise UserError(f"{where} returned {reply!r}; a callback returns {needed}")
    reply = reply or {}
    if unknown := reply.keys() - {"stop", "lr_scale", "values"}:
        known = "'stop', 'lr_scale' and 'values'"
        raise UserError(f"{where} returned {sorted(unknown)}; a callback may return {known}")
    reply = reply | {"values": checked_values(where, reply.get("values", {}), hook)}
    scale = reply.get("lr_scale", 1.0)
    with suppress(TypeError, ValueError):
        if 0 <= scale <= LARGEST:
            return reply
    raise UserError(f"{where} returned lr_scale={scale!r}; it must be from 0 to {LARGEST:.1e}")


def checked_values(where, values, hook):
    """{name: number} that a hook returned. Refuse values that are not numbers, or that come
    from a hook that follows no evaluation."""
    is_dict = isinstance(values, dict)
    if is_dict and values and hook not in AFTER_EVALUATION:
        raise UserError(f"{where} returned values; only {' and '.join(AFTER_EVALUATION)} may")
    if is_dict and all(re.match(r"[a-z0-9-]+_", str(name)) for name in values):
        plain = {name: as_number(value) for name, value in values.items()}
        if all(isinstance(value, int | float) for value in plain.values()):
            return plain
    raise UserError(f'{where} returned values={values!r}; they must be {{"test_x": number}}')
