"""Activations, written so that value and gradient stay finite however large the input."""

import math

import jax.numpy as jnp
from jax import lax


def relu(x):
    return jnp.where(x <= 0, 0, x)  # not `x > 0`: a nan must stay one


def leaky_relu(x, slope=0.01):
    return jnp.where(x >= 0, x, slope * x)


def elu(x, alpha=1.0):
    below = jnp.where(x > 0, 0, x)  # expm1 of a large number is inf, and inf times the 0 of `where` is nan in the gradient
    return jnp.where(x > 0, x, alpha * jnp.expm1(below))


def gelu(x):
    """x times the standard normal's distribution function, exact."""
    return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))


def gelu_tanh(x):
    """The approximation of gelu that GPT-2 used."""
    return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sigmoid(x):
    return lax.logistic(x)  # 1 / (1 + exp(-x)) has no gradient at -1e4: inf / inf


def silu(x):
    return x * sigmoid(x)


def hard_sigmoid(x):
    return jnp.clip(x + 3, 0, 6) / 6


def hard_swish(x):
    return x * hard_sigmoid(x)


def tanh(x):
    return jnp.tanh(x)


def softplus(x):
    return jnp.logaddexp(x, 0)  # log(1 + exp(x)) without a large exponent


def mish(x):
    return x * jnp.tanh(softplus(x))


def softmax(x):
    """exp(x) over its sum along the last axis."""
    exp = jnp.exp(_centre(x))
    return (exp / exp.sum(-1, keepdims=True)).astype(x.dtype)


def log_softmax(x):
    z = _centre(x)
    return (z - jnp.log(jnp.exp(z).sum(-1, keepdims=True))).astype(x.dtype)


def _centre(x):
    """x in at least float32, shifted so that its largest number is 0, which changes no softmax."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide - lax.stop_gradient(wide.max(-1, keepdims=True))
