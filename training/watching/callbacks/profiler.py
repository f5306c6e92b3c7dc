"""Trace what the machine does in a few steps of training."""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import jax

from training.base import Callback
from training.processes import is_first
from training.watching.view import View
from utils import UserError, first_line
from utils.forms import Count, Positive, checked

logger = logging.getLogger("main")


@checked
def profiler(
    first_step: Count = 10, n_steps: Count = 5, every_n_minutes: Positive | None = None
) -> Callback:
    """Trace `n_steps` steps, `first_step` steps after the run starts or resumes.

    The trace is written to profile/step_<n>. Its perfetto_trace.json.gz opens in ui.perfetto.dev;
    XProf, and TensorBoard with its plugin, show the whole folder profile/. `every_n_minutes` after
    a trace, another one begins.
    """
    return Profiler(first_step, n_steps, every_n_minutes)


@dataclass
class Profiler:
    first_step: int
    n_steps: int
    every_n_minutes: float | None
    began: int | None = None  # the step at which the open trace began

    def on_start(self, run: View) -> None:
        self.began, self.every = None, {}
        if not is_first():  # process 0 traces
            return
        if run.folder is None:
            fix = "pass `folder` to fit, or remove the profiler"
            raise UserError(f"profiler: there is no run folder to write to; {fix}")
        self.tried = self.warned = False
        self.every = {"at": run.step + self.first_step}

    def on_steps(self, run: View) -> None:
        if not is_first():
            return
        if self.began is None:
            self.begin(run)
        else:
            self.end(run)

    def on_end(self, run: View) -> None:
        self.end(run)
        if is_first() and not self.tried:
            fix = f"lower first_step, which is {self.first_step}"
            logger.warning("profiler: the run ended before its trace began; %s", fix)

    def begin(self, run: View) -> None:
        """Open a trace, unless other code has one open."""
        self.tried = True
        try:
            jax.profiler.start_trace(folder_of(run, run.step), create_perfetto_trace=True)
            self.began, self.every = run.step, {"at": run.step + self.n_steps}
        except RuntimeError as error:
            if not self.warned:
                logger.warning("profiler: step %d is not traced: %s", run.step, error)
            self.warned = True
            self.plan_next()

    def end(self, run: View) -> None:
        """Close the trace, if one is open."""
        if self.began is None:
            return
        began, self.began = self.began, None
        folder = folder_of(run, began)
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError, ValueError) as error:  # the run continues without a trace
            message = "profiler: %s: the trace could not be written: %s"
            logger.warning(message, folder, first_line(error))
            self.every = {}  # no other one
            return
        if run.step <= began:
            shutil.rmtree(folder, ignore_errors=True)
            return
        self.plan_next()
        message = "profiler: the %d steps after step %d are traced in %s"
        logger.info(message, run.step - began, began, folder)

    def plan_next(self) -> None:
        """Begin the next trace after some minutes, or never."""
        minutes = self.every_n_minutes
        self.every = {} if minutes is None else {"seconds": 60 * minutes}


def folder_of(view: View, step: int) -> Path:
    """The folder of the trace that begins after a step."""
    return view.folder / "profile" / f"step_{step}"
