"""Pooling of NHWC images."""

import math
from functools import partial, reduce

import jax.numpy as jnp
from jax import lax

from model.layers.conv import pair, resolve_padding
from model.layers.conv_forms import moved
from model.layers.forms import moves, on_cpu
from model.layers.op import op


@op
def max_pool(x, window, *, stride=None, padding="VALID"):
    """The largest number under each window; the stride is the window unless given."""
    window, stride, pads = geometry(x, window, stride, padding)

    def plain(x):
        return slide(x, -jnp.inf, lax.max, window, stride, pads)

    moving = partial(of_moved, window=window, stride=stride, pads=pads)
    return on_cpu(moving, plain, x) if moves(math.prod(window)) else plain(x)


def of_moved(x, window, stride, pads):
    """The largest of the images that each position in the window sees."""
    return reduce(first_largest, moved(x, -jnp.inf, window, stride, pads))


def first_largest(a, b):
    """The maximum; of equal numbers the first one has the gradient, and a NaN stays."""
    return jnp.where((a >= b) | jnp.isnan(a), a, b)


@op
def avg_pool(x, window, *, stride=None, padding="VALID"):
    """The mean under each window; padding does not count, so a border is as bright as the pixels it has."""
    where = geometry(x, window, stride, padding)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    count = slide(jnp.ones((1, *x.shape[1:3], 1), wide.dtype), 0.0, lax.add, *where)
    return (slide(wide, 0.0, lax.add, *where) / count).astype(x.dtype)


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
