"""The rates of a run: how fast it goes, in which what compiling took stands apart, and its learning rates."""

import time

import numpy as np

from training.programs import compiled_start

TIMES = ("seconds", "compile_seconds", "steps_per_second", "examples_per_second", "waiting")  # differ from run to run


class Rates:
    """Clocks of training; `compiled()` and `waited()` answer the seconds that compiling, and waiting for data, took so far."""

    def __init__(self, compiled, waited):
        self.compiled, self.waited = compiled, waited
        self.start_epoch(0.0)
        self.start_training()

    def now(self):
        return {"time": time.perf_counter(), "compiled": self.compiled(), "waited": self.waited()}

    def start_epoch(self, elapsed):
        """An epoch begins, or goes on after so many seconds of it."""
        self.began, self.first_compiled = time.perf_counter() - elapsed, self.compiled()

    def start_training(self):
        """Its steps begin."""
        self.training = self.line = self.now()
        self.trained = {}

    def end_training(self, steps, examples):
        """Its steps are done: how fast they went is known."""
        self.trained = self.since(self.training, steps, examples)

    def new_line(self, steps, examples):
        """How fast the steps since the last line went."""
        found, self.line = self.since(self.line, steps, examples), self.now()
        return found

    def since(self, mark, steps, examples):
        """The rates since a mark."""
        now = self.now()
        seconds = now["time"] - mark["time"] - (now["compiled"] - mark["compiled"])
        waiting = (now["waited"] - mark["waited"]) / seconds
        return {"steps_per_second": steps / seconds, "examples_per_second": examples / seconds, "waiting": min(waiting, 1.0)}

    def elapsed(self):
        """The seconds of this epoch."""
        return time.perf_counter() - self.began

    def epoch(self):
        """What the line that closes an epoch tells."""
        return {"seconds": self.elapsed(), "compile_seconds": self.compiled() - self.first_compiled, **self.trained}


class LearningRates:
    """The learning rates at a step, {name: value}: `rates` are numbers, or functions of the step that answer a number."""

    def __init__(self, rates, runner):
        self.rates, self.runner, self.compiled = rates, runner, None

    def __call__(self, step):
        if not self.rates:
            return {}
        if self.compiled is None:
            values = lambda step: {name: rate(step) if callable(rate) else rate for name, rate in self.rates.items()}  # noqa: E731
            self.compiled = compiled_start(values, self.runner.lanes.mesh, np.int32(0))
        found = self.compiled(np.int32(max(step - 1, 0)))  # of the latest step
        return {name: float(f"{float(rate) * self.runner.rate_scale:.7g}") for name, rate in found.items()}  # not 0.003000000026
