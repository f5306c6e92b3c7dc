"""Watchers: everything that happens during a run besides training itself. A log line, a checkpoint, a
callback, a signal, the divergence policy, a time budget: each is a watcher, an object with any of
these methods. The loop (training/loop.py) calls them in the order of its list.

steps_left(ahead)        the most steps that may pass before it must see the run, from 1; `ahead` is
                         an Ahead
overdue(ahead)           whether it must see the run after the next chunk, however long that is
needs_state(due, line)   whether on_chunk must see the state of this very step, so that no later chunk
                         may have begun; `due`: steps_left has run down, `line`: a log line ends here
on_chunk(run, report)    some steps are done; `report` is a Report
on_pause(run)            between two calls of a program, in training and in evaluation: may the run go on?
on_training_start(run), on_ready(run), on_epoch_start(run), on_compiled(run), on_validation_start(run),
on_validation_end(run), on_test_start(run), on_test_end(run), on_epoch_end(run), on_stop(run),
on_stopped(run), on_training_end(run)
                         these moments; between on_training_start and on_ready the run takes the state
                         of a checkpoint and evaluates its initial params; on_stop comes when all
                         epochs are trained, or the run was stopped, on_stopped once that is saved
on_values(run, name, values)    the values of a set at the end of an epoch: "train", "test", ...
on_extra_row(run, row, values)  values outside of epochs: of the initial params, of the final test
on_save(run, take, kind) somebody's Reply asks for a checkpoint; `take()` returns a Snapshot
on_resume(run, point)    the run continues from a Point
memory()                 a dict for the record of every checkpoint
close(run)               the run is over, in whatever way; False: something of it is stuck

All of the `on_` methods may return a Reply. That is the only way in which a watcher changes a run.
A watcher that ends the log lines' window has an attribute `ends_line = True`.
"""

from typing import Any, NamedTuple


class Reply(NamedTuple):
    """What a watcher wants."""

    stop: str | None = None  # end the run for good; who or what wants it, for the log
    interrupt: str | None = None  # stop here, and resume later; by a signal, for instance
    lr_scale: float | None = None  # multiply all later updates by this
    save: str | None = None  # write a checkpoint: "last", "best" or "whole" (see Keeper.on_save)
    back_to: Any = None  # a Point to continue from


class Ahead(NamedTuple):
    """How far the steps are that were given to the device; the run's own fields are one chunk behind."""

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
