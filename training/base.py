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
Metric = NewType("Metric", jax.Array)  # def fn(output, target) -> Metric, a scalar or a dict; fn.finish maps the means
Preprocessed = NewType("Preprocessed", jax.Array)  # def fn(x) -> Preprocessed, the same in training and evaluation
Augmented = NewType("Augmented", jax.Array)  # def fn(key, x) -> Augmented, training only
