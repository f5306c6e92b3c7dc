"""The steps of an epoch as chunks in flight: one computes while the one before is read, checked, logged and told to callbacks."""

import logging
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from training.devices.processes import agreed, several
from training.runs import recovery
from training.update import bad_leaf_name
from training.watching.console import progress_bar
from training.watching.hooks import steps_left

logger = logging.getLogger("main")

CHUNK_SECONDS = 0.5  # of work in one call: bounds how late a log line or a signal is seen; each call brings its memory anew


class Tick(NamedTuple):
    """What comes next by the clock; of several processes all go by that of the first."""

    length: int  # steps of the next chunk
    pace: int  # steps that take CHUNK_SECONDS
    line: bool  # whether a log line is due by time
    save: bool  # and a checkpoint
    asked: int  # which callbacks asked for the step after the chunk, a bit for each


class Chunk(NamedTuple):
    """Steps in flight."""

    reports: Any
    position: int  # in the epoch, after them
    taken: int
    since: int | None  # the position of the line before, where they end with a line
    done: (
        float | None
    )  # when they were done, where that was at once, as the CPU's small programs are
    asking: list  # callbacks that want to be told of them, besides the lines


class Flight:
    """Drives the steps of a loop's epochs. Any step can be a log or save point without changing a bit, since a chunk's length is
    a run-time number."""

    def __init__(self, loop):
        self.loop, self.run, self.runner, self.reporting = (
            loop,
            loop.run,
            loop.runner,
            loop.reporting,
        )
        self.watched = any(
            hasattr(c, "on_step_end") and not getattr(c, "observer", False) for c in loop.callbacks
        )
        # Observers are asked in process 0 alone, so a number stands for the same callback in every process.
        mine = [id(callback) for callback in loop.callbacks]
        self.asked = [
            (i, c)
            for i, c in enumerate(loop.all_callbacks)
            if hasattr(c, "steps_left") and id(c) in mine
        ]
        self.chunk = self.pace = (
            8  # steps in a call, as they are and as they should be; until their pace is known
        )
        self.settled = None  # when the last chunk was done
        self.flying = []  # chunks that are not settled
        self.lined, self.lined_at = (
            0,
            0.0,
        )  # the position of the last log line of this epoch, in flight or told, and when it was
        self.told = self.begun = (
            0  # the position of the last line that was told, and where this process began in the epoch
        )

    def train(self):
        """The steps of one epoch, or the rest of it; what each replica summed up over it."""
        run, runner, keeper = self.run, self.runner, self.loop.keeper
        position, first_step = run.position, run.step - run.position
        self.settled, self.flying, self.lined_at = None, [], time.monotonic()
        self.go_on_from(self.lined if position else 0)
        self.begun = position
        sums, taken = None, 1
        with progress_bar(run.epoch, run.steps, position) as bar:
            while taken:
                tick = self.tick(position, first_step + position)
                if run.stopped:  # a signal to any process
                    break
                taken, reports = runner.train(tick.length)
                position += taken
                done = (
                    time.perf_counter()
                    if all(leaf.is_ready() for leaf in jax.tree.leaves(reports))
                    else None
                )
                since = self.line_since(position, taken, tick.line)
                asking = tick.asked if taken == tick.length else 0
                chunk = Chunk(
                    reports,
                    position,
                    taken,
                    since,
                    done,
                    [c for i, c in self.asked if asking >> i & 1],
                )
                self.flying += [chunk] if taken else []
                due = (
                    taken
                    and position != run.steps
                    and (tick.save or keeper.due(first_step + position))
                )
                # A save is of this very step, and a hook sees and answers it.
                exact = due or asking or (self.watched and chunk.since is not None)
                sums = self.settle(bar, leave=0 if exact else 1) or sums
                if due:
                    keeper.save(run, self.loop.cut)
                if run.stopped:
                    break
            sums = self.settle(bar) or sums
        return sums or runner.sums()

    def go_on_from(self, lined):
        """Go on in an epoch whose last line was at this position."""
        self.flying, self.lined, self.told = [], lined, lined

    def tick(self, position, step):
        """What comes next, at the same place in every process."""
        by_time = (
            self.reporting.every_seconds
            and time.monotonic() - self.lined_at >= self.reporting.every_seconds
        )
        self.chunk = self.pace
        wants = {i: steps_left(callback, step) for i, callback in self.asked}
        length = self.length(position, step, wants.values())
        asked = sum(1 << i for i, left in wants.items() if left == length)
        found = Tick(length, self.pace, bool(by_time), self.loop.keeper.time_is_up(), asked)
        if several():
            found = Tick(*agreed(list(found)))
            self.chunk = self.pace = found.pace
            self.loop.look_for_signals()
        return found

    def length(self, position, step, asked):
        """Steps until something is to be done, at most what takes CHUNK_SECONDS."""
        every, ring = self.reporting.every_steps, self.runner.ring
        to_line = every - position % every if every else 2**30
        to_full_ring = ring - (position - self.lined) if ring else 2**30
        length = min(self.chunk, to_line, to_full_ring, self.loop.keeper.steps_left(step), *asked)
        assert length >= 1, (position, self.lined)  # no step taken is the end of an epoch
        return length

    def line_since(self, position, taken, by_time):
        """Where a line is due after these steps: the position of the line before. The next one then counts from here."""
        every, before = self.reporting.every_steps, self.lined
        full = self.runner.ring and position - before >= self.runner.ring
        if not taken or not (by_time or full or (every and position % every == 0)):
            return None
        self.runner.new_window()  # these steps have told theirs in their report
        self.lined, self.lined_at = position, time.monotonic()
        return before

    def settle(self, bar, leave=0):
        """Settle the chunks in flight, but for the last `leave`; the sums after them, None where there are none."""
        sums = None
        while len(self.flying) > leave:
            sums = self.settle_chunk(self.flying.pop(0), bar)
        return sums

    def settle_chunk(self, chunk, bar):
        """Wait for a chunk, check it, log it, and tell the callbacks."""
        run, sums = self.run, self.runner.read(chunk.reports)
        self.check_finite(sums)
        run.step, run.position = run.step + chunk.taken, chunk.position
        bar.update(chunk.taken)
        done = chunk.done or time.perf_counter()
        self.keep_pace(chunk.taken, done)
        if chunk.since is not None:
            self.line(sums, chunk.since, done)
            self.loop.notify("on_step_end")
        elif chunk.asking:
            self.loop.notify("on_step_end", chunk.asking)
        self.loop.keeper.check()
        return sums

    def line(self, sums, since, done):
        """A log line of the steps since the last one, which were done at a time."""
        run, loop = self.run, self.loop
        windows = [s["window"] for s in sums]
        self.log_steps(self.single_steps(sums, since))
        run.metrics = loop.reader.values("train", windows) | loop.learning_rate(run.step)
        self.told = run.position
        examples = sum(int(window["examples"]) for window in windows)
        rates = loop.rates.new_line(run.position - max(since, self.begun), examples, done)
        loop.log.progress(
            {"epoch": run.epoch, "position": run.position, "step": run.step},
            run.steps,
            run.metrics,
            rates,
        )

    def single_steps(self, sums, since):
        """The values of each step since the last line, where they are wanted, which callbacks see from now on."""
        run, count = self.run, self.run.position - since
        run.per_step = {}
        if not self.runner.ring or not count:
            return {}
        steps = np.arange(run.step - count, run.step)
        values = self.loop.reader.each_step([s["ring"] for s in sums], steps)
        run.per_step = {"step": steps + 1} | {
            name.removeprefix("train_"): value for name, value in values.items()
        }
        return values

    def log_steps(self, values):
        """A row for each of the latest steps, where all are logged."""
        if values and self.reporting.log_all:
            self.loop.log.each_step(self.run.epoch, values, self.run.step)

    def check_finite(self, sums):
        """Stop at steps that are not finite, unless they are to be skipped."""
        bad = [(int(s["first_bad"]), int(s["bad_leaf"])) for s in sums if s["bad_steps"]]
        if bad and self.loop.options.on_nonfinite != "skip":
            step, leaf = min(bad)
            raise recovery.Diverged(
                step, bad_leaf_name(self.run.states()[0], leaf), windows=[s["window"] for s in sums]
            )

    def keep_pace(self, taken, done):
        """Set the length of the next chunk from the time of this one; the first is left out, as it may hold a compilation."""
        if self.settled:
            self.pace = max(1, round(CHUNK_SECONDS * taken / max(done - self.settled, 1e-6)))
        self.settled = done
