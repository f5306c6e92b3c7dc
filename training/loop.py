"""The loop over chunks of steps and epochs: what is logged, evaluated, and told to callbacks, and when."""

import logging
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from training.callbacks import notify
from training.metric_log import difference, progress_bar, values
from utils import RunError

logger = logging.getLogger("main")

CHUNK_SECONDS = 0.3  # of work in one call: bounds how late a log line or a signal is seen


class Diverged(RunError):
    """The loss or a gradient is no longer finite."""


@dataclass
class Run:
    """What callbacks see of a run, and what `fit` returns."""

    runner: Any
    epochs: int
    steps: int | None  # in an epoch; None where nobody knows
    epoch: int = 0
    step: int = 0  # batches taken in all
    metrics: dict = field(default_factory=dict)  # of the latest line: within an epoch, or at its end
    history: list = field(default_factory=list)  # a row an epoch
    stopped: bool = False
    signal: str | None = None  # the signal that stopped it

    def states(self):
        """The TrainState of each replica. Its arrays are gone with the next step: copy what must outlive a hook."""
        return self.runner.replica_states()

    @property
    def params(self):
        """A copy of the trained weights (of the first replica): the averaged ones where there are such."""
        ts = self.states()[0]
        return jax.tree.map(jnp.copy, ts.params if ts.ema is None else ts.ema)

    @property
    def state(self):
        """A copy of the running statistics that go with `params`."""
        return jax.tree.map(jnp.copy, self.states()[0].state)

    @property
    def finished(self):
        """Whether every epoch was trained to its end."""
        return len(self.history) == self.epochs


class Loop:
    """Drives a Runner through its epochs. A chunk's sums are read while the next chunk computes, so the device never waits for a
    log line; any step can be a log point without changing a bit, since a chunk's length is a run-time number."""

    def __init__(self, runner, objective, callbacks, options, log, log_every):
        self.runner, self.callbacks, self.options, self.log, self.log_every = runner, callbacks, options, log, log_every
        self.finish = getattr(objective, "finish", lambda means: means)
        self.run = Run(runner, options.epochs, runner.feeds["train"].steps)
        self.watched = any(hasattr(callback, "on_step_end") for callback in callbacks)
        self.chunk = 8  # steps in a call, until their pace is known
        self.logged, self.settled = None, None  # this epoch's sums at the last log point; when the last chunk was done

    def run_all(self):
        """Train to the end, or until a signal or a callback stops the run."""
        run = self.run
        try:
            with stop_signals(run):
                self.notify("on_training_start")
                while run.epoch < run.epochs and not run.stopped:
                    run.epoch += 1
                    self.one_epoch()
                self.notify("on_training_end")
                if run.signal:
                    logger.info("Stopped by %s after step %d", run.signal, run.step)
        finally:
            self.runner.close()
        return run

    def one_epoch(self):
        """Training, evaluation and the lines that close an epoch; what stops the run within the epoch leaves it unfinished."""
        run, began = self.run, time.perf_counter()
        run.metrics = {}
        logger.info("---- STARTING EPOCH %d ----", run.epoch)
        self.notify("on_epoch_start")
        sums = self.train_epoch()
        if run.stopped:
            run.metrics = {}  # of an unfinished epoch there are none
            return
        run.metrics = values("train", sums, self.finish)
        if self.options.eval_every and run.epoch % self.options.eval_every == 0:
            for name in [name for name in self.runner.feeds if name != "train"]:
                run.metrics |= values(name, self.runner.read(self.runner.evaluate(name)), self.finish)
        seconds, examples = time.perf_counter() - began, sum(int(s["examples"]) for s in sums)
        run.history.append(self.log.epoch(run.epoch, run.step, run.metrics, seconds, examples))
        if skipped := sum(int(s["bad_steps"]) for s in sums):
            logger.warning("Epoch %d: skipped %d steps whose loss or gradients were not finite", run.epoch, skipped)
        self.notify("on_epoch_end")

    def train_epoch(self):
        """The steps of one epoch; what each replica summed up over it."""
        run, runner = self.run, self.runner
        runner.begin(run.epoch)
        self.logged, self.settled = None, None
        position, sums, pending, taken = 0, None, None, 1
        with progress_bar(run.epoch, run.steps) as bar:
            while taken and not run.stopped:
                taken, reports = runner.train(min(self.chunk, self.log_every - position % self.log_every))
                position += taken
                if pending:
                    sums = self.settle(*pending, bar)
                pending = (reports, position, taken) if taken else None
                if pending and self.watched and position % self.log_every == 0:
                    sums, pending = self.settle(*pending, bar), None  # what a hook sees and answers is of this very step
            if pending:
                sums = self.settle(*pending, bar)
        return sums

    def settle(self, reports, position, taken, bar):
        """Wait for a chunk, check it, log it, and tell the callbacks."""
        run, sums = self.run, self.runner.read(reports)
        run.step += taken
        bar.update(taken)
        self.check_finite(sums)
        self.keep_pace(taken)
        if position % self.log_every == 0:
            run.metrics = values("train", difference(sums, self.logged), self.finish)
            self.log.progress(run.epoch, position, run.steps, run.step, run.metrics)
            self.logged = sums
            self.notify("on_step_end")
        return sums

    def check_finite(self, sums):
        """Stop at non-finite steps, unless they are to be skipped."""
        first = [int(s["first_bad"]) for s in sums if s["bad_steps"]]
        if first and self.options.on_nonfinite == "stop":
            raise Diverged(
                f"the loss, a gradient or a weight was not finite at step {min(first) + 1} (epoch {self.run.epoch}). "
                "A label outside the classes does that; else lower the learning rate, clip the gradients, "
                "or set training.on_nonfinite to 'skip'"
            )

    def keep_pace(self, taken):
        """Set the length of the next chunk from the time of this one; the first is left out, as it may hold a compilation."""
        now = time.perf_counter()
        if self.settled:
            self.chunk = max(1, round(CHUNK_SECONDS * taken / (now - self.settled)))
        self.settled = now

    def notify(self, hook):
        """Call a hook of every callback, and do what they answer."""
        answers = notify(self.callbacks, hook, self.run)
        if answers.get("stop"):
            self.run.stopped = True
        if "lr_scale" in answers:
            self.runner.scale_rate(answers["lr_scale"])


@contextmanager
def stop_signals(run):
    """SIGTERM and SIGINT end the run after the chunk in flight; a second one ends it at once, as a KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return

    def note(number, _frame):
        if run.signal:
            raise KeyboardInterrupt
        run.stopped, run.signal = True, signal.Signals(number).name
        logger.info("%s: stopping after the steps in flight; once more stops at once", run.signal)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
