"""Pooling of NHWC images."""

import jax.numpy as jnp
from jax import lax

from model.layers.conv import pair, resolve_padding
from model.layers.op import op


@op
def max_pool(x, window, *, stride=None, padding="VALID"):
    """The largest number under each window; the stride is the window unless given."""
    window, stride, pads = geometry(x, window, stride, padding)

    def general(x):
        return slide(x, -jnp.inf, lax.max, window, stride, pads)

    if stride == window and pads == ((0, 0), (0, 0)):  # XLA's CPU gradient of a sliding maximum is 13 times slower
        return lax.platform_dependent(x, cpu=lambda x: max_of_tiles(x, window), default=general)
    return general(x)


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
    return lax.reduce_window(x, start, combine, (1, *window, 1), (1, *stride, 1), ((0, 0), *pads, (0, 0)))


def max_of_tiles(x, window):
    """A maximum over windows that do not overlap; equal largest numbers share the gradient."""
    (b, height, width, c), (kh, kw) = x.shape, window
    h, w = height // kh, width // kw
    return x[:, : h * kh, : w * kw].reshape(b, h, kh, w, kw, c).max((2, 4))


@op
def global_max_pool(x):
    """(B, H, W, C) -> (B, C)."""
    return x.max((1, 2))


@op
def global_avg_pool(x):
    """(B, H, W, C) -> (B, C)."""
    return x.mean((1, 2))
