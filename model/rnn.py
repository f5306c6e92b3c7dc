"""A classifier of sequences of different lengths, with recurrent layers."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num, PyTree

from model.base import Model
from model.checks import Depth
from model.layers.dropout import dropout as drop
from model.layers.dropout import split_key
from model.layers.embedding import embedding, embedding_init
from model.layers.linear import linear, linear_init
from model.layers.recurrent import gru, gru_init, lstm, lstm_init
from utils.forms import Count, Fraction, checked

CELLS = {"lstm": (lstm_init, lstm), "gru": (gru_init, gru)}


@checked
def rnn(
    input_shape: tuple[Count, ...],
    num_classes: Count,
    vocab_size: Count | None = None,
    cell: Literal["lstm", "gru"] = "lstm",
    dim: Count = 128,
    depth: Depth = 1,
    bidirectional: bool = False,
    dropout: Fraction = 0.0,
    pool: Literal["last", "mean"] = "last",
) -> Model:
    """`depth` recurrent layers over sequences (T, features), or over T tokens of a `vocab_size`.

    A sequence is an array, or {"sequence": ..., "length": ...}, of which the first `length` steps
    count. The head reads the state after the last step that counts, or, with `pool="mean"`, the
    mean of the outputs. With `bidirectional` each layer also reads from the end, and the head gets
    both. Dropout comes after each layer.
    """
    if len(input_shape) != (2 if vocab_size is None else 1):
        form = "(steps, features)" if vocab_size is None else "(steps,) of tokens"
        raise ValueError(f"input_shape: needs {form}, got {tuple(input_shape)}")
    cell_init, layer = CELLS[cell]
    directions = (False, True) if bidirectional else (False,)
    first = dim if vocab_size else input_shape[-1]
    widths = [first, *[dim * len(directions)] * depth]  # of the inputs of each layer and the head

    def init(key: Array) -> tuple[PyTree, PyTree]:
        k1, k2, *keys = jax.random.split(key, 2 + depth)
        params = {
            "layers": [
                [cell_init(k, width, dim) for k in jax.random.split(own, len(directions))]
                for own, width in zip(keys, widths[:-1], strict=True)
            ],
            "head": linear_init(k1, widths[-1], num_classes),
        }
        if vocab_size:
            params["tokens"] = embedding_init(k2, vocab_size, dim)
        return params, {}

    def apply(
        params: PyTree,
        state: PyTree,
        x: Num[Array, "batch time ..."] | dict[str, Num[Array, "batch ..."]],
        *,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Float[Array, "batch classes"], PyTree]:
        x, lengths = (x["sequence"], x["length"]) if isinstance(x, dict) else (x, None)
        x = embedding(params["tokens"], x) if vocab_size else x
        for directed, k in zip(params["layers"], split_key(key, depth), strict=True):
            pairs = zip(directed, directions, strict=True)
            outs = [layer(own, x, lengths, reverse=reverse) for own, reverse in pairs]
            joined = (jnp.concatenate(each, axis=-1) for each in zip(*outs, strict=True))
            x, last = (drop(k, each, dropout, train=train) for each in joined)
        if pool == "mean":
            steps = x.shape[1]
            count = steps if lengths is None else jnp.clip(lengths, 1, steps)[:, None]
            last = (x.sum(1) / count).astype(x.dtype)  # outputs past the end of a sequence are 0
        return linear(params["head"], last), state  # pyright: ignore[reportPossiblyUnboundVariable]  # depth > 0

    return Model(init, apply)
