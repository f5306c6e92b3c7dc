"""Made-up inputs and weights of the cases."""

import jax
import numpy as np

BATCH = 3
random = np.random.default_rng(0)


def normal(*shape):
    return random.normal(size=(BATCH, *shape)).astype(np.float32)


def whole(low, high, *shape):
    return random.integers(low, high, (BATCH, *shape)).astype(np.int32)


def weights(*shape):
    return (random.normal(size=shape) / 2).astype(np.float32)


def learned(init, *args, **kwargs):
    """Parameters of a layer with none of them at its initial 0 or 1."""
    shapes = jax.eval_shape(lambda key: init(key, *args, **kwargs), jax.random.key(0))
    return jax.tree.map(lambda leaf: weights(*leaf.shape), shapes)


def scale_and_bias(dim):
    return {"scale": 1 + weights(dim), "bias": weights(dim)}
