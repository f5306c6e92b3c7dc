"""The linear layer against Flax's."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen

from model.layers.linear import linear, linear_init, matmul
from tests.model.compare import DTYPES, assert_same, normal, random_params
from training.engine import platform_options


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_equals_flax(shape, bias, dtype):
    def reference(params, x):
        named = {"kernel": params["weight"]} | ({"bias": params["bias"]} if bias else {})
        return linen.Dense(4, use_bias=bias).apply({"params": named}, x)

    params = random_params(linear_init, 5, 4, bias=bias)
    assert_same(linear, reference, params, normal(1, *shape), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_flax_where_the_gradient_is_computed_as_its_transpose(dtype):
    def reference(params, x):
        named = {"kernel": params["weight"], "bias": params["bias"]}
        return linen.Dense(4).apply({"params": named}, x)

    params = random_params(linear_init, 16, 4)
    assert_same(linear, reference, params, normal(1, 5, 7, 16), dtype=dtype)


def test_the_gradient_of_a_narrowing_layer_is_the_product_that_is_fast():
    """XLA must not turn the product around: that takes up to three times as long on the CPU."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 32), (32, 8))]
    gradient = jax.grad(lambda x, weight: (matmul(x, weight) ** 2).sum(), argnums=1)
    text = jax.jit(gradient).lower(*shapes).compile(platform_options()).as_text()
    assert "f32[8,32]{1,0} dot(" in text and "f32[32,8]{1,0} dot(" not in text


@pytest.mark.slow
def test_a_narrowing_layer_has_forward_mode_and_can_be_mapped():
    x, weight = normal(1, 64, 32), normal(2, 32, 8)
    plain = lambda weight: (jnp.tanh(x @ weight) ** 2).sum()  # noqa: E731
    ours = lambda weight: (jnp.tanh(matmul(x, weight)) ** 2).sum()  # noqa: E731
    directions = normal(3, 2, 32, 8)

    def second(function):
        return jax.vmap(lambda d: jax.jvp(jax.grad(function), (weight,), (d,))[1])(directions)

    assert jnp.allclose(second(ours), second(plain), rtol=1e-4, atol=1e-4)


def test_the_initializer_can_be_chosen():
    params = linear_init(jax.random.key(0), 5, 4, init=jax.nn.initializers.constant(2.0))
    assert (params["weight"] == 2).all() and (params["bias"] == 0).all()
