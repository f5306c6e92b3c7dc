"""Random removal of numbers or of whole branches, in training only; the expectation stays."""

import jax
import jax.numpy as jnp


def dropout(key, x, rate, *, train):
    """Zeroes each number with probability `rate`."""
    return drop(key, x, rate, x.shape) if train and rate else x


def drop_path(key, x, rate, *, train):
    """Zeroes each example with probability `rate`; on a residual branch this skips the block (stochastic depth)."""
    return drop(key, x, rate, (x.shape[0], *[1] * (x.ndim - 1))) if train and rate else x


def drop(key, x, rate, shape):
    if key is None:
        raise ValueError(
            "key: dropout draws at random in training, but found None; call apply(..., train=True, key=key)"
        )
    kept = jax.random.bernoulli(key, 1 - rate, shape)
    return jnp.where(kept, x / (1 - rate), 0)


def split_key(key, count):
    """Keys for `count` layers; None for each when there is no key, as in evaluation."""
    return [None] * count if key is None else list(jax.random.split(key, count))
