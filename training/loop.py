"""The loop over chunks of steps and epochs: what is logged, evaluated, saved, and told to callbacks, and when."""

import logging
import time

from training import recovery
from training.callbacks import memories, notify
from training.checkpoint.keeper import Cut, NoKeeper
from training.metric_log import difference, progress_bar, sayable, values
from training.run import Run
from training.stop import stop_signals
from training.update import bad_leaf_name
from utils import RunError

logger = logging.getLogger("main")

CHUNK_SECONDS = 0.3  # of work in one call: bounds how late a log line or a signal is seen


class Loop:
    """Drives a Runner through its epochs. A chunk's sums are read while the next chunk computes, so the device never waits for a
    log line; any step can be a log or save point without changing a bit, since a chunk's length is a run-time number. `found`
    is the checkpoint to go on from."""

    def __init__(self, runner, objective, callbacks, options, log, log_every, keeper=None, found=None):
        self.runner, self.callbacks, self.options, self.log, self.log_every = runner, callbacks, options, log, log_every
        self.keeper, self.found = keeper or NoKeeper(), found
        self.finish = getattr(objective, "finish", lambda means: means)
        self.run = Run(runner, options.epochs, runner.feeds["train"].steps)
        self.watched = any(hasattr(callback, "on_step_end") for callback in callbacks)
        self.chunk = 8  # steps in a call, until their pace is known
        self.settled = None  # when the last chunk was done
        self.flying = []  # chunks that are not settled: (reports, position after it, batches taken)
        self.logged = None  # this epoch's sums at the last log line
        self.began, self.elapsed = 0.0, 0.0  # when this epoch began; its seconds before the run was gone on with
        self.rollbacks = 0  # how often the run went back to a checkpoint
        self.underway = False  # whether the states are those of the run
        self.stop_answered = False  # whether a callback stopped the run

    def run_all(self):
        """Train to the end, or until a signal or a callback stops the run."""
        run = self.run
        try:
            with stop_signals(run):
                self.begin()
                while not run.finished and not run.stopped:
                    try:
                        self.one_epoch()
                    except recovery.Diverged as error:
                        recovery.after_divergence(self, error)
                self.notify("on_training_end")
                self.keeper.ended(run, self.cut)
                if run.stopped:
                    logger.info("Stopped by %s after step %d", run.signal or "a callback", run.step)
        except Exception as error:
            recovery.rescue(self, error)
            raise
        return run

    def begin(self):
        """Start, or go on from a checkpoint."""
        self.notify("on_training_start")
        if self.found:
            recovery.restore(self, self.found)
        elif self.options.on_nonfinite == "rollback":
            self.keeper.save(self.run, self.cut)  # something to go back to from the first epoch
        self.underway = True

    def one_epoch(self):
        """Training, evaluation and the lines that close an epoch; what stops the run within the epoch leaves it unfinished."""
        run, self.began = self.run, time.perf_counter() - self.elapsed
        run.epoch = run.completed + 1
        if run.position:
            logger.info("---- GOING ON WITH EPOCH %d AFTER %d BATCHES ----", run.epoch, run.position)
        else:
            logger.info("---- STARTING EPOCH %d ----", run.epoch)
            self.notify("on_epoch_start")
        if run.stopped and not run.position:
            return
        sums = self.train_epoch()
        evaluated = None if run.stopped else self.evaluate()
        if evaluated is None:
            run.metrics = {}  # of an unfinished epoch there are none
            return
        run.metrics = values("train", sums, self.finish) | evaluated
        seconds = time.perf_counter() - self.began
        examples, skipped = (sum(int(s[name]) for s in sums) for name in ("examples", "bad_steps"))
        if not examples:
            raise RunError(f"no step of epoch {run.epoch} was finite, so all were skipped. {recovery.ADVICE}")
        run.history.append(self.log.epoch(run.epoch, run.step, run.metrics, seconds, examples))
        run.completed, run.position, self.elapsed = run.epoch, 0, 0.0
        if skipped:
            logger.warning("Epoch %d: skipped %d steps whose loss or gradients were not finite", run.epoch, skipped)
        self.notify("on_epoch_end")
        self.keeper.epoch_ended(run, self.cut)

    def train_epoch(self):
        """The steps of one epoch, or the rest of it; what each replica summed up over it."""
        run, runner = self.run, self.runner
        runner.begin(run.epoch, run.position)
        position, first_step = run.position, run.step - run.position
        self.settled, self.flying = None, []
        if position == 0:
            self.logged = None
        sums, taken = None, 1
        with progress_bar(run.epoch, run.steps, position) as bar:
            while taken:
                taken, reports = runner.train(self.next_chunk(position, first_step + position))
                position += taken
                self.flying += [(reports, position, taken)] if taken else []
                due = taken and position != run.steps and self.keeper.due(first_step + position)
                exact = due or (self.watched and position % self.log_every == 0)  # a hook sees and answers this very step
                sums = self.settle(bar, leave=0 if exact else 1) or sums
                if due:
                    self.keeper.save(run, self.cut)
                if run.stopped:
                    break
            sums = self.settle(bar) or sums
        return sums or runner.read([ts.sums for ts in runner.states])

    def next_chunk(self, position, step):
        """Steps until something is to be done, at most what takes CHUNK_SECONDS."""
        return min(self.chunk, self.log_every - position % self.log_every, self.keeper.steps_left(step))

    def settle(self, bar, leave=0):
        """Settle the chunks in flight, but for the last `leave`; the sums after them, None where there are none."""
        sums = None
        while len(self.flying) > leave:
            sums = self.settle_chunk(*self.flying.pop(0), bar)
        return sums

    def settle_chunk(self, reports, position, taken, bar):
        """Wait for a chunk, check it, log it, and tell the callbacks."""
        run, sums = self.run, self.runner.read(reports)
        self.check_finite(sums)
        run.step, run.position = run.step + taken, position
        bar.update(taken)
        self.keep_pace(taken)
        if position % self.log_every == 0:
            run.metrics = values("train", difference(sums, self.logged), self.finish)
            self.log.progress(run.epoch, position, run.steps, run.step, run.metrics)
            self.logged = sums
            self.notify("on_step_end")
        self.keeper.check()
        return sums

    def check_finite(self, sums):
        """Stop at steps that are not finite, unless they are to be skipped."""
        bad = [(int(s["first_bad"]), int(s["bad_leaf"])) for s in sums if s["bad_steps"]]
        if bad and self.options.on_nonfinite != "skip":
            step, leaf = min(bad)
            raise recovery.Diverged(step, bad_leaf_name(self.run.states()[0], leaf))

    def keep_pace(self, taken):
        """Set the length of the next chunk from the time of this one; the first is left out, as it may hold a compilation."""
        now = time.perf_counter()
        if self.settled:
            self.chunk = max(1, round(CHUNK_SECONDS * taken / (now - self.settled)))
        self.settled = now

    def evaluate(self):
        """The metrics of the held-out sets where an evaluation is due; None where a signal came in between."""
        run, found = self.run, {}
        if not self.options.eval_every or run.epoch % self.options.eval_every:
            return found
        for name in [name for name in self.runner.feeds if name != "train"]:
            sums = self.runner.evaluate(name, self.chunk, lambda: run.stopped)
            if sums is None:
                return None
            found |= values(name, sums, self.finish)
        return found

    def notify(self, hook):
        """Call a hook of every callback, and do what they answer."""
        answers = notify(self.callbacks, hook, self.run)
        if answers.get("stop"):
            self.run.stopped = self.stop_answered = True
        if "lr_scale" in answers:
            self.runner.scale_rate(answers["lr_scale"])

    def cut(self):
        """The run at this moment, between two chunks, all books in order."""
        run = self.run
        where = {"step": run.step, "epoch": run.epoch if run.position else run.completed, "position": run.position}
        elapsed = time.perf_counter() - self.began if run.position else 0.0
        where |= {"elapsed": elapsed, "rollbacks": self.rollbacks, "stopped": self.stop_answered}
        where |= {"metrics": sayable(run.metrics), "callbacks": memories(self.callbacks)}
        return Cut(self.runner.snapshot(), self.logged, where)
