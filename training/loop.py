"""The training loop: for every epoch, for every chunk of steps, for every observer. It is the only
code that advances a run, and only this file changes a Run; observers request changes by what they
return (training/observers.py)."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from training.base import Weights
from training.observers import (
    NEVER,
    Bad,
    Every,
    Point,
    Replies,
    Snapshot,
    every_of,
    is_due_at_end,
    keys_of,
    memories,
    most_complete,
    name_of,
    remember,
    reply_of,
    reported_by,
    steps_left,
)
from training.processes import agreed, from_first, is_first, several
from training.rows import GOOD, Row
from training.run import Clock, Reader, Run, examples_of
from training.transforms import check_rate
from training.update import bad_leaf_name
from utils import RunError, UserError, first_line

if TYPE_CHECKING:
    from training.checkpoint.keeper import Best
    from training.devices.signals import Signals
    from training.engine import Called
    from training.recipe import Recipe
    from training.watching.view import View

logger = logging.getLogger("main")

AT_END = ("epoch", "evaluation")  # values of Run.open_at at the end of an epoch
CHUNK_SECONDS = 0.5  # of work in a chunk; a signal ends the run after at most two chunks


class Chunk(NamedTuple):
    """Steps that were sent to the device and whose rows have not been read yet."""

    steps: int
    position: int  # in the epoch, after these steps
    calls: list[Called]
    due: list[int]  # the numbers of the observers that are due after these steps
    line: bool  # whether a log line ends with these steps
    evaluate: bool  # whether the held-out sets are evaluated after these steps
    ends: bool  # whether the seconds of the run are over
    sending: tuple[float, float]  # what the clock measured while they were sent


class Boundary(NamedTuple):
    """What is still to be done at a step after the observers have replied."""

    evaluate: bool = False
    save: str | None = None


class Loop:
    """One run. `view` is the run as observers see it, `reader` names its values,
    `learning_rates(step)` are those of a step, `signals` are those that end a run, and `best()`
    returns the Best of the run, or None."""

    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        observers: Sequence[Any],
        view: View,
        reader: Reader,
        clock: Clock,
        learning_rates: Callable[[int], dict[str, float]],
        signals: Signals,
        best: Callable[[], Best | None] | None = None,
    ) -> None:
        self.run, self.trainer, self.recipe, self.observers = run, run.trainer, recipe, observers
        self.view, self.reader, self.clock = view, reader, clock
        self.learning_rates, self.signals, self.best = learning_rates, signals, best
        self.keys = keys_of(observers)
        self.late = [getattr(each, "late", False) for each in observers]
        self.sees_batches = any(hasattr(each, "on_batch") for each in observers)
        self.in_epochs = recipe.sets_before_end(self.trainer.feeds)  # the sets to evaluate there
        self.line_every: Every = {}
        if recipe.logging.every_steps:
            self.line_every["batches"] = recipe.logging.every_steps
        if recipe.logging.every_seconds:
            self.line_every["seconds"] = recipe.logging.every_seconds
        self.eval_every: Every = recipe.training.evaluations()
        self.times = {}  # {what is due by seconds: the time when it was due last}
        self.scales = {}  # {key of an observer: the lr_scale that it returned}
        self.in_flight = deque()  # the Chunks whose rows have not been read yet
        # Steps that take CHUNK_SECONDS, as measured; it at most doubles per chunk. Evaluations take
        # as many batches at once.
        self.pace = 1
        self.elapsed = 0.0  # seconds of this epoch before the run was resumed
        self.rates = {}  # the learning rates of the latest step
        self.resumed_at = 0  # the position in the epoch from which it was resumed, or went back to
        self.todo = Boundary()  # what is left to do at this step
        self.underway = False  # whether the states on the device belong to the run

    def train(self, start: Point | None = None) -> Run:
        """Train from the first step, or from the Point `start`, until something stops the run."""
        run = self.run
        run.resumed = start is not None
        try:
            self.signals.handle()
            if start:
                self.go_to(start)
            first = self.call_observers("on_start")
            self.apply(first)
            if start and start.checkpoint:
                remember(self.observers, start.record["memories"], start.checkpoint.path)
            save = first.save
            if start is None or start.before_first_row:
                save = most_complete(save, self.evaluate_initial_params())
            self.underway = True
            now = time.monotonic()
            self.times = dict.fromkeys(range(len(self.every())), now)
            self.poll()
            if save:
                self.save(save)
            if not run.open_at:
                self.end_if_spent(start is not None and self.is_spent())
            ended = False
            while not ended:  # a save finds a state that is not finite, and the run may go back
                while not run.finished and not run.stopped:
                    self.epoch()
                ended = self.save("last" if run.finished else "whole")
            self.evaluate_unfinished_epoch()
            self.call_observers("on_end")
            self.test()
            self.log_why_it_ended()
        except (Exception, SystemExit) as error:  # the user's code may call sys.exit
            self.rescue(error)
            raise
        except KeyboardInterrupt:
            run.signal = run.signal or "SIGINT"  # trackers are not waited for
            raise
        finally:
            run.published = self.close()
        return run

    def epoch(self) -> None:
        """Train and evaluate one epoch. If something stops it midway, it stays unfinished."""
        run = self.run
        self.clock.start_epoch(self.elapsed)
        run.epoch, run.evaluated = run.completed + 1, []
        if run.position:
            logger.info("---- RESUMING EPOCH %d AFTER %d BATCHES ----", run.epoch, run.position)
        else:
            logger.info("---- STARTING EPOCH %d ----", run.epoch)
            run.sums = self.trainer.training_sums()
        self.trainer.begin(run.epoch, run.position)
        self.trainer.prepare()
        self.resumed_at, self.rates = run.position, self.learning_rates(run.step)
        self.clock.start_training(examples_of(run.sums.epoch), examples_of(run.sums.line))
        if run.open_at == "steps":
            if self.evaluate_and_save():
                return
            self.end_if_spent()
        for chunk, bad in self.chunks():
            if self.boundary(chunk, bad):
                return  # the run went back, and this epoch begins again from there
        if run.stopped:
            run.metrics = {}  # an unfinished epoch has none
        else:
            self.end_of_epoch()

    # Steps.

    def chunks(self) -> Iterator[tuple[Chunk, list[Bad]]]:
        """Train the rest of the epoch, and yield each Chunk with what was bad in it. While a chunk
        computes, the previous one is read. Chunks may end anywhere without changing a bit of the
        result."""
        run = self.run
        step, position = run.step, run.position  # after the steps that were sent to the device
        steps = 1
        while steps and not run.stopped:
            count, ends, *left = self.next_chunk(step, position)
            before = self.clock.now()
            steps, calls = self.trainer.train(count)
            step, position = step + steps, position + steps
            waits = False
            if steps:
                due, line, evaluate = self.due_after(steps, left)
                sending = self.clock.sent(before)
                chunk = Chunk(steps, position, calls, due, line, evaluate, bool(ends), sending)
                self.in_flight.append(chunk)
                waits = evaluate or ends or any(not self.late[i] for i in due)
                waits = waits or self.sees_batches or step == self.recipe.training.max_steps
            unread = 1 if steps and not waits else 0  # chunks that may stay in flight
            self.poll()
            while len(self.in_flight) > unread:
                yield self.read_chunk(self.in_flight.popleft())
        while self.in_flight:
            yield self.read_chunk(self.in_flight.popleft())

    def next_chunk(self, step: int, position: int) -> list[int]:
        """[the steps of the next chunk, whether the seconds of the run are over, and for all that
        has an `every` the steps until it is due; 0 if it is due by its seconds], as process 0
        decides, since some of it is due by its clock."""
        every, most = self.every(), self.recipe.training.max_steps
        left = [steps_left(each, step, position) for each in every]
        count = max(1, min([self.pace, most - step if most else NEVER, *left]))
        for i, each in enumerate(every):
            if self.is_due_by_time(i, each):
                left[i] = 0
        return agreed([1 if self.sees_batches else count, int(self.clock.is_spent()), *left])

    def every(self) -> list[Every | None]:
        """The `every` of each observer, of log lines and of evaluations."""
        return [*map(every_of, self.observers), self.line_every, self.eval_every]

    def is_due_by_time(self, number: int, every: Every | None) -> bool:
        """Whether something is due by seconds, which are then counted from now on."""
        if not every or "seconds" not in every:
            self.times.pop(number, None)
            return False
        now = time.monotonic()
        if now - self.times.setdefault(number, now) < every["seconds"]:
            return False
        self.times[number] = now
        return True

    def due_after(self, steps: int, left: list[int]) -> tuple[list[int], bool, bool]:
        """(the numbers of the observers that are due after a chunk of so many steps, whether a log
        line ends with it, whether the held-out sets are evaluated then)"""
        *is_due, line, evaluate = [each <= steps for each in left]
        due = [
            i
            for i, each in enumerate(self.observers)
            if hasattr(each, "on_steps") and (is_due[i] or (line and every_of(each) is None))
        ]
        return due, line, evaluate

    def read_chunk(self, chunk: Chunk) -> tuple[Chunk, list[Bad]]:
        """Wait for a chunk, and add its rows to what the run has measured. Returns (the chunk, a
        list of Bad)."""
        run, first = self.run, self.run.step
        rows = self.trainer.read(chunk.calls)
        measured = round(CHUNK_SECONDS * chunk.steps / self.clock.done(chunk.sending))
        self.pace = max(1, min(measured, 2 * self.pace))
        self.signals.has_trained = True
        run.step, run.position = run.step + chunk.steps, chunk.position
        bad = self.bad_steps(rows, first)
        if self.trainer.halts:  # the steps after a bad one were refused
            ends = {each.replica: each.step - first for each in bad}
            rows = [first_rows(own, ends.get(replica)) for replica, own in enumerate(rows)]
        run.sums.add(rows)
        run.throughput = None
        self.rates = self.learning_rates(run.step)  # before an observer changes them
        if chunk.line and not (bad and self.trainer.halts):
            line = run.sums.line
            run.each_step = self.single_steps()
            run.metrics = self.reader.values("train", line) | self.rates
            steps = run.position - max(run.line_position, self.resumed_at)
            run.throughput = self.clock.new_line(steps, examples_of(line))
            run.line_position = run.position
            run.sums.new_line()
        return chunk, bad

    def bad_steps(self, rows: list[Row], first: int) -> list[Bad]:
        """The first Bad of each replica in the rows of a chunk that begins with the step
        `first`."""
        found = []
        for replica, own in enumerate(rows):
            for i in np.flatnonzero(own["bad"] != GOOD)[:1].tolist():
                params = self.trainer.replica_states()[0].params
                leaf = bad_leaf_name(params, int(own["bad"][i]))
                found.append(Bad(first + i, leaf, replica, of_state=False))
        return sorted(found)

    def single_steps(self) -> dict[str, np.ndarray]:
        """{name: array} of the values of each step since the last log line; {} if they are not
        kept, or there is none."""
        run, count = self.run, self.run.position - self.run.line_position
        if not run.sums.per_step or not count:
            return {}
        steps = np.arange(run.step - count, run.step) + 1
        return {"step": steps} | self.reader.each_step(run.sums.modes["line"], run.sums.rows)

    # Boundaries.

    def boundary(self, chunk: Chunk, bad: list[Bad]) -> bool:
        """After a chunk, the observers that are due reply, then the held-out sets are evaluated, if
        that is due, then a checkpoint is written. At the end of an epoch, the last two belong to
        `end_of_epoch`. Returns whether the run went back."""
        run = self.run
        for each in bad:
            if self.apply(self.call_observers("on_bad", each)):
                return True
        if self.sees_batches:
            self.apply(self.call_observers("on_batch", self.trainer.latest_batch()))
        replies = self.call_observers("on_steps", among=chunk.due)
        self.apply(replies)
        self.todo = Boundary(chunk.evaluate or replies.evaluate, replies.save)
        if run.position == run.steps and (run.signal or not run.stopped):
            return False
        went_back = self.evaluate_and_save()
        if not went_back:
            self.end_if_spent(chunk.ends)
        self.poll()
        return went_back

    def evaluate_and_save(self) -> bool:
        """Do what is left to do at this step of an epoch. If a signal arrives meanwhile, a resumed
        run does it. Returns whether the run went back."""
        run, (evaluate, save) = self.run, self.todo
        run.open_at = "steps" if evaluate else None
        if (evaluate or save) and not self.state_is_finite():
            return True
        if evaluate and self.in_epochs:
            run.evaluated = []
            values = self.evaluate(self.in_epochs)
            if values is None:
                return False
            row = {"epoch": run.epoch, "step": run.step, "evaluation": True}
            replies = self.end_of_evaluation(row, values)
            save = most_complete(save, replies.save)
        self.todo, run.open_at = Boundary(), None
        return bool(save) and not self.save(save)

    def end_of_epoch(self) -> None:
        """The boundary at the end of an epoch, which is a row of the history."""
        run, every = self.run, self.eval_every
        if run.open_at not in AT_END:
            each_due = [is_due_at_end(every_of(each), run.epoch) for each in self.observers]
            due = [i for i, is_due in enumerate(each_due) if is_due]
            replies = self.call_observers("on_steps", among=due)
            self.apply(replies)
            evaluate = self.todo.evaluate or replies.evaluate or is_due_at_end(every, run.epoch)
            self.todo = Boundary(evaluate, most_complete(self.todo.save, replies.save))
            run.open_at = "epoch"
            if not self.state_is_finite():
                return
        self.end_of_training()
        run.open_at, run.evaluated = "evaluation", []
        evaluated = self.evaluate(self.in_epochs if self.todo.evaluate else [])
        if evaluated is None:
            run.metrics = {}  # an unfinished epoch has none
            return
        row = {"epoch": run.epoch, "step": run.step, **run.metrics, **self.clock.epoch()}
        run.history.append(row)
        run.completed, run.position, run.line_position, self.elapsed = run.epoch, 0, 0, 0.0
        todo, self.todo, run.open_at = self.todo, Boundary(), None
        replies = self.end_of_evaluation(row | {"end_of_epoch": True})
        save = most_complete(todo.save, replies.save)
        if not save or self.save(save):
            self.end_if_spent(self.is_spent())
        self.poll()

    def end_of_training(self) -> None:
        """Report the values of the epoch's training, unless that was done before a signal ended the
        run."""
        run, sums = self.run, self.run.sums.epoch
        run.each_step = self.single_steps()
        self.clock.end_training(run.position - self.resumed_at, examples_of(sums))
        run.arrays |= self.reader.arrays("train", sums)
        run.metrics = self.reader.values("train", sums) | self.rates
        if run.open_at != "evaluation":
            self.apply(self.call_observers("on_evaluated", "train", run.metrics))

    def end_of_evaluation(
        self, row: dict[str, Any], values: dict[str, Any] | None = None
    ) -> Replies:
        """Report a row of values: those of the run, or `values`. Returns the Replies."""
        self.run.row = row | (values or {})
        replies = self.call_observers("on_row", self.run.row)
        self.apply(replies)
        return replies

    def end_if_spent(self, seconds_are_over: bool = False) -> None:
        """End the run if its budget is exhausted."""
        run, options = self.run, self.recipe.training
        if options.max_steps and run.step >= options.max_steps:
            why = "training.max_steps"
        elif seconds_are_over:
            why = f"training.max_seconds ({options.max_seconds:g} s)"
        else:
            return
        if not run.finished and not run.stopped:
            run.stopped = True
            run.stopped_by = run.budget_exhausted = why

    def is_spent(self) -> bool:
        """Whether the seconds of the run are over, by the clock of process 0."""
        return bool(agreed([int(self.clock.is_spent())])[0])

    def poll(self) -> bool:
        """Stop the run if a signal has arrived, and return whether one has."""
        run = self.run
        if not run.signal and (name := self.signals.received()):
            run.stopped, run.signal = True, name
        return bool(run.signal)

    # Evaluations.

    def evaluate(
        self,
        names: Sequence[str],
        weights: list[Weights] | None = None,
        step: int | None = None,
        limited: bool = True,
    ) -> dict[str, Any] | None:
        """{metric: value} of these sets, validation sets first; None if a signal arrived. `weights`
        are others than the current ones, trained for `step` steps."""
        run, trainer = self.run, self.trainer
        limit = self.recipe.training.limit_eval_batches if limited else None
        [pace] = agreed([self.pace])
        when = run.epoch, run.step if step is None else step
        # No value of an earlier evaluation may stay.
        run.metrics = {k: v for k, v in run.metrics.items() if k.partition("_")[0] not in names}
        for name in sorted(names, key=lambda name: name == "test"):
            sums = trainer.evaluate(name, pace, self.poll, weights, *when, limit=limit)
            if sums is None:
                return None
            named = self.reader.values(name, sums)
            run.metrics = run.metrics | named
            run.arrays |= self.reader.arrays(name, sums)
            run.evaluated.append(name)
            replies = self.call_observers(
                "on_evaluated", name, named, among=self.due_at_evaluation(limited)
            )
            run.metrics = {**run.metrics, **replies.values}
            self.apply(replies)
        self.check_reported(limited)
        return {name: v for name, v in run.metrics.items() if name.partition("_")[0] in names}

    def due_at_evaluation(self, limited: bool = True) -> list[int]:
        """The numbers of the observers that see this evaluation: those that are due here, and those
        without an `every`. The last test of a run is for all."""
        run = self.run

        def is_due(observer: Any) -> bool:
            every = every_of(observer)
            if every is None or not limited:
                return True
            at_end = run.open_at in AT_END and is_due_at_end(every, run.epoch)
            due_here = steps_left(every, run.step - 1, run.position - 1) == 1
            return at_end or due_here

        return [i for i, each in enumerate(self.observers) if is_due(each)]

    def check_reported(self, limited: bool) -> None:
        """Refuse an evaluation without a value that an observer reports, since early stopping, or
        the choice of the best checkpoint, may wait for it."""
        run = self.run
        for i in self.due_at_evaluation(limited):
            for name in reported_by(self.observers[i], run.evaluated):
                if name not in run.metrics:
                    raise UserError(
                        f"callbacks: {name_of(self.observers[i])} reports {name!r}, but epoch "
                        f"{run.epoch} has no such value; on_evaluated must return "
                        f'{{"values": {{{name!r}: number}}}}'
                    )

    def evaluate_initial_params(self) -> str | None:
        """Evaluate before the first step, so that curves begin with the initial params. Returns the
        kind of checkpoint that an observer requests, or None."""
        run, save = self.run, None
        if self.recipe.training.eval_initial:
            if values := self.evaluate(self.in_epochs):
                row = {"epoch": 0, "step": 0, "initial": True}
                save = self.end_of_evaluation(row, values).save
            run.metrics, run.evaluated = {}, []
        return save

    def evaluate_unfinished_epoch(self) -> None:
        """If a budget or a callback ended the run within an epoch, evaluate its last weights, which
        are saved."""
        run = self.run
        if run.position and self.is_over():
            values = self.reader.values("train", run.sums.epoch)
            run.evaluated, names = [], self.recipe.sets_in_epochs(self.trainer.feeds)
            if (evaluated := self.evaluate(names)) is not None:
                run.metrics = values | evaluated
                row = {"epoch": run.epoch, "step": run.step, "final": "the last weights"}
                self.end_of_evaluation(row, run.metrics)

    def is_over(self) -> bool:
        """Whether the run has ended by itself, and not by a signal, after which it continues."""
        run = self.run
        return not run.signal and bool(run.finished or run.budget_exhausted or run.for_good)

    def test(self) -> None:
        """Evaluate the test set, if that is to be done at the end, with the best checkpoint, or
        else with the last weights. The run then ends with these weights, and with the values that
        belong to them, as it does if a callback restores the best ones."""
        run, names = self.run, self.recipe.sets_at_end(self.trainer.feeds)
        run.best = self.best and self.best()
        run.untested = bool(names and (run.completed or self.is_over()))
        restores = any(getattr(each, "restore_best", False) for each in self.observers)
        if not self.is_over() or not (run.untested or restores):
            return
        before, trees = (run.epoch, run.metrics), None
        row = {"epoch": run.epoch, "step": run.step}
        if run.best:
            trees = run.best.read()
            row = {"epoch": run.best.epoch, "step": run.best.step}
            run.epoch, run.metrics, run.restored = run.best.epoch, run.best.metrics, trees[0]
            logger.info("The run ends with the weights of %s", run.weights_from)
        values = None
        try:
            if run.untested:
                logger.info("Testing %s", run.weights_from)
            values = self.evaluate(names, trees, row["step"], limited=False)
        finally:
            run.epoch, run.untested = before[0], run.untested and values is None
            if values is None:
                run.metrics, run.restored = before[1], None
        if values:
            self.end_of_evaluation(row | {"final": run.weights_from}, values)

    # Observers.

    def call_observers(
        self, event: str, *details: Any, among: Sequence[int] | None = None
    ) -> Replies:
        """The Replies to an event of all observers, or of those with these numbers. With several
        processes, they are those of process 0."""
        replies, called = Replies(), False
        for i, observer in enumerate(self.observers):
            if not hasattr(observer, event) or (among is not None and i not in among):
                continue
            called = called or not self.late[i]
            if is_first() or not self.late[i]:
                reply = reply_of(observer, event, self.view, *details)
                replies = replies.with_reply(self.keys[i], reply)
        if several() and called and event not in ("on_bad", "on_save"):
            return Replies(**from_first(replies._asdict))
        return replies

    def apply(self, replies: Replies) -> bool:
        """Apply replies, but those that belong to a boundary. Returns whether the run went back."""
        run = self.run
        if replies.back_to:
            self.go_to(replies.back_to)
            if replies.back_to.checkpoint:
                remember(self.observers, replies.back_to.record["memories"])
        if replies.stop:
            run.stopped, run.stopped_by = True, replies.stop
            run.for_good = run.for_good or not replies.back_to
        if replies.pause:
            run.stopped, run.signal = True, run.signal or replies.pause
        if replies.lr_scales:
            check_rate(self.recipe.optimizer, "callbacks: an lr_scale", "use a schedule")
            self.scales |= replies.lr_scales
            self.trainer.scale_rate(math.prod(self.scales.values()))
        return replies.back_to is not None

    def go_to(self, point: Point) -> None:
        """Continue from a Point."""
        self.in_flight.clear()
        record = point.record
        self.trainer.restore(point.states, record["seeds"])
        self.elapsed = record["elapsed"]
        self.todo = Boundary()
        self.run.go_to(point)
        if point.checkpoint:
            self.todo, self.run.open_at = Boundary(*record["todo"]), record["open"]
            self.clock.continue_after(record["seconds"])
            self.scales = dict(record["lr_scales"])

    def snapshot(self) -> Snapshot:
        """The run at this moment, between two chunks."""
        run = self.run
        record = run.record(self.clock.elapsed()) | {"seconds": self.clock.spent()}
        record |= {"memories": memories(self.observers), "lr_scales": self.scales}
        record |= {"seeds": self.trainer.seeds}
        record |= {"todo": list(self.todo), "open": run.open_at}
        return Snapshot(self.trainer.snapshot(), record, run.sums.trees() if run.position else None)

    def save(self, kind: str) -> bool:
        """Write a checkpoint of this kind. Returns False if the run went back, since its state is
        not finite."""
        if not self.state_is_finite():
            return False
        self.call_observers("on_save", cache(self.snapshot), kind)
        return True

    def state_is_finite(self) -> bool:
        """Whether the state can be saved or evaluated. If not, an observer ends the run with an
        error, or the run has gone back to a Point. Steps refuse only a loss or gradients that are
        not finite; an optimizer or running statistics that overflow are found here."""
        leaf = self.trainer.leaf_not_finite()
        return leaf is None or not self.apply(
            self.call_observers("on_bad", Bad(self.run.step, leaf, 0, of_state=True))
        )

    def close(self) -> bool:
        """Close all observers, also if one is interrupted. Return False if one is stuck."""
        results, interruption = [], None
        for each, late in zip(self.observers, self.late, strict=True):
            if not hasattr(each, "close") or (late and not is_first()):
                continue
            try:
                results.append(each.close(self.view))
            except Exception as error:  # the others must still be closed
                logger.warning("%s was not closed: %s", name_of(each), first_line(error))
            except BaseException as error:  # Ctrl-C: close the others without waiting for them
                interruption, self.run.signal = error, self.run.signal or "SIGINT"
        self.signals.restore()
        if interruption:
            raise interruption
        return False not in results

    def log_why_it_ended(self) -> None:
        """Log what ended the run before it had done all that the options allow."""
        run, options = self.run, self.recipe.training
        if run.cut_short:
            logger.info("Stopped by %s after step %d", run.stopped_why, run.step)
        elif run.finished and options.max_steps and run.step < options.max_steps:
            logger.info(
                "Stopped by training.epochs (%d) after step %d, before training.max_steps (%d); "
                "with training.epochs=null, max_steps alone ends a run",
                run.epochs,
                run.step,
                options.max_steps,
            )

    def rescue(self, error: BaseException) -> None:
        """Save the state before a crash ends the run, if there is something to save. After a
        RunError nothing more can be saved; several processes can save only together."""
        run = self.run
        if not self.underway or isinstance(error, RunError) or several():
            return
        try:
            while self.in_flight:
                chunk, bad = self.read_chunk(self.in_flight.popleft())
                if bad and self.trainer.halts:
                    raise RunError(f"step {bad[0].step + 1} was not finite")
                with suppress(Exception, SystemExit):  # of the observer that ends the run
                    self.call_observers("on_steps", among=chunk.due)
            step, *others = {int(s) for ts in self.trainer.states for s in np.ravel(ts.step)}
            if step and not others:
                run.position, run.step = run.position + step - run.step, step
                self.save("whole")
                for each in self.observers:
                    if callable(getattr(each, "wait", None)):
                        each.wait()
        except (Exception, SystemExit) as second:
            with suppress(Exception):
                logger.warning("The state could not be saved: %s", first_line(second))


def first_rows(rows: Row, count: int | None) -> Row:
    """The first rows; all of them if the count is None."""
    return jax.tree.map(lambda a: a[:count], rows)
