"""Pooling against Flax's."""

import numpy as np
import pytest
from flax import linen

from model.layers.forms import pools_by_views
from model.layers.pool import avg_pool, global_avg_pool, global_max_pool, max_pool
from tests.model.compare import DTYPES, assert_same, normal

WINDOWS = [
    (2, None, "VALID"),
    (3, 2, "SAME"),
    ((2, 3), (1, 2), "VALID"),
    (3, 1, ((1, 0), (2, 1))),
    (4, 1, "SAME"),
]


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


def test_windows_of_many_pixels_use_xlas_form():
    """The gradient of a view compares all views: 25 of them took 4 times as long as XLA's."""
    assert all(pools_by_views((n, n), (s, s)) for n, s in ((2, 2), (3, 2), (3, 3), (2, 1)))
    assert not any(pools_by_views((n, n), (s, s)) for n, s in ((5, 5), (4, 1), (7, 7)))
