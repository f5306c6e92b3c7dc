"""Activations, written so that value and gradient stay finite for inputs of any size."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from model.layers.op import op


@op(any_rank=True)
def relu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.where(x <= 0, 0, x)  # not `x > 0`, so that NaN stays NaN


@op(any_rank=True)
def leaky_relu(x: Float[Array, "*shape"], slope: float | Array = 0.01) -> Float[Array, "*shape"]:
    return jnp.where(x >= 0, x, slope * x)


@op(any_rank=True)
def elu(x: Float[Array, "*shape"], alpha: float | Array = 1.0) -> Float[Array, "*shape"]:
    # expm1 of a large number is inf, and inf times the 0 of `where` would be NaN in the gradient.
    below = jnp.where(x > 0, 0, x)
    return jnp.where(x > 0, x, alpha * jnp.expm1(below))


@op(any_rank=True)
def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x times the cumulative distribution function of the standard normal, exactly."""
    if x.dtype in (jnp.bfloat16, jnp.float16):  # in bfloat16, 1 + erf is 0 below -3
        wide = x.astype(jnp.float32)
        return (0.5 * wide * lax.erfc(-wide * math.sqrt(0.5))).astype(x.dtype)
    return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))


@op(any_rank=True)
def gelu_tanh(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The approximation of gelu that GPT-2 used."""
    # Beyond 10, tanh is 1. Its gradient is 0 there, and 0 times an infinite x**2 would be NaN.
    near = jnp.clip(x, -10, 10)
    return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (near + 0.044715 * near**3)))


@op(any_rank=True)
def sigmoid(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return lax.logistic(x)  # the gradient of 1 / (1 + exp(-x)) at -1e4 is inf / inf


@op(any_rank=True)
def silu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return x * sigmoid(x)


@op(any_rank=True)
def hard_sigmoid(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.clip(x + 3, 0, 6) / 6


@op(any_rank=True)
def hard_swish(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return x * hard_sigmoid(x)


@op(any_rank=True)
def tanh(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.tanh(x)


@op(any_rank=True)
def softplus(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.logaddexp(x, 0)  # log(1 + exp(x)) without overflow


@op(any_rank=True)
def mish(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return x * jnp.tanh(softplus(x))


@op(any_rank=True)
def softmax(x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """exp(x) divided by its sum along the last axis."""
    return _softmax(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)


@jax.custom_jvp
def _softmax(x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    exp = jnp.exp(_centre(x))
    return exp / exp.sum(-1, keepdims=True)


@_softmax.defjvp
def _softmax_jvp(
    x: tuple[Float[Array, "*batch dim"]], t: tuple[Float[Array, "*batch dim"]]
) -> tuple[Float[Array, "*batch dim"], Float[Array, "*batch dim"]]:
    """Written by hand: 0.7 of the time of the derivative by JAX, which repeats exp and sum."""
    y = _softmax(*x)
    return y, y * (t[0] - (y * t[0]).sum(-1, keepdims=True))


@op(any_rank=True)
def log_softmax(x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    z = _centre(x)
    return (z - jnp.log(jnp.exp(z).sum(-1, keepdims=True))).astype(x.dtype)


def _centre(x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """x in at least float32, shifted so that its maximum is 0, which does not change a softmax."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide - lax.stop_gradient(wide.max(-1, keepdims=True))
