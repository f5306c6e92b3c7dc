"""What the machine does in a few steps of training, as a trace to look at."""

import logging
import shutil
import time

import jax

from training.base import Callback
from training.ranges import at_least, positive
from utils import UserError, first_line

logger = logging.getLogger("main")

NEVER = 2**30


def profiler(
    first_step: int = 10, n_steps: int = 5, every_n_minutes: float | None = None
) -> Callback:
    """A trace of `n_steps` steps in profile/step_<n>, `first_step` steps after the run began or was gone on with.

    Its perfetto_trace.json.gz opens in ui.perfetto.dev; XProf, and TensorBoard with its plugin, show the whole folder profile.
    With `every_n_minutes` there is another one so long after each. A trace holds training alone: where an evaluation comes before
    its last step, it ends there, with fewer steps.
    """
    at_least(1, first_step=first_step, n_steps=n_steps)
    if every_n_minutes is not None:
        positive(every_n_minutes=every_n_minutes)
    return Profiler(first_step, n_steps, every_n_minutes)


class Profiler:
    observer = True  # the steps that it asks for are waited for anyway

    def __init__(self, first_step, n_steps, every_n_minutes):
        self.first_step, self.n_steps, self.every_n_minutes = first_step, n_steps, every_n_minutes

    def on_training_start(self, view):
        if view.folder is None:
            raise UserError(
                "profiler: there is no run folder to write to; give fit a `folder`, or leave the profiler out"
            )
        self.began, self.next = None, None  # the step of the open trace, and of the next one
        self.again = None  # when, by the clock, a next one is due
        self.asked, self.tried, self.warned = False, False, False

    def steps_left(self, step):
        """Steps until a trace begins or ends."""
        if not self.asked:  # the first question tells where the run begins, or goes on
            self.asked, self.next = True, step + self.first_step
        if self.began is not None:
            return max(1, self.began + self.n_steps - step)
        if self.again is not None and time.monotonic() >= self.again:
            self.again, self.next = None, step + 1
        return NEVER if self.next is None else max(1, self.next - step)

    def on_step_end(self, view):
        if self.began is not None and view.step >= self.began + self.n_steps:
            self.end(view)
        elif self.began is None and self.next is not None and view.step >= self.next:
            self.begin(view)

    def on_epoch_start(self, view):
        self.on_step_end(view)  # a trace that an evaluation ended before its first step

    def on_validation_start(self, view):
        self.end(view)

    def on_test_start(self, view):
        self.end(view)

    def on_training_end(self, view):
        self.end(view)
        if not self.tried:
            logger.warning(
                "profiler: the run ended before its trace began; lower first_step, which is %d",
                self.first_step,
            )

    def begin(self, view):
        """Open a trace; somebody else's, still open, is left alone."""
        self.tried = True
        try:
            jax.profiler.start_trace(folder_of(view, view.step), create_perfetto_trace=True)
            self.began = view.step
        except RuntimeError as error:
            if not self.warned:
                logger.warning("profiler: step %d is not traced: %s", view.step, error)
            self.warned, self.next = True, None
            self.plan_another()

    def end(self, view):
        """Close the trace, if one is open; one that holds no step is begun once more after the evaluation."""
        if self.began is None:
            return
        began, self.began = self.began, None
        folder = folder_of(view, began)
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError, ValueError) as error:  # no reason to lose the run
            logger.warning(
                "profiler: %s: the trace could not be written: %s", folder, first_line(error)
            )
            self.next = self.again = None
            return
        if view.step <= began:
            shutil.rmtree(folder, ignore_errors=True)
            return
        self.next = None
        self.plan_another()
        logger.info(
            "profiler: the %d steps after step %d are traced in %s",
            view.step - began,
            began,
            folder,
        )

    def plan_another(self):
        """When the next trace is due, if there is to be one."""
        if self.every_n_minutes is not None:
            self.again = time.monotonic() + 60 * self.every_n_minutes


def folder_of(view, step):
    """Where the trace that begins after a step lies."""
    return view.folder / "profile" / f"step_{step}"
