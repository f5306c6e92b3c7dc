"""Initializers against those of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.layers import initializers
from model.layers.conv import conv2d_init

pytestmark = pytest.mark.contract

KEY = jax.random.key(3)
SCALED = [
    f"{family}_{kind}" for family in ("lecun", "he", "glorot") for kind in ("normal", "uniform")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALED)
def test_equals_jax(name):
    ours, theirs = getattr(initializers, name), getattr(jax.nn.initializers, name)()
    for shape in ((8, 6), (5, 3, 4, 8)):
        np.testing.assert_allclose(ours(KEY, shape), theirs(KEY, shape), rtol=1e-6)


@pytest.mark.slow
def test_truncated_normal_equals_jax():
    ours = initializers.truncated_normal(0.02)
    theirs = jax.nn.initializers.truncated_normal(0.02)
    np.testing.assert_allclose(ours(KEY, (7, 5)), theirs(KEY, (7, 5)), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 8), (3, 3, 2, 5)], ids=str)
def test_orthogonal_equals_jax_and_is_orthonormal(shape):
    weight = initializers.orthogonal(KEY, shape)
    theirs = jax.nn.initializers.orthogonal()(KEY, shape)
    np.testing.assert_allclose(weight, theirs, rtol=1e-5, atol=1e-6)
    matrix = weight.reshape(-1, shape[-1])
    gram = matrix.T @ matrix if matrix.shape[0] > matrix.shape[1] else matrix @ matrix.T
    np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-5)


def test_the_fan_in_of_a_depthwise_kernel_is_one_channel():
    weight = conv2d_init(KEY, 512, 512, 7, groups=512)["weight"]
    np.testing.assert_allclose(weight.var(), 1 / 49, rtol=0.03)


@pytest.mark.parametrize("name", [*SCALED, "orthogonal", "zeros", "ones"])
def test_uses_the_default_float_type(name):
    init = getattr(initializers, name)
    assert init(KEY, (4, 3)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert init(KEY, (4, 3)).dtype == jnp.float64
