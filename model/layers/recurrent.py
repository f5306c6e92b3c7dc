"""Recurrent layers: a cell reads a sequence step by step, and keeps a state between the steps.

The products of the input are one matrix product for all steps. The gradients are written by hand:
only what depends on the following step is in the backward loop, and the gradient of the weights is
one product after it. The gates have the order and the formulas of torch.nn.LSTM and torch.nn.GRU.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Integer, PyTree

from model.layers.activations import sigmoid
from model.layers.initializers import Initializer, lecun_normal, orthogonal
from model.layers.linear import linear, linear_init
from model.layers.op import op

Steps = Float[Array, "time batch dim"]
Gates = Float[Array, "time batch gates"]
Final = Float[Array, "batch dim"]
Counts = Bool[Array, "time batch"]  # the steps within the length of each sequence


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


@op
def lstm(
    params: PyTree,
    x: Float[Array, "batch time in_dim"],
    lengths: Integer[Array, "batch"] | None = None,
    *,
    reverse: bool = False,
) -> tuple[Float[Array, "batch time dim"], Float[Array, "batch dim"]]:
    """Hochreiter and Schmidhuber's cell, 1997, with the forget gate of Gers, 2000, applied to each
    step of x, backwards if `reverse`. Returns the outputs of all steps and the final output.

    Only the first `lengths` steps of each sequence count: the others have outputs of 0, change no
    state, and get no gradient, whatever they hold.
    """
    projected, counts = projected_input(params, x, lengths)
    y, last = lstm_steps(reverse, params["hidden"]["weight"], projected, counts)
    return y.swapaxes(0, 1), last


@op
def gru(
    params: PyTree,
    x: Float[Array, "batch time in_dim"],
    lengths: Integer[Array, "batch"] | None = None,
    *,
    reverse: bool = False,
) -> tuple[Float[Array, "batch time dim"], Float[Array, "batch dim"]]:
    """The cell of Cho et al., 2014, with the reset gate after the product; otherwise as `lstm`."""
    projected, counts = projected_input(params, x, lengths)
    hidden, bias = params["hidden"]["weight"], params["candidate"]["bias"]
    y, last = gru_steps(reverse, hidden, bias, projected, counts)
    return y.swapaxes(0, 1), last


def projected_input(
    params: PyTree, x: Float[Array, "batch time in_dim"], lengths: Integer[Array, "batch"] | None
) -> tuple[Gates, Counts | None]:
    if lengths is None:
        return linear(params["input"], x).swapaxes(0, 1), None
    counts = jnp.arange(x.shape[1])[:, None] < lengths
    # Steps past the end of a sequence become 0, since NaN * 0 is NaN in a gradient.
    x = jnp.where(counts.T[..., None], x, 0)
    return linear(params["input"], x).swapaxes(0, 1), counts


def _lstm_steps(
    reverse: bool, weight: Float[Array, "dim gates"], projected: Gates, counts: Counts | None
) -> tuple[Steps, Final]:
    """Without gradients, and so in exports, each gate is computed by its own formula."""
    zeros = jnp.zeros((projected.shape[1], weight.shape[0]), projected.dtype)

    def step(state: tuple[Final, Final], now: Array) -> tuple[tuple[Final, Final], Final]:
        h, c = state
        i, f, g, o = jnp.split(now + linear({"weight": weight}, h), 4, axis=-1)
        c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
        h = sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    last, y = scan_steps(step, (zeros, zeros), projected, counts, reverse)
    return y, last[0]


def lstm_steps_fwd(
    reverse: bool, weight: Float[Array, "dim gates"], projected: Gates, counts: Counts | None
) -> tuple[tuple[Steps, Final], tuple]:
    zeros = jnp.zeros((projected.shape[1], weight.shape[0]), projected.dtype)
    scales = scales_of_gates(weight, [0.5, 0.5, 1, 0.5])
    scaled = weight * scales

    def step(state: tuple[Final, Final], now: Array) -> tuple[tuple[Final, Final], tuple]:
        h, c = state
        tanhs = jnp.tanh(now + h @ scaled)
        i, f, g, o = lstm_gates(tanhs)
        c = f * c + i * g
        h = o * jnp.tanh(c)
        return (h, c), (h, c, tanhs)

    last, (y, c, tanhs) = scan_steps(step, (zeros, zeros), projected * scales, counts, reverse)
    return (y, last[0]), (weight, counts, y, c, tanhs)


def lstm_steps_bwd(reverse: bool, saved: tuple, grads: tuple[Steps, Final]) -> tuple:
    weight, counts, y, c, tanhs = saved
    grad_y, grad_last = grads
    i, f, g, o = lstm_gates(tanhs)
    tanh_c = jnp.tanh(c)
    into_c = o * (1 - tanh_c**2)  # the share of a gradient of h that reaches c
    before = shifted(c, reverse)
    # The gradients of the gates are these factors times that of c, c, c and h.
    factors = (g * i * (1 - i), before * f * (1 - f), i * (1 - g**2), tanh_c * o * (1 - o))
    factors = jnp.concatenate(factors, axis=-1)

    def step(
        state: tuple[Final, Final], now: tuple
    ) -> tuple[tuple[Final, Final], tuple[Final, Final]]:
        grad_h, grad_c = state
        grad_y, into_c, factors, f = now
        grad_h = grad_h + grad_y
        grad_c = grad_c + grad_h * into_c
        grad_gates = factors * jnp.concatenate([grad_c, grad_c, grad_c, grad_h], axis=-1)
        return (grad_gates @ weight.T, grad_c * f), (grad_h, grad_c)

    inputs = (grad_y, into_c, factors, f)
    start = (grad_last, jnp.zeros_like(grad_last))
    _, (grad_h, grad_c) = scan_steps(step, start, inputs, counts, not reverse)
    grad_gates = factors * jnp.concatenate([grad_c, grad_c, grad_c, grad_h], axis=-1)
    return product_of_steps(shifted(y, reverse), grad_gates), grad_gates, None


lstm_steps = jax.custom_vjp(_lstm_steps, nondiff_argnums=(0,))
lstm_steps.defvjp(lstm_steps_fwd, lstm_steps_bwd)


def lstm_gates(tanhs: Float[Array, "*steps gates"]) -> tuple[Array, ...]:
    i, f, g, o = jnp.split(tanhs, 4, axis=-1)
    return of_half(i), of_half(f), g, of_half(o)


def _gru_steps(
    reverse: bool,
    weight: Float[Array, "dim gates"],
    bias: Float[Array, "dim"],
    projected: Gates,
    counts: Counts | None,
) -> tuple[Steps, Final]:
    zeros = jnp.zeros((projected.shape[1], weight.shape[0]), projected.dtype)

    def step(state: tuple[Final], now: Array) -> tuple[tuple[Final], Final]:
        (h,) = state
        r, z, n = jnp.split(now, 3, axis=-1)
        hidden_r, hidden_z, hidden_n = jnp.split(linear({"weight": weight}, h), 3, axis=-1)
        r, z = sigmoid(r + hidden_r), sigmoid(z + hidden_z)
        n = jnp.tanh(n + r * (hidden_n + bias))
        h = (1 - z) * n + z * h
        return (h,), h

    last, y = scan_steps(step, (zeros,), projected, counts, reverse)
    return y, last[0]


def gru_steps_fwd(
    reverse: bool,
    weight: Float[Array, "dim gates"],
    bias: Float[Array, "dim"],
    projected: Gates,
    counts: Counts | None,
) -> tuple[tuple[Steps, Final], tuple]:
    dim = weight.shape[0]
    zeros = jnp.zeros((projected.shape[1], dim), projected.dtype)
    scales = scales_of_gates(weight, [0.5, 0.5, 1])
    scaled = weight * scales

    def step(state: tuple[Final], now: Array) -> tuple[tuple[Final], tuple]:
        (h,) = state
        product = h @ scaled
        r, z = gru_gates(jnp.tanh(now[:, : 2 * dim] + product[:, : 2 * dim]))
        hidden = product[:, 2 * dim :] + bias
        n = jnp.tanh(now[:, 2 * dim :] + r * hidden)
        h = n + z * (h - n)
        return (h,), (h, r, z, n, hidden)

    last, (y, *saved) = scan_steps(step, (zeros,), projected * scales, counts, reverse)
    return (y, last[0]), (weight, counts, y, *saved)


def gru_steps_bwd(reverse: bool, saved: tuple, grads: tuple[Steps, Final]) -> tuple:
    weight, counts, y, r, z, n, hidden = saved
    grad_y, grad_last = grads
    before = shifted(y, reverse)
    # The gradients of the gates and of the product are these factors times that of h.
    of_n = (1 - z) * (1 - n**2)
    of_r, of_z = of_n * hidden * r * (1 - r), (before - n) * z * (1 - z)
    factors = jnp.concatenate([of_r, of_z, of_n * r], axis=-1)

    def step(state: tuple[Final], now: tuple) -> tuple[tuple[Final], Array]:
        grad_y, factors, z = now
        grad_h = state[0] + grad_y
        grad_product = factors * jnp.tile(grad_h, 3)
        return (grad_h * z + grad_product @ weight.T,), grad_h

    inputs = (grad_y, factors, z)
    _, grad_h = scan_steps(step, (grad_last,), inputs, counts, not reverse)
    grad_product = factors * jnp.tile(grad_h, 3)
    grad_projected = jnp.concatenate([of_r, of_z, of_n], axis=-1) * jnp.tile(grad_h, 3)
    grad_bias = (of_n * r * grad_h).sum((0, 1))
    return product_of_steps(before, grad_product), grad_bias, grad_projected, None


gru_steps = jax.custom_vjp(_gru_steps, nondiff_argnums=(0,))
gru_steps.defvjp(gru_steps_fwd, gru_steps_bwd)


def gru_gates(tanhs: Float[Array, "batch gates"]) -> tuple[Array, Array]:
    r, z = jnp.split(tanhs, 2, axis=-1)
    return of_half(r), of_half(z)


# sigmoid(x) = tanh(x / 2) / 2 + 1 / 2. So all gates are one tanh of a product with scaled weights,
# which takes about half of the time of the forward pass with sigmoids.


def scales_of_gates(
    weight: Float[Array, "dim gates"], scales: list[float]
) -> Float[Array, "gates"]:
    return jnp.repeat(jnp.array(scales, weight.dtype), weight.shape[0])


def of_half(tanhs: Float[Array, "*steps dim"]) -> Float[Array, "*steps dim"]:
    return 0.5 * tanhs + 0.5


def scan_steps(
    step: Callable, start: tuple[Final, ...], inputs: PyTree, counts: Counts | None, reverse: bool
) -> tuple[tuple[Final, ...], PyTree]:
    """The final state and the outputs of all steps. Where a step does not count, the state stays
    and the outputs are 0."""

    def masked(state: tuple[Final, ...], each: tuple) -> tuple[tuple[Final, ...], PyTree]:
        now, mask = each
        new, outputs = step(state, now)
        if mask is None:
            return new, outputs
        new = jax.tree.map(lambda a, b: jnp.where(mask[:, None], a, b), new, state)
        return new, jax.tree.map(lambda a: jnp.where(mask[:, None], a, 0), outputs)

    return lax.scan(masked, start, (inputs, counts), reverse=reverse)


def shifted(steps: Steps, reverse: bool) -> Steps:
    """The states before each step, from those after it."""
    zero = jnp.zeros_like(steps[:1])
    pieces = [steps[1:], zero] if reverse else [zero, steps[:-1]]
    return jnp.concatenate(pieces)


def product_of_steps(states: Steps, grads: Gates) -> Float[Array, "dim gates"]:
    return states.reshape(-1, states.shape[-1]).T @ grads.reshape(-1, grads.shape[-1])
