"""A learned vector for each integer."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PyTree

from model.layers.initializers import Initializer, truncated_normal
from model.layers.linear import matmul
from model.layers.op import op

small_normal = truncated_normal(0.02)


def embedding_init(
    key: Array, count: int, dim: int, *, init: Initializer = small_normal
) -> dict[str, Array]:
    return {"weight": init(key, (count, dim))}


@op(any_rank=True)
def embedding(params: PyTree, ids: Integer[Array, "*batch"]) -> Float[Array, "*batch dim"]:
    """(...) integers -> (..., dim)."""
    # An id past the end, or below 0, gives NaN, not the vector of another id.
    weight = jnp.asarray(params["weight"])
    return weight.at[ids].get(mode="fill", wrap_negative_indices=False)


@op(any_rank=True)
def unembedding(params: PyTree, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch count"]:
    """(..., dim) -> (..., count): the product of x with the vector of each integer."""
    return matmul(x, params["weight"].T)
