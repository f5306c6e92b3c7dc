"""Pooling of NHWC images."""

import jax.numpy as jnp
from jax import lax

from model.layers.conv import pair, resolve_padding


def max_pool(x, window, *, stride=None, padding="VALID"):
    """The largest number under each window; the stride is the window unless given."""
    return slide(x, -jnp.inf, lax.max, window, stride, padding)


def avg_pool(x, window, *, stride=None, padding="VALID"):
    """The mean under each window; padding does not count, so a border is as bright as the pixels it has."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    total = slide(wide, 0.0, lax.add, window, stride, padding)
    count = slide(jnp.ones((1, *x.shape[1:3], 1), wide.dtype), 0.0, lax.add, window, stride, padding)
    return (total / count).astype(x.dtype)


def slide(x, start, combine, window, stride, padding):
    window = pair(window)
    stride = window if stride is None else pair(stride)
    pads = resolve_padding(padding, x.shape[1:3], window, stride)
    return lax.reduce_window(x, start, combine, (1, *window, 1), (1, *stride, 1), ((0, 0), *pads, (0, 0)))


def global_max_pool(x):
    """(B, H, W, C) -> (B, C)."""
    return x.max((1, 2))


def global_avg_pool(x):
    """(B, H, W, C) -> (B, C)."""
    return x.mean((1, 2))
