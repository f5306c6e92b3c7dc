"""Pooling of NHWC images."""

from functools import partial, reduce

import jax.numpy as jnp
from jax import lax

from model.layers.conv import pair, resolve_padding
from model.layers.conv_forms import window_views
from model.layers.forms import are_free, on_cpu, pools_by_views
from model.layers.op import op


@op
def max_pool(x, window, *, stride=None, padding="VALID"):
    """The maximum of each window; the stride defaults to the window."""
    window, stride, pads = geometry(x, window, stride, padding)

    def plain(x):
        return slide(x, -jnp.inf, lax.max, window, stride, pads)

    by_views = partial(max_of_views, window=window, stride=stride, pads=pads)
    is_by_views = pools_by_views(window, stride) and not are_free(x.shape[1:3])
    return on_cpu(by_views, plain, x) if is_by_views else plain(x)


def max_of_views(x, window, stride, pads):
    """The maximum over the images that the positions in the window see."""
    return reduce(first_maximum, window_views(x, -jnp.inf, window, stride, pads))


def first_maximum(a, b):
    """The maximum; the first of two equal numbers receives the gradient, and NaN stays NaN."""
    return jnp.where((a >= b) | jnp.isnan(a), a, b)


@op
def avg_pool(x, window, *, stride=None, padding="VALID"):
    """The mean of each window; padding does not count, so that borders are not darker."""
    windows = geometry(x, window, stride, padding)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    count = slide(jnp.ones((1, *x.shape[1:3], 1), wide.dtype), 0.0, lax.add, *windows)
    return (slide(wide, 0.0, lax.add, *windows) / count).astype(x.dtype)


def geometry(x, window, stride, padding):
    window = pair(window)
    stride = window if stride is None else pair(stride)
    return window, stride, resolve_padding(padding, x.shape[1:3], window, stride)


def slide(x, start, combine, window, stride, pads):
    return lax.reduce_window(
        x, start, combine, (1, *window, 1), (1, *stride, 1), ((0, 0), *pads, (0, 0))
    )


@op
def global_max_pool(x):
    """(B, H, W, C) -> (B, C)."""
    return x.max((1, 2))


@op
def global_avg_pool(x):
    """(B, H, W, C) -> (B, C)."""
    return x.mean((1, 2))
