"""The keys and values of the tokens that a decoder has read, so that the next one costs one step.

A cache has room for a fixed number of tokens, since its shapes are compiled. Each row of a batch
has its own position: the number of tokens that were read in it. Places after it are masked.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from model.layers.op import op


class Entry(NamedTuple):
    """What one block keeps: arrays (B, K, S, D), so that no step transposes them."""

    keys: jax.Array
    values: jax.Array


def empty_cache(batch: int, size: int, heads: int, dim: int, depth: int) -> dict[str, Any]:
    """Room for `size` tokens of each of `batch` texts, in `depth` blocks."""

    def entry() -> Entry:
        return Entry(*(jnp.zeros((batch, heads, size, dim)) for _ in Entry._fields))

    return {"position": jnp.zeros(batch, jnp.int32), "blocks": [entry() for _ in range(depth)]}


def written(
    entry: Entry,
    new: tuple[Float[Array, "batch time heads dim"], Float[Array, "batch time heads dim"]],
    where: Int[Array, "batch time"],
) -> Entry:
    """The keys and values of one block, (B, K, S, D), with those of T new tokens, (B, T, K, D), at
    the positions `where`, (B, T), which follow each other."""
    return Entry(*(write(cache, x, where) for cache, x in zip(entry, new, strict=True)))


@op
def write(
    cache: Float[Array, "batch heads size dim"],
    new: Float[Array, "batch time heads dim"],
    where: Int[Array, "batch time"],
) -> Float[Array, "batch heads size dim"]:
    """`written` for one array."""
    # One row for each head of each text: so XLA's CPU compiler changes the cache in place. With a
    # row for each text it copies the cache, and for one text attention takes twice as long.
    _, heads, size, dim = cache.shape
    new = new.astype(cache.dtype).swapaxes(1, 2).reshape(-1, new.shape[1], dim)
    place = lambda row, new, start: lax.dynamic_update_slice(row, new, (start, 0))  # noqa: E731
    rows = cache.reshape(-1, size, dim)
    return jax.vmap(place)(rows, new, jnp.repeat(where[:, 0], heads)).reshape(cache.shape)


def visible(cache: PyTree, where: Int[Array, "batch time"]) -> Bool[Array, "batch 1 time size"]:
    """Whether a token at `where`, (B, T), sees each place of the cache: (B, 1, T, S)."""
    keys = jax.tree.leaves(cache["blocks"])[0]
    return (jnp.arange(keys.shape[-2]) <= where[..., None])[:, None]
