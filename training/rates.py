"""The rates of a run: how fast it goes, in which what compiling took stands apart, and its learning rates."""

import time

import jax
import numpy as np

from training.devices.sharding import replicated
from training.programs import Start

BLOCK = 4096  # steps whose learning rates are made at once
TIMES = (
    "seconds",
    "compile_seconds",
    "steps_per_second",
    "examples_per_second",
    "waiting",
)  # differ from run to run


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

    def new_line(self, steps, examples, done):
        """How fast the steps since the last line went, which were done at a time."""
        found, self.line = self.since(self.line, steps, examples, done), self.now() | {"time": done}
        return found

    def since(self, mark, steps, examples, done=None):
        """The rates since a mark."""
        now = self.now() | ({"time": done} if done else {})
        seconds = max(now["time"] - mark["time"] - (now["compiled"] - mark["compiled"]), 1e-6)
        waiting = (now["waited"] - mark["waited"]) / seconds
        return {
            "steps_per_second": steps / seconds,
            "examples_per_second": examples / seconds,
            "waiting": min(waiting, 1.0),
        }

    def elapsed(self):
        """The seconds of this epoch."""
        return time.perf_counter() - self.began

    def epoch(self):
        """What the line that closes an epoch tells."""
        return {
            "seconds": self.elapsed(),
            "compile_seconds": self.compiled() - self.first_compiled,
            **self.trained,
        }


class LearningRates:
    """The learning rates at a step, {name: value}: `rates` are numbers, or functions of the step that answer a number. They are
    made for many steps at once, since a program on the device would wait for the steps in flight."""

    def __init__(self, rates, runner):
        self.rates, self.runner, self.blocks = rates or {}, runner, {}

    def __call__(self, step):
        if not self.rates:
            return {}
        block, place = divmod(max(step - 1, 0), BLOCK)  # the rates of the latest step
        if block not in self.blocks:
            self.blocks = {block: self.made(block * BLOCK)}
        scaled = {
            name: float(values[place]) * self.runner.rate_scale
            for name, values in self.blocks[block].items()
        }
        return {name: float(f"{rate:.7g}") for name, rate in scaled.items()}  # not 0.003000000026

    def made(self, first):
        """The rates of a block of steps from this one on."""
        functions = {name: rate for name, rate in self.rates.items() if callable(rate)}
        numbers = {
            name: np.full(BLOCK, rate) for name, rate in self.rates.items() if name not in functions
        }
        if not functions:
            return numbers
        steps = np.arange(first, first + BLOCK, dtype=np.int32)
        each = jax.vmap(
            lambda step: {name: rate(step) for name, rate in functions.items()}, out_axes=0
        )
        return numbers | jax.device_get(
            Start(each, replicated(self.runner.lanes.mesh), steps)(steps)
        )
