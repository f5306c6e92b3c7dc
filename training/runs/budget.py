"""The budget of a run: training.max_steps and training.max_seconds, after which it ends."""

import logging
import time

from training.devices.processes import agreed
from training.watchers import NEVER, Reply

logger = logging.getLogger("main")


class Budget:
    """The watcher that ends a run when its budget is exhausted. The state is saved, so that the run
    continues to the same bits with a larger budget. The seconds before a resume count, too."""

    def __init__(self, options):
        self.steps, self.seconds = options.max_steps, options.max_seconds
        self.before, self.began = 0.0, time.monotonic()  # seconds before the run was resumed

    def spent(self):
        return self.before + time.monotonic() - self.began

    def memory(self):
        return {"seconds": self.spent()}

    def on_resume(self, run, point):
        if point.checkpoint:
            former = point.record.get("seconds") or 0.0  # after a rollback, less than was spent
            self.before, self.began = max(self.spent(), former), time.monotonic()

    def steps_left(self, ahead):
        return max(1, self.steps - ahead.step) if self.steps else NEVER

    def overdue(self, ahead):
        return self.time_is_up()

    def time_is_up(self):
        return self.seconds is not None and self.spent() >= self.seconds

    def needs_state(self, due, line):
        return due

    def on_ready(self, run):
        """A resumed run may have exhausted its budget before it was evaluated."""
        return self.on_epoch_end(run)

    def on_chunk(self, run, report):
        """End the run within an epoch; at the end of an epoch, on_epoch_end ends it."""
        due = self in report.due and run.position != run.steps
        return Reply(budget_exhausted=self.used_up(run)) if due else None

    def on_epoch_end(self, run):
        is_over = self.steps is not None and run.step >= self.steps
        if self.seconds is not None and not is_over:
            is_over = agreed([self.time_is_up()])[0]
        return Reply(budget_exhausted=self.used_up(run)) if is_over and not run.finished else None

    def on_training_end(self, run):
        """Log if the epochs ended the run before its steps did."""
        if run.finished and self.steps and run.step < self.steps:
            logger.info(
                "Stopped by training.epochs (%d) after step %d, before training.max_steps (%d); "
                "with training.epochs=null, max_steps alone ends a run",
                run.epochs,
                run.step,
                self.steps,
            )

    def used_up(self, run):
        """The option that ends the run, for the log."""
        by_steps = self.steps and run.step >= self.steps
        return "training.max_steps" if by_steps else f"training.max_seconds ({self.seconds:g} s)"


def nothing_left(record, options):
    """Why a run that has ended after this record of a checkpoint has no budget left, or None."""
    step, seconds = record["step"], record.get("seconds") or 0.0
    if options.max_steps is not None and step >= options.max_steps:
        return f"has completed {step} steps, and training.max_steps is {options.max_steps}"
    if options.max_seconds is not None and seconds >= options.max_seconds:
        return f"trained for {seconds:.1f} s, and training.max_seconds is {options.max_seconds:g}"
    return None
