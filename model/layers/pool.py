"""Pooling of NHWC images."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from model.layers.conv import Padding, pair, resolve_padding
from model.layers.conv_forms import Pads, sum_of_readers, total, window_views
from model.layers.forms import MANY_TAPS, are_free, on_cpu, pool_in_two_passes
from model.layers.op import op

# (window, stride, pads), each for both axes
Windows = tuple[tuple[int, ...], tuple[int, ...], Pads]


@op
def max_pool(
    x: Float[Array, "batch height width dim"],
    window: int | tuple[int, int],
    *,
    stride: int | tuple[int, int] | None = None,
    padding: Padding = "VALID",
) -> Float[Array, "batch out_height out_width dim"]:
    """The maximum of each window; the stride defaults to the window."""
    windows = geometry(x, window, stride, padding)
    return by_views(max_of_views, partial(slide, -jnp.inf, lax.max), windows, x)


@op
def avg_pool(
    x: Float[Array, "batch height width dim"],
    window: int | tuple[int, int],
    *,
    stride: int | tuple[int, int] | None = None,
    padding: Padding = "VALID",
) -> Float[Array, "batch out_height out_width dim"]:
    """The mean of each window; padding does not count, so that borders are not darker."""
    windows = geometry(x, window, stride, padding)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    count = slide(0.0, lax.add, windows, jnp.ones((1, *x.shape[1:3], 1), wide.dtype))
    total = by_views(sum_of_views, partial(slide, 0.0, lax.add), windows, wide)
    return (total / count).astype(x.dtype)


def by_views(
    form: Callable[..., Array],
    plain: Callable[..., Array],
    windows: Windows,
    x: Float[Array, "batch height width dim"],
) -> Float[Array, "batch out_height out_width dim"]:
    """A pool in the form that is fastest on the platform."""
    size = x.shape[1:3]
    if are_free(size) or sum(windows[0]) > MANY_TAPS:
        return plain(windows, x)
    chosen = partial(in_two_passes, form) if pool_in_two_passes(windows[0]) else form
    return on_cpu(partial(chosen, windows, size), partial(plain, windows), x)


def in_two_passes(
    form: Callable[..., Array],
    windows: Windows,
    size: tuple[int, ...],
    x: Float[Array, "batch height width dim"],
) -> Float[Array, "batch out_height out_width dim"]:
    """A pool along the rows, then along the columns: 7 + 7 images for a window of 7x7 instead of
    49. The gradient goes to the same number, the first of several equal ones."""
    (rows, columns), (down, right), (vertical, horizontal) = windows
    x = form(((1, columns), (1, right), ((0, 0), horizontal)), size, x)
    return form(((rows, 1), (down, 1), (vertical, (0, 0))), x.shape[1:3], x)


def _max_of_views(
    windows: Windows, size: tuple[int, ...], x: Float[Array, "batch height width dim"]
) -> Float[Array, "batch out_height out_width dim"]:
    """The maximum over the images that the positions in the window see. The first of several equal
    numbers receives the gradient, and NaN stays NaN."""
    return max_and_place(windows, x)[0]


max_of_views = jax.custom_vjp(_max_of_views, nondiff_argnums=(0, 1))


def max_and_place(
    windows: Windows, x: Float[Array, "batch height width dim"]
) -> tuple[
    Float[Array, "batch out_height out_width dim"], Int[Array, "batch out_height out_width dim"]
]:
    """(the maximum, its number among the positions in the window)."""
    first, *others = window_views(x, -jnp.inf, *windows)
    place = jnp.zeros(first.shape, jnp.int8)
    for i, other in enumerate(others, 1):
        stays = (first >= other) | jnp.isnan(first)
        first, place = jnp.where(stays, first, other), jnp.where(stays, place, jnp.int8(i))
    return first, place


def max_of_views_bwd(
    windows: Windows,
    size: tuple[int, ...],
    place: Int[Array, "batch out_height out_width dim"],
    g: Float[Array, "batch out_height out_width dim"],
) -> tuple[Float[Array, "batch height width dim"]]:
    columns = windows[0][1]

    def part(i: int, j: int, g: Array, place: Array) -> Array:
        return jnp.where(place == i * columns + j, g, 0)

    return (sum_of_readers(part, [g, place], size, *windows),)


max_of_views.defvjp(lambda windows, size, x: max_and_place(windows, x), max_of_views_bwd)


def plain_sum_of_views(
    windows: Windows, size: tuple[int, ...], x: Float[Array, "batch height width dim"]
) -> Float[Array, "batch out_height out_width dim"]:
    """The sum over the images that the positions in the window see."""
    return total(window_views(x, 0, *windows))


def sum_of_views_fwd(
    windows: Windows, size: tuple[int, ...], x: Float[Array, "batch height width dim"]
) -> tuple[Float[Array, "batch out_height out_width dim"], None]:
    return plain_sum_of_views(windows, size, x), None


def sum_of_views_bwd(
    windows: Windows,
    size: tuple[int, ...],
    _: None,
    g: Float[Array, "batch out_height out_width dim"],
) -> tuple[Float[Array, "batch height width dim"]]:
    return (sum_of_readers(lambda i, j, g: g, [g], size, *windows),)


sum_of_views = jax.custom_vjp(plain_sum_of_views, nondiff_argnums=(0, 1))
sum_of_views.defvjp(sum_of_views_fwd, sum_of_views_bwd)


def geometry(
    x: Any,  # an array, or the value of one in an export
    window: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: Padding,
) -> Windows:
    """(window, stride, pads), each for both axes."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        fix = "convert it, as by x.astype(jnp.float32)"
        raise ValueError(f"x: a pool is of floats, got {x.dtype}; {fix}")
    window = pair(window)
    stride = window if stride is None else pair(stride)
    pads = resolve_padding(padding, x.shape[1:3], window, stride)
    if not isinstance(padding, str) and any(max(p) >= w for p, w in zip(pads, window, strict=True)):
        why = "so that no window is wholly in the padding"
        raise ValueError(f"padding: must be less than the window {window}, {why}, got {padding}")
    return window, stride, pads


def slide(
    start: float,
    combine: Callable[[Array, Array], Array],
    windows: Windows,
    x: Float[Array, "batch height width dim"],
) -> Float[Array, "batch out_height out_width dim"]:
    """A pool by XLA's sliding window."""
    window, stride, pads = windows
    return lax.reduce_window(
        x, start, combine, (1, *window, 1), (1, *stride, 1), ((0, 0), *pads, (0, 0))
    )


@op
def global_max_pool(x: Float[Array, "batch height width dim"]) -> Float[Array, "batch dim"]:
    """(B, H, W, C) -> (B, C)."""
    return x.max((1, 2))


@op
def global_avg_pool(x: Float[Array, "batch height width dim"]) -> Float[Array, "batch dim"]:
    """(B, H, W, C) -> (B, C)."""
    return x.mean((1, 2))
