"""Preprocessing against NumPy, and the inputs that it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training.preprocess import normalize, to_unit

BYTES = np.arange(256, dtype="uint8").reshape(8, 16, 2)


def test_to_unit_maps_bytes_to_floats_from_0_to_1():
    units = jax.jit(to_unit)(BYTES)
    np.testing.assert_allclose(units, BYTES / 255, rtol=2e-7)  # XLA multiplies by 1 / 255
    assert units.dtype == jnp.float32 and units.min() == 0 and units.max() == 1
    with jax.enable_x64(True):
        assert to_unit(jnp.asarray(BYTES)).dtype == jnp.float64


def test_normalize_works_by_channel_and_keeps_the_dtype():
    x = np.random.default_rng(0).normal(size=(5, 8, 8, 3)).astype("float32")
    mean, std = x.mean((0, 1, 2)), x.std((0, 1, 2))
    y = jax.vmap(lambda image: normalize(image, mean=tuple(mean), std=tuple(std)))(x)
    np.testing.assert_allclose(y, (x - mean) / std, rtol=1e-6)
    low = jnp.ones((2, 2, 1), jnp.bfloat16)
    assert normalize(low, mean=(0.5,), std=(0.5,)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: to_unit(jnp.ones((2, 2, 1))), "uint8.*float32"),
        (
            lambda: normalize(jnp.asarray(BYTES), mean=(0.5, 0.5), std=(0.5, 0.5)),
            "uint8; put to_unit before",
        ),
        (
            lambda: normalize(jnp.ones((2, 2, 3)), mean=(0.5,), std=(0.5,) * 3),
            "^mean: .* the 3 channels, got 1",
        ),
        (
            lambda: normalize(jnp.ones((2, 2, 3)), mean=(0.5,) * 3, std=(0.5,) * 2),
            "^std: .* the 3 channels, got 2",
        ),
        (
            lambda: normalize(jnp.ones((2, 2, 2)), mean=(0.5, 0.5), std=(0.5, 0.0)),
            "^std: must be a finite number above 0",
        ),
    ],
)
def test_wrong_inputs_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
