"""Recurrent layers: a cell reads a sequence step by step, and keeps a state between the steps.

`cell(params, projected, state) -> (output, state)` of one step, where `projected` are the products
of the input, which are one matrix product for all steps. The gates have the order and the formulas
of torch.nn.LSTM and torch.nn.GRU.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer, PyTree

from model.layers.activations import sigmoid
from model.layers.initializers import Initializer, lecun_normal, orthogonal
from model.layers.linear import linear, linear_init
from model.layers.op import op


def lstm_init(
    key: Array, in_dim: int, dim: int, *, init: Initializer = lecun_normal
) -> dict[str, dict[str, Array]]:
    """The bias of the forget gates is 1, so that a new cell remembers."""
    params = gates_init(key, in_dim, dim, 4, init)
    bias = params["input"]["bias"].at[dim : 2 * dim].set(1)
    return params | {"input": params["input"] | {"bias": bias}}


def gru_init(
    key: Array, in_dim: int, dim: int, *, init: Initializer = lecun_normal
) -> dict[str, dict[str, Array]]:
    params = gates_init(key, in_dim, dim, 3, init)
    # Only the candidate has this bias, which its reset gate multiplies, too.
    return params | {"candidate": {"bias": jnp.zeros(dim)}}


def gates_init(
    key: Array, in_dim: int, dim: int, gates: int, init: Initializer
) -> dict[str, dict[str, Array]]:
    k1, *keys = jax.random.split(key, 1 + gates)
    hidden = jnp.concatenate([orthogonal(k, (dim, dim)) for k in keys], axis=1)
    return {"input": linear_init(k1, in_dim, gates * dim, init=init), "hidden": {"weight": hidden}}


def lstm_cell(
    params: PyTree,
    projected: Float[Array, "batch gates"],
    state: tuple[Float[Array, "batch dim"], Float[Array, "batch dim"]],
) -> tuple[Float[Array, "batch dim"], tuple[Float[Array, "batch dim"], Float[Array, "batch dim"]]]:
    """A step of Hochreiter and Schmidhuber's cell, 1997, with the forget gate of Gers, 2000."""
    h, c = state
    gates = projected + linear(params["hidden"], h)  # (B, 4 D)
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
    h = sigmoid(o) * jnp.tanh(c)
    return h, (h, c)


def gru_cell(
    params: PyTree, projected: Float[Array, "batch gates"], state: tuple[Float[Array, "batch dim"]]
) -> tuple[Float[Array, "batch dim"], tuple[Float[Array, "batch dim"]]]:
    """A step of the cell of Cho et al., 2014, with the reset gate after the product."""
    (h,) = state
    r, z, n = jnp.split(projected, 3, axis=-1)
    hidden_r, hidden_z, hidden_n = jnp.split(linear(params["hidden"], h), 3, axis=-1)
    r, z = sigmoid(r + hidden_r), sigmoid(z + hidden_z)
    n = jnp.tanh(n + r * (hidden_n + params["candidate"]["bias"]))
    h = (1 - z) * n + z * h
    return h, (h,)


@op
def lstm(
    params: PyTree,
    x: Float[Array, "batch time in_dim"],
    lengths: Integer[Array, "batch"] | None = None,
    *,
    reverse: bool = False,
) -> tuple[Float[Array, "batch time dim"], Float[Array, "batch dim"]]:
    """(the outputs of all steps (B, T, D), the final output (B, D)); see `recurrent`."""
    return recurrent(lstm_cell, 2, params, x, lengths, reverse)


@op
def gru(
    params: PyTree,
    x: Float[Array, "batch time in_dim"],
    lengths: Integer[Array, "batch"] | None = None,
    *,
    reverse: bool = False,
) -> tuple[Float[Array, "batch time dim"], Float[Array, "batch dim"]]:
    """(the outputs of all steps (B, T, D), the final output (B, D)); see `recurrent`."""
    return recurrent(gru_cell, 1, params, x, lengths, reverse)


def recurrent(
    cell: Callable,
    states: int,
    params: PyTree,
    x: Float[Array, "batch time in_dim"],
    lengths: Integer[Array, "batch"] | None = None,
    reverse: bool = False,
) -> tuple[Float[Array, "batch time dim"], Float[Array, "batch dim"]]:
    """Apply a cell with `states` arrays of state over x, (B, T, in), backwards if `reverse`.

    Only the first `lengths`, (B,), steps of each sequence count: the others have outputs of 0,
    change no state, and get no gradient, whatever they hold.
    """
    dim = params["hidden"]["weight"].shape[0]
    # Steps past the end of a sequence become 0, since NaN * 0 is NaN in a gradient.
    seen = None if lengths is None else jnp.arange(x.shape[1])[:, None] < lengths  # (T, B)
    x = x if seen is None else jnp.where(seen.T[..., None], x, 0)
    projected = linear(params["input"], x).swapaxes(0, 1)  # (T, B, gates D)
    start = (jnp.zeros((x.shape[0], dim), projected.dtype),) * states

    def step(
        state: tuple[Array, ...], each: tuple[Array, Array | None]
    ) -> tuple[tuple[Array, ...], Array]:
        now, counts = each
        y, new = cell(params, now, state)
        if counts is None:
            return new, y
        new = tuple(jnp.where(counts[:, None], a, b) for a, b in zip(new, state, strict=True))
        return new, jnp.where(counts[:, None], y, 0)

    state, y = lax.scan(step, start, (projected, seen), reverse=reverse)
    return y.swapaxes(0, 1), state[0]
