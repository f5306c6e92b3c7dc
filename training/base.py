"""The protocols of training: every kind of part that a config can name, on one page.

A part is a public function whose return annotation is its kind. `Optimizer`, `Schedule`,
`Objective` and `Update` come from factories: the config's args are the arguments of the factory.
`Loss`, `Metric`, `Preprocessed` and `Augmented` are returned by plain functions of one example: the
config's args are their keyword-only arguments.
"""

from collections.abc import Callable
from typing import NamedTuple, NewType

import jax


class Optimizer(NamedTuple):
    """Optax's protocol: updates are added to the params."""

    init: Callable  # params -> opt_state
    update: Callable  # (grads, opt_state, params) -> (updates, opt_state)


Schedule = NewType("Schedule", Callable)  # step -> multiplier in [0, 1]

# def fn(output, target) -> Loss: a scalar, or a dict of terms
Loss = NewType("Loss", jax.Array)
# def fn(output, target) -> Metric: a scalar or a dict; `fn.finish`, where present, maps the means
Metric = NewType("Metric", jax.Array)
# def fn(x) -> Preprocessed: the same in training and evaluation
Preprocessed = NewType("Preprocessed", jax.Array)
# def fn(key, x) -> Augmented: in training only
Augmented = NewType("Augmented", jax.Array)


def unchanged(value):
    return value


class Objective(NamedTuple):
    """What a model is trained for; it is called as `objective(params, state, batch, key,
    train)`."""

    apply: Callable  # the call -> (loss per example, state, {metric: value per example})
    finish: Callable = unchanged  # {metric: mean} -> {metric: reported value}

    def __call__(self, params, state, batch, key, train):
        return self.apply(params, state, batch, key, train)


class TrainState(NamedTuple):
    """Everything that a run is: it is donated to each step, and a checkpoint holds it."""

    step: jax.Array  # steps taken; the randomness of a step is fold_in(key(seed), step)
    seed: jax.Array
    params: dict
    state: dict
    opt: dict
    ema: dict | None  # averaged params, or None without them
    sums: dict  # the epoch's metric accumulators
    lr_scale: jax.Array  # multiplies every update; a callback may lower it

    def evaluated(self):
        """(params, state) as they are evaluated and exported."""
        return getattr(self, evaluated_part(self._asdict())), self.state


def evaluated_part(tree):
    """The part that is evaluated and exported: "ema" if there are averaged params, else "params".
    `tree` is a dict of a TrainState's parts, or of the leaves in a checkpoint."""
    parts = {name.split("/")[0] for name, value in tree.items() if value is not None}
    return "ema" if "ema" in parts else "params"


class Update(NamedTuple):
    """How one batch changes a TrainState; the first `valid` examples of a batch are genuine."""

    init: Callable  # params -> (opt_state, averaged params or None)
    step: Callable  # (TrainState, batch, valid) -> TrainState


# an object with any of the hooks of training/watching/hooks.py
Callback = NewType("Callback", object)

# an object with any of the methods that training/watching/publish.py calls
Tracker = NewType("Tracker", object)


def key_data(leaf):
    """The numbers of a random key, which some optimizers hold; any other leaf unchanged."""
    is_key = hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf
