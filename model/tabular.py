"""A multilayer perceptron over the columns of a table, with a learned vector for each category."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from model.base import Model
from model.layers.embedding import embedding, embedding_init
from model.mlp import mlp
from utils.forms import Count, Fraction, checked


@checked
def tabular(
    input_shape: tuple[Count, ...],
    num_classes: Count,
    columns: dict,
    embed_dim: Count = 8,
    dims: tuple[Count, ...] = (128, 128),
    activation: str = "relu",
    dropout: Fraction = 0.0,
) -> Model:
    """Embed the categories of each column, and pass the vectors and the numbers to an `mlp`.

    Its inputs are those of the preprocessing `tabular` with `one_hot: false`.
    """
    sizes = [1 + len(categories) for categories in columns.values() if categories]
    numbers = 2 * (len(columns) - len(sizes))
    if tuple(input_shape) != (numbers + len(sizes),):
        fix = 'set "one_hot": false in the preprocessing `tabular`'
        needed = f"{numbers} numbers and {len(sizes)} categories"
        raise ValueError(f"input_shape: must be {needed}, got {list(input_shape)}; {fix}")
    rest = mlp((numbers + embed_dim * len(sizes),), num_classes, dims, activation, dropout)

    def init(key: Array) -> tuple[PyTree, PyTree]:
        rest_key, *keys = jax.random.split(key, 1 + len(sizes))
        params, state = rest.init(rest_key)
        pairs = zip(keys, sizes, strict=True)
        return params | {"embeddings": [embedding_init(k, n, embed_dim) for k, n in pairs]}, state

    def apply(
        params: PyTree,
        state: PyTree,
        x: Float[Array, "batch columns"],
        *,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Float[Array, "batch classes"], PyTree]:
        # Below 0, as in the random inputs with which an export is checked, is unknown, as 0 is.
        ids = jnp.maximum(x[:, numbers:].astype(jnp.int32), 0)
        vectors = [embedding(p, ids[:, i]) for i, p in enumerate(params["embeddings"])]
        dtype = vectors[0].dtype if vectors else x.dtype
        x = jnp.concatenate([x[:, :numbers].astype(dtype), *vectors], axis=1)
        return rest.apply(params, state, x, train=train, key=key)

    return Model(init, apply, exact_inputs=bool(sizes))
