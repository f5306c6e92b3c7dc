"""Pooling against Flax's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from model.layers.pool import avg_pool, global_avg_pool, global_max_pool, max_pool
from tests.model.compare import DTYPES, assert_same, normal, quick_jit

pytestmark = pytest.mark.contract

WINDOWS = [
    (2, None, "VALID"),
    (3, 2, "SAME"),
    ((2, 3), (1, 2), "VALID"),
    (3, 1, ((1, 0), (2, 1))),
    (4, 1, "SAME"),
    (5, 2, "SAME"),
    (2, 3, "VALID"),
]


def test_a_mean_in_half_precision_is_rounded_once():
    x = jnp.asarray(1 + normal(0, 9, 6, 6, 3) / 8, jnp.bfloat16)
    ours = quick_jit(lambda x: avg_pool(x, 6))(x)
    expected = np.asarray(x, np.float32).mean((1, 2), keepdims=True)
    np.testing.assert_allclose(ours.astype(jnp.float32), expected, rtol=1.01 * 2**-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window, stride, padding", WINDOWS)
def test_pools_equal_flax(window, stride, padding, dtype):
    shape = (window, window) if isinstance(window, int) else window
    strides = shape if stride is None else (stride, stride) if isinstance(stride, int) else stride
    x = normal(0, 2, 7, 6, 3)
    assert_same(
        lambda x: max_pool(x, window, stride=stride, padding=padding),
        lambda x: linen.max_pool(x, shape, strides, padding),
        x,
        dtype=dtype,
    )
    assert_same(
        lambda x: avg_pool(x, window, stride=stride, padding=padding),
        lambda x: linen.avg_pool(x, shape, strides, padding, count_include_pad=False).astype(dtype),
        x,
        dtype=dtype,
    )


def test_a_global_pool_equals_a_pool_with_the_window_of_the_whole_image():
    x = normal(0, 2, 4, 5, 3)
    mean = avg_pool(x, (4, 5))[:, 0, 0]
    np.testing.assert_allclose(global_avg_pool(x), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(global_max_pool(x), max_pool(x, (4, 5))[:, 0, 0])


@pytest.mark.slow
def test_the_first_of_equal_numbers_receives_the_gradient_and_nan_stays():
    x = normal(0, 2, 9, 8, 3).round()
    x[0, 4, 4, 0] = np.nan
    padding = ((1, 1), (1, 1))

    def slopes(pool):
        return jax.vjp(pool, x)[1](normal(1, 2, 5, 4, 3))[0][1]

    ours = slopes(lambda x: max_pool(x, 3, stride=2, padding=padding))
    theirs = slopes(lambda x: linen.max_pool(x, (3, 3), (2, 2), padding))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert np.isnan(max_pool(x, 3, stride=2, padding=padding)[0, 2, 2, 0])


def test_only_windows_that_compile_for_long_use_xlas_form_on_the_cpu():
    def is_xlas(window, platform):
        pool = jax.jit(lambda x: max_pool(x, window))
        exported = jax.export.export(pool, platforms=[platform])(np.zeros((1, 48, 48, 2), "f4"))
        return "stablehlo.reduce_window" in exported.mlir_module()

    assert [is_xlas(40, "cpu"), is_xlas(41, "cpu"), is_xlas(2, "cuda")] == [False, True, True]


@pytest.mark.parametrize("pool", [max_pool, avg_pool])
def test_a_window_in_the_padding_and_integers_are_refused(without_shape_checks, pool):
    """A window without a pixel would be -infinity, or 0 / 0."""
    x = normal(0, 1, 4, 4, 2)
    assert np.isfinite(pool(x, 2, stride=1, padding=1)).all()
    for padding in (2, ((0, 0), (0, 2))):
        with pytest.raises(ValueError, match=r"^padding: must be less than the window \(2, 2\)"):
            pool(x, 2, padding=padding)
    with pytest.raises(ValueError, match=r"^x: a pool is of floats, got uint8; convert it"):
        pool(x.astype(np.uint8), 2)
