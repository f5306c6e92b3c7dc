"""The linear layer against Flax's."""

import jax
import pytest
from flax import linen

from model.layers.linear import linear, linear_init
from tests.model.compare import DTYPES, assert_same, normal, random_params


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_equals_flax(shape, bias, dtype):
    def reference(params, x):
        named = {"kernel": params["weight"]} | ({"bias": params["bias"]} if bias else {})
        return linen.Dense(4, use_bias=bias).apply({"params": named}, x)

    params = random_params(linear_init, 5, 4, bias=bias)
    assert_same(linear, reference, params, normal(1, *shape), dtype=dtype)


def test_the_initializer_can_be_chosen():
    params = linear_init(jax.random.key(0), 5, 4, init=jax.nn.initializers.constant(2.0))
    assert (params["weight"] == 2).all() and (params["bias"] == 0).all()
