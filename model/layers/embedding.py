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
    # An id past the end, or below 0, gives NaN, not the vector of another id.
    weight = jnp.asarray(params["weight"])
    return weight.at[ids].get(mode="fill", wrap_negative_indices=False)


@op(any_rank=True)
def unembedding(params, x):
    """(..., dim) -> (..., count): the product of x with the vector of each integer."""
    return matmul(x, params["weight"].T)
