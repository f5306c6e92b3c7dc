"""The training loop: for every epoch, for every chunk of steps, for every watcher. It is the only
code that advances a run, and only this file changes a Run; watchers request changes by Replies."""

import logging
import time
from collections import deque
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import jax
import numpy as np

from training.rows import GOOD
from training.run import examples_of
from training.watchers import SAVES, Ahead, Report, Snapshot, check_watchers, reply_of, steps_left
from utils import RunError, first_line

logger = logging.getLogger("main")

CHUNK_SECONDS = 0.5  # of work in a chunk; a signal ends the run after at most two chunks


class Chunk(NamedTuple):
    """Steps that were sent to the device and whose rows have not been read yet."""

    steps: int
    position: int  # in the epoch, after these steps
    calls: list  # the calls of programs, with their rows on the device
    due: tuple  # the watchers that must see the run after these steps
    line: bool  # whether a log line ends with these steps
    sending: tuple  # what the clock measured while they were sent


class Loop:
    """One run. `reader` names its values, `learning_rates(step)` are those of a step, `best()`
    returns the Best of the run, or None; `agree` returns process 0's numbers."""

    def __init__(self, run, recipe, watchers, reader, clock, learning_rates, *, best, agree):
        self.run, self.trainer, self.recipe, self.watchers = run, run.trainer, recipe, watchers
        self.reader, self.clock, self.learning_rates = reader, clock, learning_rates
        self.best, self.agree = best, agree
        check_watchers(watchers)
        self.planners = [w for w in watchers if hasattr(w, "steps_left") or hasattr(w, "overdue")]
        self.state_watchers = [w for w in watchers if hasattr(w, "needs_state")]
        self.in_epochs = recipe.sets_in_epochs(self.trainer.feeds)  # the sets to evaluate there
        self.in_flight = deque()  # the Chunks whose rows have not been read yet
        self.pace = 1  # steps that take CHUNK_SECONDS, as measured; it at most doubles per chunk
        self.agreed_pace = 1  # the pace of all processes; also of evaluations, in batches
        self.elapsed = 0.0  # seconds of this epoch before the run was resumed
        self.resumed_at = 0  # the position in the epoch from which it was resumed, or went back to
        self.underway = False  # whether the states on the device belong to the run

    def train(self, start=None):
        """Train from the first step, or from the Point `start`, until a watcher stops the run."""
        run = self.run
        try:
            self.notify("on_training_start")
            if start:
                self.go_to(start)
            if start is None or start.before_first_row:
                self.evaluate_initial_params()
            self.underway = True
            self.notify("on_ready")
            ended = False
            while not ended:
                while not run.finished and not run.stopped:
                    self.epoch()
                ended = self.state_is_finite() and not self.notify("on_stop")
            self.evaluate_unfinished_epoch()
            self.notify("on_stopped")
            self.end()
            self.notify("on_training_end")
            if run.cut_short:
                logger.info("Stopped by %s after step %d", run.stopped_why, run.step)
        except (Exception, SystemExit) as error:  # the user's code may call sys.exit
            self.rescue(error)
            raise
        except KeyboardInterrupt:
            run.signal = run.signal or "SIGINT"  # trackers are not waited for
            raise
        finally:
            run.published = self.close()
        return run

    def epoch(self):
        """Train and evaluate one epoch. If something stops it midway, it stays unfinished."""
        run = self.run
        self.clock.start_epoch(self.elapsed)
        run.epoch, run.evaluated = run.completed + 1, []
        self.notify("on_epoch_start")
        if run.stopped and not run.position:
            return  # an epoch in progress returns below, after its metrics are cleared
        if not run.position:
            run.sums = self.trainer.training_sums()
        self.trainer.begin(run.epoch, run.position)
        if self.trainer.prepare():
            self.notify("on_compiled")
        self.resumed_at = run.position
        self.clock.start_training(examples_of(run.sums.epoch), examples_of(run.sums.line))
        for report in self.chunks():
            went_back = self.notify("on_chunk", report)
            if went_back:
                return  # and begin this epoch again from there
        if not run.stopped and not self.state_is_finite():
            return
        values = None if run.stopped else self.end_of_training()
        every = self.recipe.training.eval_every
        sets = self.in_epochs if every and run.epoch % every == 0 else []
        evaluated = None if values is None else self.evaluate(sets)
        if evaluated is None:
            run.metrics = {}  # an unfinished epoch has none
            return
        row = {"epoch": run.epoch, "step": run.step, **run.metrics, **self.clock.epoch()}
        run.history.append(row)
        run.completed, run.position, run.line_position, self.elapsed = run.epoch, 0, 0, 0.0
        self.notify("on_epoch_end")

    # Steps.

    def chunks(self):
        """Train the rest of the epoch, and yield the Report of each chunk. While a chunk computes,
        the previous one is read. Chunks may end anywhere without changing a bit of the result."""
        run = self.run
        ahead = Ahead(run.step, run.position, run.line_position, time.monotonic())
        steps = 1
        while steps and not run.stopped:
            count, due, at_once = self.next_chunk(ahead)
            before = self.clock.now()
            steps, calls = self.trainer.train(count)
            if steps:
                sending = self.clock.sent(before)
                position = ahead.position + steps
                due = due if steps == count else at_once
                line = any(getattr(watcher, "ends_line", False) for watcher in due)
                self.in_flight.append(Chunk(steps, position, calls, due, line, sending))
                ahead = ahead._replace(step=ahead.step + steps, position=position)
                if line:
                    ahead = ahead._replace(line_position=position, line_time=time.monotonic())
                state_needed = any(w.needs_state(w in due, line) for w in self.state_watchers)
            unread = 1 if steps and not state_needed else 0  # chunks that may stay in flight
            if len(self.in_flight) <= unread:
                self.notify("on_pause")  # there is no report yet, but a signal may have arrived
            while len(self.in_flight) > unread:
                yield self.settled(self.in_flight.popleft())
        while self.in_flight:
            yield self.settled(self.in_flight.popleft())

    def next_chunk(self, ahead):
        """(steps of the next chunk, the watchers that are due after them, the watchers that are due
        even if the epoch ends before). Process 0 decides, since watchers may use its clock."""
        left = [steps_left(watcher, ahead) for watcher in self.planners]
        overdue = [hasattr(w, "overdue") and w.overdue(ahead) for w in self.planners]
        count = min([self.pace, *left])
        due = sum(1 << i for i, n in enumerate(left) if n <= count or overdue[i])
        at_once = sum(1 << i for i, late in enumerate(overdue) if late)
        count, self.agreed_pace, due, at_once = self.agree([count, self.pace, due, at_once])
        self.pace = self.agreed_pace

        def chosen(bits):
            return tuple(watcher for i, watcher in enumerate(self.planners) if bits >> i & 1)

        return count, chosen(due), chosen(at_once)

    def settled(self, chunk):
        """Wait for a chunk and return its Report."""
        run, first = self.run, self.run.step
        rows = self.trainer.read(chunk.calls)
        measured = round(CHUNK_SECONDS * chunk.steps / self.clock.done(chunk.sending))
        self.pace = max(1, min(measured, 2 * self.pace))
        run.step, run.position = run.step + chunk.steps, chunk.position
        bad, throughput = None, None
        if self.trainer.halts:
            rows, bad = until_bad(rows, first)
        run.sums.add(rows)
        if chunk.line and not bad:
            run.each_step = self.single_steps()
            line = run.sums.line
            run.metrics = self.reader.values("train", line) | self.learning_rates(run.step)
            steps = run.position - max(run.line_position, self.resumed_at)
            throughput = self.clock.new_line(steps, examples_of(line))
            run.line_position = run.position
            run.sums.new_line()
        return Report(chunk.steps, rows, bad, chunk.due, throughput)

    def single_steps(self):
        """{name: array} of the values of each step since the last log line; {} if they are not
        kept, or there is none."""
        run, count = self.run, self.run.position - self.run.line_position
        if not run.sums.per_step or not count:
            return {}
        steps = np.arange(run.step - count, run.step) + 1
        return {"step": steps} | self.reader.each_step(run.sums.modes["line"], run.sums.rows)

    def end_of_training(self):
        """{metric: value} of the epoch's training."""
        run, sums = self.run, self.run.sums.epoch
        run.each_step = self.single_steps()
        self.clock.end_training(run.position - self.resumed_at, examples_of(sums))
        run.arrays |= self.reader.arrays("train", sums)
        run.metrics = self.reader.values("train", sums) | self.learning_rates(run.step)
        self.notify("on_values", "train", run.metrics)
        return run.metrics

    # Evaluations.

    def evaluate(self, names, weights=None, step=None):
        """{metric: value} of these sets, validation sets first; None if interrupted. `weights` are
        others than the current ones, trained for `step` steps."""
        run, trainer = self.run, self.trainer
        for kind in ("validation", "test"):
            members = [name for name in names if (name == "test") == (kind == "test")]
            if members:
                self.notify(f"on_{kind}_start")
            for name in members:
                when = run.epoch, run.step if step is None else step
                sums = trainer.evaluate(name, self.agreed_pace, self.interrupted, weights, *when)
                if sums is None:
                    return None
                named = self.reader.values(name, sums)
                run.metrics = run.metrics | named
                run.arrays |= self.reader.arrays(name, sums)
                run.evaluated.append(name)
                self.notify("on_values", name, named)
            if members:
                self.notify(f"on_{kind}_end")
        return {name: v for name, v in run.metrics.items() if name.partition("_")[0] in names}

    def interrupted(self):
        """Let the watchers interrupt the run here, and return whether one did."""
        self.notify("on_pause")
        return bool(self.run.signal)

    def evaluate_initial_params(self):
        """Evaluate before the first step, so that curves begin with the initial params."""
        if self.recipe.training.eval_initial:
            if values := self.evaluate(self.in_epochs):
                self.notify("on_extra_row", {"epoch": 0, "step": 0, "initial": True}, values)
            self.run.metrics, self.run.evaluated = {}, []

    def evaluate_unfinished_epoch(self):
        """If a budget or a callback ended the run within an epoch, evaluate its last weights, which
        are saved."""
        run = self.run
        if run.position and self.is_over():
            values = self.reader.values("train", run.sums.epoch)
            if (evaluated := self.evaluate(self.in_epochs)) is not None:
                run.metrics = values | evaluated
                row = {"epoch": run.epoch, "step": run.step, "final": "the last weights"}
                self.notify("on_extra_row", row, run.metrics)

    def is_over(self):
        """Whether the run has ended by itself, and not by a signal, after which it continues."""
        run = self.run
        return not run.signal and bool(run.finished or run.budget_exhausted or run.for_good)

    def end(self):
        """Evaluate the test set, if that is to be done at the end, with the best checkpoint, or
        else with the last weights. The run then ends with these weights, and with the values that
        belong to them, as it does if a callback restores the best ones."""
        run, names = self.run, self.recipe.sets_at_end(self.trainer.feeds)
        run.best = self.best and self.best()
        run.untested = bool(names and (run.completed or self.is_over()))
        restores = any(getattr(each, "restore_best", False) for each in self.recipe.callbacks)
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
            weights = trees and self.trainer.replicas.stack(trees)
            values = self.evaluate(names, weights, row["step"])
        finally:
            run.epoch, run.untested = before[0], run.untested and values is None
            if values is None:
                run.metrics, run.restored = before[1], None
        if values:
            self.notify("on_extra_row", row | {"final": run.weights_from}, values)

    # Watchers.

    def notify(self, event, *details):
        """Call a method of every watcher that has it, and apply the replies; a checkpoint is saved
        after all have replied. Return whether the run went back to another Point."""
        saves = []
        for watcher in self.watchers:
            if reply := reply_of(watcher, event, self.run, *details):
                saves += [reply.save] if reply.save else []
                if self.apply(reply):
                    return True
        if saves:
            while self.in_flight:  # the snapshot includes these steps, so they must be reported
                if self.notify("on_chunk", self.settled(self.in_flight.popleft())):
                    return True
            if not self.state_is_finite():
                return True
            self.notify("on_save", cache(self.snapshot), max(saves, key=SAVES.index))
        if event != "on_pause":
            self.notify("on_pause")
        return False

    def state_is_finite(self):
        """Whether the state can be saved or evaluated. If not, a watcher ends the run with an
        error, or the run has gone back to a Point. Steps refuse only a loss or gradients that are
        not finite; an optimizer or running statistics that overflow are found here."""
        leaf = self.trainer.leaf_not_finite()
        return leaf is None or not self.notify("on_bad_state", leaf)

    def apply(self, reply):
        """Apply one watcher's reply. Return whether the run went back."""
        run = self.run
        if reply.lr_scale is not None:
            self.trainer.scale_rate(reply.lr_scale)
        if reply.values:
            run.metrics = run.metrics | reply.values
        if reply.back_to:
            self.go_to(reply.back_to)
        if reply.stop:
            run.stopped, run.stopped_by = True, reply.stop
            run.for_good = run.for_good or not reply.back_to
        if reply.budget_exhausted:
            run.stopped = True
            run.stopped_by = run.budget_exhausted = reply.budget_exhausted
        if reply.interrupt:
            run.stopped, run.signal = True, run.signal or reply.interrupt
        return bool(reply.back_to)

    def go_to(self, point):
        """Continue from a Point."""
        self.in_flight.clear()
        self.trainer.restore(point.states)
        self.elapsed = point.record["elapsed"]
        self.run.go_to(point)
        self.notify("on_resume", point)

    def snapshot(self):
        """The run at this moment, between two chunks."""
        record = self.run.record(self.clock.elapsed())
        for watcher in self.watchers:
            record |= watcher.memory() if hasattr(watcher, "memory") else {}
        sums = self.run.sums.trees() if self.run.position else None
        return Snapshot(self.trainer.snapshot(), record, sums)

    def close(self):
        """Close all watchers, also if one is interrupted. Return False if one is stuck."""
        results, interruption = [], None
        for watcher in [watcher for watcher in self.watchers if hasattr(watcher, "close")]:
            try:
                results.append(watcher.close(self.run))
            except Exception as error:  # the others must still be closed
                logger.warning("%s was not closed: %s", type(watcher).__name__, first_line(error))
            except BaseException as error:  # Ctrl-C: close the others without waiting for them
                interruption, self.run.signal = error, self.run.signal or "SIGINT"
        if interruption:
            raise interruption
        return False not in results

    def rescue(self, error):
        """Save the state before a crash ends the run, if there is something to save. After a
        RunError nothing more can be saved; several processes can save only together."""
        run = self.run
        if not self.underway or isinstance(error, RunError) or jax.process_count() > 1:
            return
        try:
            while self.in_flight:
                report = self.settled(self.in_flight.popleft())
                if report.bad:
                    raise RunError(f"step {report.bad[0] + 1} was not finite")
                with suppress(Exception, SystemExit):  # of the watcher that ends the run
                    self.notify("on_chunk", report)
            step, *others = {int(s) for ts in self.trainer.states for s in np.ravel(ts.step)}
            if step and not others:
                run.position, run.step = run.position + step - run.step, step
                self.notify("on_stop")
                self.notify("on_stopped")
        except (Exception, SystemExit) as second:
            with suppress(Exception):
                logger.warning("The state could not be saved: %s", first_line(second))


def until_bad(rows, step):
    """(the rows of each replica before its first step that was not finite; (step, number of the
    leaf) of the first such step, or None). The first of the rows is that of `step`."""
    kept, bad = [], []
    for own in rows:
        each = np.flatnonzero(own["bad"] != GOOD)[:1]
        bad += [(step + int(i), int(own["bad"][i])) for i in each]
        end = each[0] if len(each) else None
        kept.append(jax.tree.map(lambda a, end=end: a[:end], own))
    return kept, min(bad, default=None)
