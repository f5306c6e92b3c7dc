"""Dropout and stochastic depth: rates, expected values, gradients, and when they do nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.layers.dropout import drop_path, dropout
from tests.model.compare import normal

pytestmark = pytest.mark.contract

KEY = jax.random.key(0)
BOTH = pytest.mark.parametrize("layer", [dropout, drop_path])


@BOTH
@pytest.mark.parametrize("rate", [0.1, 0.75])
def test_drops_at_the_rate_and_keeps_the_expected_value(layer, rate):
    y = layer(KEY, jnp.full((20_000, 3), 2.0), rate, train=True)
    np.testing.assert_allclose((y == 0).mean(), rate, atol=0.01)
    np.testing.assert_allclose(y.mean(), 2, rtol=0.03)
    np.testing.assert_allclose(y[y != 0], 2 / (1 - rate), rtol=1e-6)


@pytest.mark.slow
def test_dropout_draws_per_value_and_drop_path_per_example():
    x = jnp.ones((1000, 2, 3))
    assert 0 < (dropout(KEY, x, 0.5, train=True) == 0).reshape(1000, -1).mean(1).std() < 0.3
    assert set(np.asarray(drop_path(KEY, x, 0.5, train=True)).sum((1, 2))) == {0, 12}


@BOTH
@pytest.mark.parametrize("rate, train", [(0.5, False), (0.0, True), (0, True)])
def test_is_the_identity_in_evaluation_or_at_rate_zero(layer, rate, train):
    x = jnp.ones((4, 3))
    assert layer(None, x, rate, train=train) is x


@BOTH
def test_training_without_a_key_raises(layer):
    with pytest.raises(ValueError, match="key: dropout needs a random key in training, found None"):
        layer(None, jnp.ones((4, 3)), 0.5, train=True)


@pytest.mark.slow
@BOTH
def test_keeps_the_dtype_and_scales_the_gradient_like_the_output(layer):
    x = jnp.ones((40, 3), jnp.bfloat16)
    y, grad = jax.value_and_grad(lambda x: layer(KEY, x, 0.5, train=True).sum())(x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(grad, layer(KEY, x, 0.5, train=True))


@BOTH
@pytest.mark.parametrize("rate", [0.1, 0.05, 0.3])
def test_divides_in_float32_and_then_rounds(layer, rate):
    x = jnp.asarray(normal(0, 4000, 1), jnp.bfloat16)
    y = np.asarray(layer(KEY, x, rate, train=True))
    expected = np.asarray(x, np.float64) / (1 - rate)
    np.testing.assert_array_equal(y[y != 0], expected.astype(np.float32).astype(y.dtype)[y != 0])


@BOTH
@pytest.mark.parametrize("rate", [-0.1, 1, 1.5, float("nan")])
def test_a_rate_out_of_range_is_refused(layer, rate):
    with pytest.raises(ValueError, match=f"^rate: must be at least 0 and below 1, got {rate}"):
        layer(KEY, jnp.ones((4, 3)), rate, train=True)
