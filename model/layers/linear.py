"""The linear layer."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Num, PyTree

from model.layers.forms import are_free, gradient_transposed
from model.layers.initializers import Initializer, lecun_normal
from model.layers.op import op


def linear_init(
    key: Array, in_dim: int, out_dim: int, *, bias: bool = True, init: Initializer = lecun_normal
) -> dict[str, Array]:
    params = {"weight": init(key, (in_dim, out_dim))}
    return params | {"bias": jnp.zeros(out_dim)} if bias else params


@op(any_rank=True)
def linear(params: PyTree, x: Num[Array, "*batch in_dim"]) -> Float[Array, "*batch out_dim"]:
    """(..., in) -> (..., out)."""
    return add_bias(params, matmul(x, params["weight"]))


@op(any_rank=True)
def linears(layers: list[PyTree], x: Num[Array, "*batch in_dim"]) -> list[Float[Array, "*batch _"]]:
    """The results of several linear layers of one input, as a list.

    They are one product; a transformer's step then takes 0.95 of the time.
    """
    if are_free(x.shape):
        return [linear(p, x) for p in layers]
    widths = [p["weight"].shape[1] for p in layers]
    weights = [p["weight"] for p in layers]
    biases = [p.get("bias", jnp.zeros(w, x.dtype)) for p, w in zip(layers, widths, strict=True)]
    rows, batch = x.reshape(-1, x.shape[-1]), x.shape[:-1]
    has_bias = any("bias" in p for p in layers)
    if len(set(widths)) == 1 and jax.device_count() > 1:
        # Stacked along an axis of their own, so that the feature axis can be sharded over devices.
        y = lax.dot_general(rows, jnp.stack(weights, axis=1), (((1,), (0,)), ((), ())))
        results = jnp.unstack(y + jnp.stack(biases) if has_bias else y, axis=1)
    else:
        # The gradient of a split is one copy; that of slices, a slower sum of padded arrays.
        y = rows @ jnp.concatenate(weights, axis=1)
        y = y + jnp.concatenate(biases) if has_bias else y
        results = jnp.split(y, np.cumsum(widths)[:-1], axis=1)
    return [result.reshape(*batch, result.shape[1]) for result in results]


def matmul(
    x: Num[Array, "*batch in_dim"], weight: Float[Array, "in_dim out_dim"]
) -> Float[Array, "*batch out_dim"]:
    """x @ weight over the last axis of x."""
    if are_free(x.shape):  # JAX cannot always compare products of free sizes
        return x @ weight
    turned = gradient_transposed(math.prod(x.shape[:-1]), *weight.shape)
    return flat(product_with_transposed_gradient if turned else jnp.matmul, x, weight)


def flat(
    product: Callable[[Array, Array], Array],
    x: Num[Array, "*batch in_dim"],
    weight: Float[Array, "in_dim out_dim"],
) -> Float[Array, "*batch out_dim"]:
    """The product of all rows of x and the weight. So the weight's gradient is one plain matrix
    product, too: twice as fast on the CPU."""
    return product(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], weight.shape[-1])


def product_with_transposed_gradient(
    rows: Float[Array, "rows in_dim"], weight: Float[Array, "in_dim out_dim"]
) -> Float[Array, "rows out_dim"]:
    """rows @ weight, where the gradient of the weight is computed as its transpose."""
    return lax.dot_general(rows, kept_in_form(weight.T), (((1,), (1,)), ((), ())))


@jax.custom_jvp
def kept_in_form(array: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The array, whose gradient XLA must compute in this form, not as its transpose."""
    return array


@kept_in_form.defjvp
def kept_in_form_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return primals[0], lax.optimization_barrier(tangents[0])


def add_bias(params: PyTree, y: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    return y + params["bias"] if "bias" in params else y
