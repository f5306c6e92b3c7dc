"""Watchers: everything that happens during a run besides training itself. A log line, a checkpoint,
a callback, a signal, the divergence policy, a budget: each is a watcher, an object with any of
the methods below. The loop (training/loop.py) calls them in the order of its list. Methods whose
names begin with `on_` may return a Reply, which is the only way in which a watcher changes a run.
With several processes, the watchers of all of them must reply the same: a watcher that uses a clock
decides in process 0 and shares the decision by `agreed` of training/devices/processes.py.

When it must see the run:

steps_left(ahead)        the most steps that may pass before that, at least 1; `ahead` is an Ahead
overdue(ahead)           whether it must see the run after the next chunk, however long that is
needs_state(due, line)   whether on_chunk reads or changes the state on the device, which must then
                         be the state after run.step. Otherwise a later chunk may be in progress.
                         `due`: the chunk is as long as its steps_left, or it is overdue; `line`: a
                         log line ends
ends_line                an attribute: True if a log line ends where this watcher is due

What happens:

on_training_start(run)   before a checkpoint is restored and the initial params are evaluated
on_ready(run)            after that
on_epoch_start(run)      also when a run is resumed within an epoch; then run.position is not 0
on_compiled(run)         the training step has been compiled
on_chunk(run, report)    some steps are done; `report` is a Report
on_bad_state(run, leaf)  before a save or an evaluation: an array of the state, named `leaf`, is
                         not finite, though all losses and gradients were; the reply must go back
on_values(run, name, values)    the values of a set at the end of an epoch: "train", "test", ...
on_validation_start(run), on_validation_end(run), on_test_start(run), on_test_end(run)
on_epoch_end(run)        the epoch is trained and evaluated, and its row is in run.history
on_extra_row(run, row, values)  values outside of epochs: of the initial params, of the final test
on_pause(run)            after every other event, and between the calls of an evaluation: the
                         moments at which a run can stop
on_save(run, take, kind) a Reply requested a checkpoint: write it; `take()` returns a Snapshot,
                         the same for every watcher, which is valid until the next on_save
on_resume(run, point)    the run continues from a Point
on_stop(run)             all epochs are trained, or the run was stopped
on_stopped(run)          the save requested by on_stop, if any, has started
on_training_end(run)     the final test is done
close(run)               the run is over, however it ended; returns False if a thread is stuck
memory()                 returns a dict for the record of every checkpoint
"""

from typing import Any, NamedTuple

import numpy as np

from utils import UserError

NEVER = 2**30  # steps_left of a watcher that need not see any step
SAVES = ("best", "last", "whole")  # kinds of checkpoints; of several replies, the last kind counts
EVENTS = ("on_training_start", "on_ready", "on_epoch_start", "on_compiled", "on_chunk")
EVENTS += ("on_bad_state", "on_values")
EVENTS += ("on_validation_start", "on_validation_end", "on_test_start", "on_test_end")
EVENTS += ("on_epoch_end", "on_extra_row", "on_pause", "on_save", "on_resume", "on_stop")
EVENTS += ("on_stopped", "on_training_end")
# The events whose Reply may have a `back_to`.
GO_BACK = ("on_chunk", "on_bad_state", "on_epoch_end")


def check_watchers(watchers):
    """Refuse a method named `on_...` that would never be called."""
    for watcher in watchers:
        if isinstance(watcher, type):
            name = watcher.__name__
            raise UserError(f"watchers: {name} is a class, not a watcher; write {name}(...)")
        for name in dir(watcher):
            if name.startswith("on_") and name not in EVENTS:
                raise UserError(
                    f"watchers: {type(watcher).__name__} has {name!r}, which is not an event "
                    f"({', '.join(EVENTS)})"
                )


def steps_left(watcher, ahead):
    """The most steps that may pass before a watcher must see the run."""
    left = watcher.steps_left(ahead) if hasattr(watcher, "steps_left") else NEVER
    if not isinstance(left, int | np.integer) or left < 1:
        raise UserError(
            f"watchers: {type(watcher).__name__}.steps_left returned {left!r}; it must be an "
            "integer, at least 1"
        )
    return int(left)


def reply_of(watcher, event, *arguments):
    """Call a method of a watcher, if it has it, and return its Reply or None."""
    method = getattr(watcher, event, None)
    reply = method and method(*arguments)
    if not reply:
        return None
    place = f"watchers: {type(watcher).__name__}.{event}"
    if not isinstance(reply, Reply):
        raise UserError(f"{place} returned {reply!r}; return a Reply, or None")
    if reply.save not in (None, *SAVES):
        raise UserError(f"{place}: save is {reply.save!r}; it must be one of {', '.join(SAVES)}")
    if reply.save and event in ("on_pause", "on_save"):
        raise UserError(f"{place}: cannot reply with save; on_chunk and on_epoch_end can")
    if reply.back_to and event not in GO_BACK:
        raise UserError(f"{place}: only {', '.join(GO_BACK)} can reply with back_to")
    return reply


class Reply(NamedTuple):
    """What a watcher requests. The loop applies it before it calls the next watcher; only a
    checkpoint is saved after all watchers have replied."""

    # End the run for good, as early stopping does; with `back_to`, it can be resumed from there.
    stop: str | None = None  # the reason, for the log
    interrupt: str | None = None  # end it here, to be resumed later; the reason, such as a signal
    budget_exhausted: str | None = None  # evaluate, then end it; the option that set the budget
    # Scale every later update by this factor, which replaces an earlier one. Callbacks reply with
    # the product of theirs, so no other watcher should scale when a callback does.
    lr_scale: float | None = None
    values: dict | None = None  # {"test_...": number} to add to the evaluation that has just ended
    # Write a checkpoint of this kind, of SAVES (see Keeper.on_save); not from on_pause or on_save.
    save: str | None = None
    back_to: Any = None  # a Point to continue from; only from the events of GO_BACK


class Ahead(NamedTuple):
    """How far the steps sent to the device are; run.step is up to one chunk behind."""

    step: int
    position: int  # in the epoch
    line_position: int  # the position of the last log line
    line_time: float  # the time of the last log line, by time.monotonic


class Report(NamedTuple):
    """What a chunk of steps did."""

    steps: int
    rows: list  # the rows of each replica (training/rows.py), NumPy arrays; not those after `bad`
    bad: tuple | None  # (step, leaf number) of the first step that froze the state
    due: tuple  # the watchers that wanted to see the run here, or are overdue
    throughput: dict | None  # of the steps since the last log line, if one ends here


class Snapshot(NamedTuple):
    """A run at one moment, as a checkpoint holds it."""

    states: list  # a copied TrainState for each replica
    record: dict  # step, epoch, position and what else the loop and the watchers remember
    sums: list | None = None  # what each replica measured so far of an epoch in progress


class Point(NamedTuple):
    """A moment of a run to continue from."""

    states: list  # a TrainState for each replica
    record: dict  # as in a Snapshot
    history: list  # one row per completed epoch
    checkpoint: Any = None  # the checkpoint that it comes from
    before_first_row: bool = False  # whether the initial params have yet to be evaluated
    sums: Any = None  # the TrainingSums of an epoch in progress; None: those of the run
