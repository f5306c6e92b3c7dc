"""The loop over epochs: training, evaluation, checkpoints, and what is told to callbacks, and when."""

import logging

import numpy as np

from training import evaluations
from training.checkpoint.keeper import Cut, NoKeeper
from training.devices.placing import fetched
from training.devices.processes import Stopping, is_first, several
from training.flight import Flight
from training.rates import Rates
from training.run import Run
from training.runs import dry_run as sanity
from training.runs import recovery
from training.runs.signals import stop_signals
from training.watching.hooks import common, memories, notify
from training.watching.metric_log import for_trackers, sayable
from training.watching.view import View
from utils import RunError, named_leaves

logger = logging.getLogger("main")

TRACKERS_SECONDS = {False: 30.0, True: 1.0}  # that the trackers get to end; a signal leaves no time


class Loop:
    """Drives a Runner through its epochs. `reader` names what was measured, `reporting` are the LoggingOptions, `found` is the
    checkpoint to go on from, `seen` what callbacks see besides the Run, `rates` the learning rates at a step."""

    def __init__(
        self,
        runner,
        reader,
        callbacks,
        options,
        log,
        reporting,
        *,
        keeper=None,
        found=None,
        seen=None,
        rates=None,
    ):
        self.runner, self.reader, self.options = runner, reader, options
        self.all_callbacks = callbacks
        self.callbacks = (
            callbacks if is_first() else [c for c in callbacks if not getattr(c, "observer", False)]
        )
        self.stopping = Stopping() if several() else None
        self.log, self.reporting, self.keeper, self.found = (
            log,
            reporting,
            keeper or NoKeeper(),
            found,
        )
        self.run = Run(runner, options.epochs, runner.feed.steps)
        self.learning_rate = rates or (lambda step: {})
        self.view = View(self.run, lambda: self.learning_rate(self.run.step), **(seen or {}))
        self.rates = Rates(runner.compiled, lambda: runner.feed.waited)
        self.flight = Flight(self)
        self.elapsed = 0.0  # seconds of this epoch before the run was gone on with
        self.rollbacks = 0  # how often the run went back to a checkpoint
        self.underway = False  # whether the states are those of the run
        self.stop_answered, self.stopped_by = (
            False,
            "a callback",
        )  # whether a callback stopped the run, and which

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
                self.keeper.ended(run, self.cut)
                evaluations.after_the_last(self)
                self.notify("on_training_end")
                if run.cut_short:
                    logger.info(
                        "Stopped by %s after step %d", run.signal or self.stopped_by, run.step
                    )
        except Exception as error:
            recovery.rescue(self, error)
            raise
        finally:
            run.published = self.log.publish.close(
                for_trackers(run.metrics), TRACKERS_SECONDS[bool(run.signal)]
            )
        return run

    def begin(self):
        """Start, or go on from a checkpoint."""
        sanity.check(self)
        self.notify("on_training_start")
        if self.found:
            recovery.restore(self, self.found)
        if not self.found or recovery.nothing_was_logged(
            self.found
        ):  # a signal may have come within it
            evaluations.before_the_first(self)
        if not self.found and self.options.on_nonfinite == "rollback":
            self.keeper.save(self.run, self.cut)  # something to go back to from the first epoch
        self.underway = True

    def one_epoch(self):
        """Training, evaluation and the lines that close an epoch; what stops the run within the epoch leaves it unfinished."""
        run = self.run
        self.rates.start_epoch(self.elapsed)
        run.epoch, run.evaluated = run.completed + 1, []
        if run.position:
            logger.info(
                "---- GOING ON WITH EPOCH %d AFTER %d BATCHES ----", run.epoch, run.position
            )
        else:
            logger.info("---- STARTING EPOCH %d ----", run.epoch)
            self.notify("on_epoch_start")
        if run.stopped and not run.position:
            return
        measured = self.train_and_evaluate()
        if measured is None:
            run.metrics = {}  # of an unfinished epoch there are none
            return
        run.metrics = measured
        run.history.append(self.log.epoch(run.epoch, run.step, measured, self.rates.epoch()))
        run.completed, run.position, self.elapsed = run.epoch, 0, 0.0
        self.show_histograms()
        self.notify("on_epoch_end")
        self.keeper.epoch_ended(run, self.cut)

    def train_and_evaluate(self):
        """{metric: value} of an epoch, None where it was not trained or measured to its end."""
        run, runner, flight = self.run, self.runner, self.flight
        runner.begin(run.epoch, run.position)
        if runner.prepare():
            sanity.tell_of_memory(runner)
        before = sum(int(s["epoch"]["examples"]) for s in runner.sums()) if run.position else 0
        first_step = run.step
        self.rates.start_training()
        sums = flight.train()
        if run.stopped:
            return None
        steps = flight.single_steps(sums, flight.lined)
        examples = sum(int(s["epoch"]["examples"]) for s in sums)
        skipped = sum(int(s["bad_steps"]) for s in sums)
        if not examples and skipped:
            raise RunError(
                f"no step of epoch {run.epoch} was finite, so all were skipped. {recovery.ADVICE}"
            )
        if skipped:
            logger.warning(
                "Epoch %d: skipped %d steps whose loss or gradients were not finite",
                run.epoch,
                skipped,
            )
        self.rates.end_training(run.step - first_step, examples - before)
        tallies = [s["epoch"] for s in (runner.sums() if runner.gathers else sums)]
        run.arrays |= self.reader.arrays("train", tallies)
        run.metrics = self.reader.values("train", tallies) | self.learning_rate(run.step)
        self.log.measured(run.epoch, "train", run.metrics)
        evaluated = evaluations.of_epoch(self)
        if evaluated is None:  # then the run that goes on tells of the steps since the last line
            return None
        flight.log_steps(steps)
        return run.metrics | evaluated

    def show_histograms(self):
        """The weights of the first replica, leaf by leaf, for the trackers that show them."""
        if self.reporting.histograms and (several() or self.log.publish.channels_for("histogram")):
            for name, leaf in named_leaves(self.run.states()[0].params).items():
                self.log.publish.histogram(
                    self.run.step, name, np.asarray(fetched(leaf), np.float32).ravel()
                )

    def notify(self, hook, callbacks=None, always=False):
        """Call a hook of every callback, or of some, and do what they answer."""
        answers = notify(
            self.callbacks if callbacks is None else callbacks, hook, self.view, always
        )
        if several():
            answers = common(answers, hook, self.all_callbacks if callbacks is None else callbacks)
        if answers.get("stop"):
            self.run.stopped, self.stop_answered, self.stopped_by = True, True, answers["by"]
        if "lr_scale" in answers:
            self.runner.scale_rate(answers["lr_scale"])

    def look_for_signals(self):
        """Whether the run is to stop by a signal: of several processes, by one to any of them, and all at the same moment."""
        if self.stopping and not self.run.signal and self.stopping.due():
            self.run.stopped, self.run.signal = True, "SIGTERM"
            logger.info("SIGTERM, or Ctrl-C, to one of the processes: all of them stop here")
        return self.run.signal

    def cut(self):
        """The run at this moment, between two chunks, all books in order."""
        run = self.run
        where = {
            "step": run.step,
            "epoch": run.epoch if run.position else run.completed,
            "position": run.position,
        }
        where |= {"lined": self.flight.lined if run.position else 0}
        elapsed = self.rates.elapsed() if run.position else 0.0
        where |= {"elapsed": elapsed, "rollbacks": self.rollbacks, "stopped": self.stop_answered}
        where |= {"metrics": sayable(run.metrics), "callbacks": memories(self.all_callbacks)}
        return Cut(self.runner.snapshot(), where)
