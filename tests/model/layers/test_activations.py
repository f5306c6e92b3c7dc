"""Activations against those of JAX."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.layers import activations
from tests.model.compare import DTYPES, assert_same, normal

pytestmark = pytest.mark.contract

REFERENCES = {
    "relu": jax.nn.relu,
    "leaky_relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_swish": jax.nn.hard_swish,
    "tanh": jnp.tanh,
    "softplus": jax.nn.softplus,
    "mish": jax.nn.mish,
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
}
ALL = pytest.mark.parametrize("name", REFERENCES)


@ALL
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_jax(name, dtype):
    x = 3 * normal(0, 40, 30)
    # Both must agree at the corner at 0; at -3 and 3 any slope between those of the sides is right.
    x[np.abs(np.abs(x) - 3) < 0.05] = 0
    assert_same(getattr(activations, name), REFERENCES[name], x, dtype=dtype)


@ALL
@pytest.mark.parametrize("large", [1e2, 1e4])
def test_equals_jax_for_extreme_inputs(name, large):
    x = jnp.array([-large, 0.0, large])

    def value_and_gradient(fn):
        return fn(x), jax.jacobian(fn)(x)

    ours = value_and_gradient(getattr(activations, name))
    theirs = value_and_gradient(REFERENCES[name])
    for a, b in zip(ours, theirs, strict=True):
        assert jnp.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-30)


@ALL
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_and_gradients_are_finite_for_the_largest_inputs(name, dtype):
    activation = getattr(activations, name)
    x = jnp.array([2e19, -2e19, 1e38, -1e38], dtype)
    value, gradient = activation(x), jax.grad(lambda x: activation(x).sum())(x)
    assert jnp.isfinite(value).all() and jnp.isfinite(gradient).all()


@ALL
def test_nan_stays_nan(name):
    assert jnp.isnan(getattr(activations, name)(jnp.array([jnp.nan, 1.0]))[0])


@pytest.mark.slow
def test_gelu_keeps_its_negative_tail_in_bfloat16():
    """Value and gradient to the last bits of a bfloat16, against the formula in float64."""
    x = jnp.linspace(-9, 4, 60).astype(jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    below = np.array([math.erfc(-number / math.sqrt(2)) / 2 for number in wide])
    slope = below + wide * np.exp(-(wide**2) / 2) / math.sqrt(2 * math.pi)
    value, gradient = activations.gelu(x), jax.grad(lambda x: activations.gelu(x).sum())(x)
    assert value.dtype == gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(value, np.float64), wide * below, rtol=2**-8)
    np.testing.assert_allclose(np.asarray(gradient, np.float64), slope, rtol=2**-7, atol=1e-30)
