"""Observers: everything that happens during a run besides training itself. A log line, a
checkpoint, a tracker, the policy for steps that are not finite, a callback of the user: each is an
object with any of these attributes and methods. The loop (training/loop.py) calls the methods in
the order of its list, each with the run, of which everything can be read and nothing can be set
(training/watching/view.py).

every     when `on_steps` is called, and at which evaluations of held-out sets `on_evaluated`, as
          data. {"steps": n}: after every n-th step of the run; {"batches": n}: after every n-th
          batch of an epoch; {"epochs": n}; {"at": step}: once; {"seconds": s}: after the first
          chunk that ends so much later than the last time (no evaluation is chosen by seconds);
          {}: never. Several keys: after each of these. Without it, or if it is None: at log lines,
          and at all evaluations. An object may set another one in any of its methods
late      True: it reads only reported numbers. It is called in process 0 alone and returns nothing,
          and the next chunk may already be running. All other observers are called in every
          process, before further steps are sent
memory    what it must remember: JSON, which every checkpoint holds, and which a resumed run sets
          again after `on_start`

on_start(run)                     before the first step; a run that is resumed is at its checkpoint
on_batch(run, batch)              after each step, with its raw batch; a chunk then has one step
on_steps(run)                     some steps are done, and `every` is due
on_evaluated(run, name, values)   a set was evaluated, or an epoch of "train" is done
on_row(run, row)                  all values of an epoch, or of an evaluation, are known: {name:
                                  number} with "epoch" and "step", and a key that says which row it
                                  is: "end_of_epoch", "evaluation" (within an epoch), "initial" (of
                                  the initial params) or "final" (at the end)
on_bad(run, bad)                  a step, or the state, is not finite; `bad` is a Bad. With
                                  on_nonfinite=skip, only the first of a chunk is reported
on_save(run, take, kind)          write a checkpoint of this kind; `take()` returns a Snapshot
on_end(run)                       training has ended, and its last checkpoint is being written; the
                                  test of test_at=end follows
close(run)                        the run is over, however it ended; False: a thread is stuck

All methods but the last three may return a dict, which is the only way to change the run:

stop      True, or the reason: end the run for good, as early stopping does
pause     the reason: end the run here, to be resumed later, as after a signal
evaluate  True: evaluate the held-out sets here; only from `on_steps`
save      "last": write a checkpoint here; "best": one that is kept only as long as it is among the
          best; "whole": one from which the run can be resumed, whatever the options say; only from
          `on_start`, `on_steps` and `on_row`; at a "final" row, the last one is already written
values    {"test_x": number}, from `on_evaluated` alone: they join the metrics of the set
lr_scale  a factor for every later update, instead of the one that this object returned before; the
          factors of all observers are multiplied
back_to   a Point to continue from, only from `on_bad`

At a boundary, the observers that are due reply, then the sets are evaluated that are due, then a
checkpoint is written. Of several replies, a signal comes first, then the first `back_to`, then
`stop`; the others are merged.

Other attributes of callbacks, all optional:

monitor         the name of a metric, which is checked before the run
needs           what must be measured for it, of training.metrics.NEEDS: "gradient_norm", ...
lowers_rate     True: it may return an lr_scale, so that a run with `lookahead` is refused at once
reports         the names of the values that it returns, such as ("val_auc",), which a `monitor` may
                then name; or a function that returns them from the names of the held-out sets
metrics         {label: tracked(function, mode, ...)}: measured with the others, on the device; the
                results are in `run.arrays`
check           (model, data): may raise a UserError before the run has a folder; `data` is a Data
                (data_loader/base.py), or the training set of `fit`
restore_best    True: a run that has ended returns the weights and the values of its best checkpoint
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from jax.tree_util import tree_structure

from data_loader.nest import map_nest
from training.base import Tracked, TrainState
from training.metrics import NEEDS
from training.options import Every
from utils import RunError, UserError, cut, relative_path
from utils.files import is_alike
from utils.forms import Misfit, form

if TYPE_CHECKING:
    from training.checkpoint.storage import Checkpoint
    from training.recipe import Recipe
    from training.rows import TrainingSums
    from training.watching.view import View

logger = logging.getLogger("main")

NEVER = 2**30  # steps until an observer is due that need not see any step
SAVES = ("best", "last", "whole")  # kinds of checkpoints; of several, the one further right counts
# {method: its arguments}
EVENTS = {
    "on_start": ("run",),
    "on_batch": ("run", "batch"),
    "on_steps": ("run",),
    "on_evaluated": ("run", "name", "values"),
    "on_row": ("run", "row"),
    "on_bad": ("run", "bad"),
    "on_save": ("run", "take", "kind"),
    "on_end": ("run",),
}
REPLYING = tuple(event for event in EVENTS if event not in ("on_save", "on_end"))
TRUTHS = ("stop", "pause", "evaluate", "save")
# {what a reply may have: the methods that may return it}
REPLIES = dict.fromkeys(("stop", "pause", "lr_scale"), REPLYING) | {
    "evaluate": ("on_steps",),
    "save": ("on_start", "on_steps", "on_row"),
    "values": ("on_evaluated",),
    "back_to": ("on_bad",),
}
LARGEST = 3.4e38  # about the largest number of float32


EVERY_EPOCH: Every = {"epochs": 1}


class Bad(NamedTuple):
    """What is not finite: in a step of a replica, or in the state of a replica after a step."""

    step: int  # of a bad step, how many steps came before it; of a state, how many were taken
    leaf: str  # the name of the first array that is not finite
    replica: int
    of_state: bool  # whether it is in the state, though all losses and gradients were finite


class Snapshot(NamedTuple):
    """A run at one moment, as a checkpoint holds it."""

    states: list[TrainState]  # a copy for each replica
    record: dict[
        str, Any
    ]  # step, epoch, position and what else the loop and the observers remember
    sums: list[dict[str, Any]] | None = (
        None  # what each replica measured so far of an epoch in progress
    )


class Point(NamedTuple):
    """A moment of a run to continue from."""

    states: list[TrainState]  # one for each replica
    record: dict[str, Any]  # as in a Snapshot
    history: list[dict[str, Any]]  # one row per completed epoch
    checkpoint: Checkpoint | None = None  # the checkpoint that it comes from
    before_first_row: bool = False  # whether the initial params have yet to be evaluated
    sums: TrainingSums | None = None  # of an epoch in progress; None: those of the run


# When an observer is called.


def name_of(observer: Any) -> str:
    """The name of an observer in messages."""
    return type(observer).__name__


def every_of(observer: Any) -> Every | None:
    return getattr(observer, "every", None)


def steps_left(every: Every | None, step: int, position: int) -> int:
    """The steps until this is due by the number of steps alone."""
    every, left = every or {}, [NEVER]
    if "steps" in every:
        left.append(every["steps"] - step % every["steps"])
    if "batches" in every:
        left.append(every["batches"] - position % every["batches"])
    if "at" in every and every["at"] > step:
        left.append(every["at"] - step)
    return min(left)


def is_due_at_end(every: Every | None, epoch: int) -> bool:
    """Whether this is due at the end of an epoch."""
    return bool(every) and "epochs" in every and epoch % every["epochs"] == 0


# Replies.


def most_complete(*kinds: str | None) -> str | None:
    """The kind of a checkpoint that satisfies all of these requests, some of which may be None."""
    return max([kind for kind in kinds if kind], key=SAVES.index, default=None)


class Replies(NamedTuple):
    """What the observers replied to one event."""

    back_to: Point | None = None
    stop: str | None = None
    pause: str | None = None
    evaluate: bool = False
    save: str | None = None
    values: Mapping[str, int | float] = MappingProxyType({})
    lr_scales: Mapping[str, float] = MappingProxyType({})  # {key of the observer: its factor}

    def with_reply(self, key: str, reply: dict[str, Any]) -> Replies:
        """These replies and the one of the observer with this key."""
        stop = reply.get("stop")
        scale = {key: float(reply["lr_scale"])} if "lr_scale" in reply else {}
        return Replies(
            self.back_to or reply.get("back_to"),
            self.stop or (key if stop is True else stop or None),
            self.pause or reply.get("pause"),
            self.evaluate or bool(reply.get("evaluate")),
            most_complete(self.save, reply.get("save")),
            {**self.values, **reply.get("values", {})},
            {**self.lr_scales, **scale},
        )


def reply_of(observer: Any, event: str, run: View, *details: Any) -> dict[str, Any]:
    """Call a method of an observer, and return its reply as a dict. If the method fails, the error
    names it, the line and when."""
    function = getattr(observer, event)
    try:
        reply = function(run, *details)
    except (UserError, RunError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        code = getattr(function, "__code__", None)
        own = [f for f in frames if code is None or f.filename == code.co_filename]
        frame = (own or frames)[-1]
        where = f"{relative_path(frame.filename)}, line {frame.lineno}"
        raise CallbackFailed(
            f"callbacks: {name_of(observer)}.{event} failed in epoch {run.epoch} after step "
            f"{run.step}: {where}: {type(error).__name__}: {error}"
        ) from error
    return checked_reply(observer, event, reply)


class CallbackFailed(Exception):
    """An observer raised something that is neither a UserError nor a RunError."""


def checked_reply(observer: Any, event: str, reply: object) -> dict[str, Any]:
    """A reply as a dict; raise if it is not valid."""
    where = f"callbacks: {name_of(observer)}.{event}"
    if reply is None:
        return {}
    known = ", ".join(map(repr, REPLIES))
    if not isinstance(reply, dict):
        raise UserError(f"{where} returned {reply!r}; return nothing, or a dict of {known}")
    if unknown := reply.keys() - {*REPLIES}:
        raise UserError(f"{where} returned {sorted(unknown)}; a reply may have {known}")
    if reply and getattr(observer, "late", False):
        raise UserError(f"{where} returned {reply!r}; with `late`, it cannot change the run")
    reply = reply | {key: as_number(reply[key]) for key in reply.keys() & {*TRUTHS}}
    for key in reply.keys() & {*TRUTHS}:
        if not isinstance(reply[key], bool | str | None):
            raise UserError(
                f"{where} returned {key}={reply[key]!r}; it must be True, False or text"
            )
    if reply.get("save") not in (None, True, False, *SAVES):
        raise UserError(f"{where} returned save={reply['save']!r}; allowed: {', '.join(SAVES)}")
    for key in [key for key in reply if event not in REPLIES[key]]:
        raise UserError(f"{where} returned {key}, which only {', '.join(REPLIES[key])} may return")
    reply = reply | {"save": "last" if reply.get("save") is True else reply.get("save") or None}
    if "values" in reply:
        reply = reply | {"values": checked_values(where, reply["values"])}
    scale: Any = reply.get("lr_scale", 1.0)
    with suppress(TypeError, ValueError):
        if 0 <= scale <= LARGEST:
            return reply
    raise UserError(f"{where} returned lr_scale={scale!r}; it must be from 0 to {LARGEST:.1e}")


def checked_values(where: str, values: object) -> dict[str, int | float]:
    """{name: number} that a method returned."""
    if isinstance(values, dict) and all(re.match(r"[a-z0-9-]+_", str(name)) for name in values):
        numbers = {name: as_number(value) for name, value in values.items()}
        if all(isinstance(value, int | float) for value in numbers.values()):
            return numbers
    raise UserError(f'{where} returned values={values!r}; they must be {{"test_x": number}}')


# What observers remember.


def as_number(value: Any) -> Any:
    """A number of NumPy or JAX, or an array that is one number, as a number of Python; anything
    else unchanged."""
    return value.item() if getattr(value, "shape", None) == () else value


def keys_of(observers: Sequence[Any]) -> list[str]:
    """A name for each observer, by which a checkpoint knows it: its type, numbered from the second
    one of a type on."""
    keys = []
    for observer in observers:
        name = name_of(observer)
        count = sum(is_of_type(key, name) for key in keys)
        keys.append(f"{name} {count + 1}" if count else name)
    return keys


def is_of_type(key: str, name: str) -> bool:
    """Whether a key is that of an observer whose type has this name."""
    return key.split(" ")[0] == name


def memories(observers: Sequence[Any]) -> dict[str, Any]:
    """{key: what an observer remembers}, as plain JSON."""
    found = {}
    for key, observer in zip(keys_of(observers), observers, strict=True):
        if not hasattr(observer, "memory"):
            continue
        try:
            memory = map_nest(as_number, observer.memory)
            copy = json.loads(json.dumps(memory))
            if tree_structure(copy) != tree_structure(memory):
                raise TypeError("it holds a tuple, or a key that is not text")
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"callbacks: the memory of {name_of(observer)} is not JSON ({error}); "
                "keep plain numbers, lists and dicts"
            ) from error
        found[key] = copy
    return found


def remember(observers: Sequence[Any], stored: Mapping[str, Any], path: Path | None = None) -> None:
    """Give each observer its memory from a checkpoint back; one at a `path` may be of another
    program, so its form is checked."""
    remembering = [hasattr(observer, "memory") for observer in observers]
    pairs = zip(keys_of(observers), observers, remembering, strict=True)
    own = {key: observer for key, observer, remembers in pairs if remembers}
    for key, observer in own.items():
        count, before = (
            sum(is_of_type(k, name_of(observer)) for k in each) for each in (own, stored)
        )
        if count != before or key not in stored:  # which is whose is not known
            why = f"{before or 'none'} of the checkpoint, {count} of this run"
            logger.warning("%s: %s, so its memory starts empty", key, why)
            continue
        memory = stored[key]
        if path and not is_alike(memory, map_nest(as_number, observer.memory)):
            found, like = cut(repr(memory), 200), observer.memory
            why = f"{found} is not a memory of {key}, such as {like!r}"
            raise UserError(f"{path}: callbacks: {why}")
        observer.memory = memory


# Checks before a run.


def check_observers(observers: Sequence[Any]) -> None:
    """Refuse what is no observer: a method that would never be called, an `every` that is never
    due, a need that is never measured."""
    if not isinstance(observers, list | tuple):
        raise UserError(f"callbacks: must be a list, got {observers!r}")
    for observer in observers:
        if isinstance(observer, type):
            name = observer.__name__
            raise UserError(f"callbacks: {name} is a class; pass an object: {name}(...)")
        place = f"callbacks: {name_of(observer)}"
        for event in dir(observer):
            if event.startswith("on_"):
                check_method(place, observer, event)
        has_any = any(hasattr(observer, each) for each in (*EVENTS, "close", "needs", "metrics"))
        if not has_any:
            raise UserError(
                f"callbacks: {observer!r} has no method that is called ({', '.join(EVENTS)}); "
                "a callback is an object, as early_stopping(patience=3) returns one"
            )
        try:
            form(Every | None).read(every_of(observer), f"{place}.every")
        except Misfit as misfit:
            fix = "set None, or a dict such as {'steps': 100} or {'epochs': 1}"
            raise UserError(f"{misfit}; {fix}") from None
        only_evaluated = hasattr(observer, "on_evaluated") and not hasattr(observer, "on_steps")
        if only_evaluated and "seconds" in (every_of(observer) or {}):
            fix = "evaluations are chosen by steps, batches or epochs"
            raise UserError(f"{place}.every: by seconds, it would never be called; {fix}")
        check_reports(place, observer)
        for need in getattr(observer, "needs", ()):
            if need not in NEEDS:
                raise UserError(
                    f"{place} needs {need!r}, which is not measured ({', '.join(NEEDS)})"
                )
        for label, rule in getattr(observer, "metrics", {}).items():
            if not isinstance(rule, Tracked):
                where = f"{place}.metrics[{label!r}]"
                raise UserError(f"{where} must be tracked(function, ...) of training.base")


def check_method(place: str, observer: Any, event: str) -> None:
    """Refuse a method that is never called, or that does not take its arguments."""
    if event not in EVENTS:
        known = ", ".join(EVENTS)
        raise UserError(f"{place} has {event!r}, which is not called ({known})")
    with suppress(ValueError):  # Python knows no signature
        try:
            inspect.signature(getattr(observer, event)).bind(*EVENTS[event])
        except TypeError as error:
            form = f"def {event}(self, {', '.join(EVENTS[event])})"
            raise UserError(f"{place}.{event} must take its arguments: {form}") from error


def check_reports(place: str, observer: Any) -> None:
    """Refuse names of values that an observer cannot return."""
    names = getattr(observer, "reports", ())
    if callable(names):
        return
    is_names = isinstance(names, list | tuple)
    if not is_names or not all(re.match("[a-z0-9-]+_", str(name)) for name in names):
        form = '("val_auc",)'
        raise UserError(f"{place}.reports must be names as {form}, got {names!r}")
    if names and not hasattr(observer, "on_evaluated"):
        raise UserError(f"{place} reports {names[0]!r}, and has no on_evaluated to return it")


def reported_by(observer: Any, sets: Sequence[str]) -> list[str]:
    """The names of the values that an observer reports about these held-out sets."""
    names: Any = getattr(observer, "reports", ())
    names = names(sets) if callable(names) else names
    return [name for name in names if name.split("_")[0] in sets]


def check_callbacks(recipe: Recipe, data: Any) -> None:
    """Let callbacks refuse a model, or a Data or dataset, before the run has a folder."""
    for callback in recipe.callbacks:
        if hasattr(callback, "check"):
            callback.check(recipe.model, data)
