"""The keys and values of the tokens that a decoder has read, so that the next one costs one step.

A cache has room for a fixed number of tokens, since its shapes are compiled. Each row of a batch
has its own position: the number of tokens that were read in it. What lies behind it is hidden.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Entry(NamedTuple):
    """What one block keeps: arrays (B, S, K, D)."""

    keys: jax.Array
    values: jax.Array


def empty_cache(batch, size, heads, dim, depth):
    """Room for `size` tokens of each of `batch` texts, in `depth` blocks."""

    def entry():
        return Entry(*(jnp.zeros((batch, size, heads, dim)) for _ in Entry._fields))

    return {"position": jnp.zeros(batch, jnp.int32), "blocks": [entry() for _ in range(depth)]}


def written(entry, new, where):
    """The keys and values of one block, (B, S, K, D), with those of T new tokens, (B, T, K, D), at
    the positions `where`, (B, T), which follow each other."""
    return Entry(*(write(cache, x, where) for cache, x in zip(entry, new, strict=True)))


def write(cache, new, where):
    new, start = new.astype(cache.dtype), where[:, 0]
    if new.shape[0] == 1:
        return lax.dynamic_update_slice(cache, new, (0, start[0], 0, 0))
    if new.shape[1] == 1:
        here = jnp.arange(cache.shape[1]) == where  # (B, S)
        return jnp.where(here[..., None, None], new, cache)
    place = lambda cache, new, start: lax.dynamic_update_slice(cache, new, (start, 0, 0))  # noqa: E731
    return jax.vmap(place)(cache, new, start)


def visible(cache, where):
    """Whether a token at `where`, (B, T), sees each place of the cache: (B, 1, T, S)."""
    keys = jax.tree.leaves(cache["blocks"])[0]
    return (jnp.arange(keys.shape[-3]) <= where[..., None])[:, None]
