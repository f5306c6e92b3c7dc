"""The protocols of training: every kind of part that a config can name, on one page.

A part is a public function whose return annotation is its kind. `Optimizer`, `Schedule`, `Objective` and `Update` come from
factories: the config's args are the arguments of the factory. `Loss`, `Metric`, `Preprocessed` and `Augmented` are what
plain functions of one example return: the config's args are their keyword-only arguments.
"""

from collections.abc import Callable
from typing import NamedTuple, NewType

import jax


class Optimizer(NamedTuple):
    """Optax's protocol: updates are added to the parameters."""

    init: Callable  # params -> state
    update: Callable  # (grads, state, params) -> (updates, state)


Schedule = NewType("Schedule", Callable)  # step -> multiplier in [0, 1]

Loss = NewType("Loss", jax.Array)  # def fn(output, target) -> Loss, a scalar
Metric = NewType(
    "Metric", jax.Array
)  # def fn(output, target) -> Metric, a scalar or a dict; fn.finish maps the means
Preprocessed = NewType(
    "Preprocessed", jax.Array
)  # def fn(x) -> Preprocessed, the same in training and evaluation
Augmented = NewType("Augmented", jax.Array)  # def fn(key, x) -> Augmented, training only

Objective = NewType(
    "Objective", Callable
)  # (params, state, batch, key, train) -> (losses, state, metrics), a number an example


class TrainState(NamedTuple):
    """All that a run is: what is donated to each step, and what a checkpoint holds."""

    step: jax.Array  # batches taken; the randomness of a step is fold_in(key(seed), step)
    seed: jax.Array
    params: dict
    state: dict
    opt: dict
    ema: dict | None  # averaged weights, or None without them
    sums: dict  # the epoch's metric accumulators
    lr_scale: jax.Array  # a callback's multiplier of every update


class Update(NamedTuple):
    """How one batch changes a TrainState; `valid` counts the genuine examples at the front of the batch."""

    init: Callable  # params -> (optimizer state, averaged weights or None)
    step: Callable  # (TrainState, batch, valid) -> TrainState


Callback = NewType(
    "Callback", object
)  # an object with any of the hooks of training/watching/hooks.py

Tracker = NewType(
    "Tracker", object
)  # an object with any of the methods that training/watching/publish.py calls
