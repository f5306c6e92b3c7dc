"""Watchers: everything that happens during a run besides training itself. A log line, a checkpoint,
a callback, a signal, the divergence policy, a budget: each is a watcher, an object with any of
the methods below. The loop (training/loop.py) calls them in the order of its list. Those that
begin with `on_` may return a Reply, which is the only way in which a watcher changes a run. With
several processes, the watchers of all of them must reply the same: a watcher that goes by a clock
decides in process 0 and shares that by `agreed` of training/devices/processes.py.

When it must see the run:

steps_left(ahead)        the most steps that may pass before that, from 1; `ahead` is an Ahead
overdue(ahead)           whether it must see the run after the next chunk, however long that is
needs_state(due, line)   whether on_chunk reads or changes the state on the device, which must then
                         be that of run.step. Otherwise a later chunk may be in progress already.
                         `due`: steps_left has run down, or it is overdue; `line`: a log line ends
ends_line                an attribute: True if a log line ends where this watcher is due

What happens:

on_training_start(run)   before a checkpoint is restored and the initial params are evaluated
on_ready(run)            after that
on_epoch_start(run)      also when a run is resumed within an epoch; then run.position is not 0
on_compiled(run)         the training step is compiled
on_chunk(run, report)    some steps are done; `report` is a Report
on_values(run, name, values)    the values of a set at the end of an epoch: "train", "test", ...
on_validation_start(run), on_validation_end(run), on_test_start(run), on_test_end(run)
on_epoch_end(run)        the epoch is trained, evaluated, and in run.history
on_extra_row(run, row, values)  values outside of epochs: of the initial params, of the final test
on_pause(run)            after every other event, and between the calls of an evaluation: the
                         moments at which a run can stop
on_save(run, take, kind) a Reply asked for a checkpoint: write it; `take()` returns a Snapshot
on_resume(run, point)    the run continues from a Point
on_stop(run)             all epochs are trained, or the run was stopped
on_stopped(run)          what the replies to on_stop asked to save is being written
on_training_end(run)     the final test is done
close(run)               the run is over, however it ended; returns False if something is stuck
memory()                 returns a dict for the record of every checkpoint
"""

from typing import Any, NamedTuple

from utils import UserError

NEVER = 2**30  # steps_left of a watcher that need not see any step
SAVES = ("best", "last", "whole")  # kinds of checkpoints; of several replies, the last kind counts
EVENTS = ("on_training_start", "on_ready", "on_epoch_start", "on_compiled", "on_chunk", "on_values")
EVENTS += ("on_validation_start", "on_validation_end", "on_test_start", "on_test_end")
EVENTS += ("on_epoch_end", "on_extra_row", "on_pause", "on_save", "on_resume", "on_stop")
EVENTS += ("on_stopped", "on_training_end")


def check_watchers(watchers):
    """Refuse a method that would never be called."""
    for watcher in watchers:
        for name in dir(watcher):
            if name.startswith("on_") and name not in EVENTS:
                raise UserError(
                    f"watchers: {type(watcher).__name__} has {name!r}, which is no event "
                    f"({', '.join(EVENTS)})"
                )


class Reply(NamedTuple):
    """What a watcher wants. All of it is done at once, but a checkpoint is saved after all watchers
    have replied."""

    stop: str | None = None  # end the run for good, as early stopping does; the reason, for the log
    interrupt: str | None = None  # end it here, to be resumed later; the reason, such as a signal
    out_of: str | None = None  # end it with an evaluation: this budget (an option) is used up
    lr_scale: float | None = None  # multiply all later updates by this
    values: dict | None = None  # {"test_...": number} to add to the evaluation that has just ended
    save: str | None = None  # write a checkpoint of this kind, of SAVES (see Keeper.on_save)
    back_to: Any = None  # a Point to continue from


class Ahead(NamedTuple):
    """How far the steps are that were given to the device; run.step is up to one chunk behind."""

    step: int
    position: int  # in the epoch
    lined: int  # the position of the last log line
    lined_at: float  # when that was, by time.monotonic


class Report(NamedTuple):
    """What a chunk of steps did."""

    steps: int
    sums: list  # the sums of each replica, NumPy arrays
    bad: tuple | None  # (step, leaf number) of the first step that froze the state
    due: tuple  # the watchers whose steps_left has run down
    line: dict | None  # the rates of the steps since the last log line, if one ends here


class Snapshot(NamedTuple):
    """A run at one moment, as a checkpoint holds it."""

    states: list  # a copied TrainState for each replica
    record: dict  # step, epoch, position and what else the loop and the watchers remember


class Point(NamedTuple):
    """A moment of a run to continue from."""

    states: list  # a TrainState for each replica
    record: dict  # as in a Snapshot
    history: list  # one row per completed epoch
    checkpoint: Any = None  # the checkpoint that it comes from
    before_first_row: bool = False  # whether the initial params are still to be evaluated
