"""Models with random weights, and inputs for them."""

import jax
import numpy as np

from tests.inference.made import BATCH


def with_weights(model):
    """(function(weights, x), weights) of a model, without zeros, ones or equal numbers in them."""
    random = np.random.default_rng(0)
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: (0.3 * random.normal(size=x.shape)).astype(np.float32), params)
    state = jax.tree.map(lambda x: random.uniform(0.5, 2, x.shape).astype(np.float32), state)

    def function(weights, x):
        return model.apply(weights["params"], weights["state"], x)[0]

    return function, {"params": params, "state": state}


def images(*shape, count=BATCH):
    return np.random.default_rng(1).normal(size=(count, *shape)).astype(np.float32)


def example(x):
    """The shape of one example of a batch, or of a tree of batches."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), x)
