"""Random removal of values or of whole branches, in training only; the expected value is kept."""

import jax
import jax.numpy as jnp


def dropout(key, x, rate, *, train):
    """Zeroes each value with probability `rate`."""
    return drop(key, x, rate, x.shape) if train and rate else x


def drop_path(key, x, rate, *, train):
    """Zeroes each example with probability `rate`: stochastic depth, on a residual branch. The rate
    is traced where equal blocks that differ in it are compiled as one; None is a rate of 0."""
    drops = train and (isinstance(rate, jax.Array) or rate)
    return drop(key, x, rate, (x.shape[0], *[1] * (x.ndim - 1))) if drops else x


def drop(key, x, rate, shape):
    if key is None:
        raise ValueError(
            "key: dropout needs a random key in training, found None; "
            "call apply(..., train=True, key=key)"
        )
    if not isinstance(rate, jax.Array) and not 0 <= rate < 1:
        raise ValueError(f"rate: must be at least 0 and below 1, got {rate}")
    kept = jax.random.bernoulli(key, 1 - rate, shape)
    wide = jnp.promote_types(x.dtype, jnp.float32)  # bfloat16 would round 1 - 0.1 to 0.8984
    return jnp.where(kept, (x.astype(wide) / jnp.asarray(1 - rate, wide)).astype(x.dtype), 0)


def split_key(key, count):
    """One key for each of `count` layers; all None without a key, as in evaluation."""
    return [None] * count if key is None else list(jax.random.split(key, count))
