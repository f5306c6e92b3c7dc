"""Trace what the machine does in a few steps of training."""

import logging
import shutil
import time

import jax

from ranges import Count, Positive, checked
from training.base import Callback
from training.watchers import NEVER
from utils import UserError, first_line

logger = logging.getLogger("main")


@checked
def profiler(
    first_step: Count = 10, n_steps: Count = 5, every_n_minutes: Positive | None = None
) -> Callback:
    """Trace `n_steps` steps, `first_step` steps after the run starts or resumes.

    The trace is written to profile/step_<n>. Its perfetto_trace.json.gz opens in ui.perfetto.dev;
    XProf, and TensorBoard with its plugin, show the whole folder profile/. `every_n_minutes` after
    a trace, another one begins. A trace holds only training: it ends early at an evaluation.
    """
    return Profiler(first_step, n_steps, every_n_minutes)


class Profiler:
    observer = True  # steps_left already makes the run wait for the steps that matter

    def __init__(self, first_step, n_steps, every_n_minutes):
        self.first_step, self.n_steps, self.every_n_minutes = first_step, n_steps, every_n_minutes

    def on_training_start(self, view):
        if view.folder is None:
            fix = "pass `folder` to fit, or remove the profiler"
            raise UserError(f"profiler: there is no run folder to write to; {fix}")
        self.began = self.next = None  # the first steps of the open and of the next trace
        self.due = None  # the time at which the next trace is due
        self.planned = self.tried = self.warned = False

    def steps_left(self, step):
        """Steps until a trace begins or ends."""
        if not self.planned:  # the first call has the step at which the run starts or resumes
            self.planned, self.next = True, step + self.first_step
        if self.began is not None:
            return max(1, self.began + self.n_steps - step)
        if self.due is not None and time.monotonic() >= self.due:
            self.due, self.next = None, step + 1
        return NEVER if self.next is None else max(1, self.next - step)

    def on_step_end(self, view):
        if self.began is not None and view.step >= self.began + self.n_steps:
            self.end(view)
        elif self.began is None and self.next is not None and view.step >= self.next:
            self.begin(view)

    on_epoch_start = on_step_end  # for a trace that an evaluation ended before its first step

    def on_training_end(self, view):
        self.end(view)
        if not self.tried:
            fix = f"lower first_step, which is {self.first_step}"
            logger.warning("profiler: the run ended before its trace began; %s", fix)

    def begin(self, view):
        """Open a trace, unless other code has one open."""
        self.tried = True
        try:
            jax.profiler.start_trace(folder_of(view, view.step), create_perfetto_trace=True)
            self.began = view.step
        except RuntimeError as error:
            if not self.warned:
                logger.warning("profiler: step %d is not traced: %s", view.step, error)
            self.warned, self.next = True, None
            self.plan_next()

    def end(self, view):
        """Close the trace, if one is open; one without a step begins again after the evaluation."""
        if self.began is None:
            return
        began, self.began = self.began, None
        folder = folder_of(view, began)
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError, ValueError) as error:  # the run continues without a trace
            message = "profiler: %s: the trace could not be written: %s"
            logger.warning(message, folder, first_line(error))
            self.next = self.due = None
            return
        if view.step <= began:
            shutil.rmtree(folder, ignore_errors=True)
            return
        self.next = None
        self.plan_next()
        message = "profiler: the %d steps after step %d are traced in %s"
        logger.info(message, view.step - began, began, folder)

    on_validation_start = on_test_start = end

    def plan_next(self):
        """Set the time of the next trace, if there is one."""
        if self.every_n_minutes is not None:
            self.due = time.monotonic() + 60 * self.every_n_minutes


def folder_of(view, step):
    """The folder of the trace that begins after a step."""
    return view.folder / "profile" / f"step_{step}"
