"""A learned vector for each integer."""

import jax.numpy as jnp

from model.layers.initializers import truncated_normal
from model.layers.linear import matmul
from model.layers.op import op

small_normal = truncated_normal(0.02)


def embedding_init(key, count, dim, *, init=small_normal):
    return {"weight": init(key, (count, dim))}


@op(any_rank=True)
def embedding(params, ids):
    """(...) integers -> (..., dim)."""
    # fill: an id past the end gives NaN, not the last vector
    return jnp.take(params["weight"], ids, axis=0, mode="fill")


@op(any_rank=True)
def unembedding(params, x):
    """(..., dim) -> (..., count): the product of x with the vector of each integer."""
    return matmul(x, params["weight"].T)
