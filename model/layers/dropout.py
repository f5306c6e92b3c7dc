"""Random removal of values or of whole branches, in training only; the expected value is kept."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def dropout(
    key: Array | None, x: Float[Array, "*shape"], rate: float | Array, *, train: bool
) -> Float[Array, "*shape"]:
    """Zeroes each value with probability `rate`."""
    return drop(key, x, rate, x.shape) if train and rate else x


def drop_path(
    key: Array | None, x: Float[Array, "batch *shape"], rate: float | Array | None, *, train: bool
) -> Float[Array, "batch *shape"]:
    """Zeroes each example with probability `rate`: stochastic depth, on a residual branch. The rate
    is traced where equal blocks that differ in it are compiled as one; None is a rate of 0."""
    if not train or rate is None or (not isinstance(rate, jax.Array) and rate == 0):
        return x
    return drop(key, x, rate, (x.shape[0], *[1] * (x.ndim - 1)))


def drop(
    key: Array | None, x: Float[Array, "*shape"], rate: float | Array, shape: tuple[int, ...]
) -> Float[Array, "*shape"]:
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


def split_key(key: Array | None, count: int) -> list[Array] | list[None]:
    """One key for each of `count` layers; all None without a key, as in evaluation."""
    return [None] * count if key is None else list(jax.random.split(key, count))
