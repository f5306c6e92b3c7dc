"""Convolutions of NHWC images with HWIO weights, in the form that the platform runs fastest.

In every form, values and gradients are those of `lax.conv_general_dilated`.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from model.layers import conv_forms
from model.layers.conv_forms import LAYOUT, Pads, plain
from model.layers.forms import are_free, joined_groups, on_cpu
from model.layers.initializers import Initializer, lecun_normal
from model.layers.linear import add_bias, matmul
from model.layers.op import op

# SAME, VALID, a number, or ((top, bottom), (left, right))
Padding = str | int | Sequence[int | Sequence[int]]
T = TypeVar("T")


def conv2d_init(
    key: Array,
    in_dim: int,
    out_dim: int,
    kernel: int | tuple[int, int],
    *,
    groups: int = 1,
    bias: bool = True,
    init: Initializer = lecun_normal,
) -> dict[str, Array]:
    if in_dim % groups or out_dim % groups:
        raise ValueError(
            f"groups: {groups} must divide both in_dim ({in_dim}) and out_dim ({out_dim})"
        )
    params = {"weight": init(key, (*pair(kernel), in_dim // groups, out_dim))}
    return params | {"bias": jnp.zeros(out_dim)} if bias else params


@op
def conv2d(
    params: PyTree,
    x: Float[Array, "batch height width in_dim"],
    *,
    stride: int | tuple[int, int] = 1,
    padding: Padding = "SAME",
    dilation: int | tuple[int, int] = 1,
) -> Float[Array, "batch out_height out_width out_dim"]:
    """(B, H, W, in) -> (B, H', W', out).

    `padding` is SAME, VALID, a number or ((top, bottom), (left, right)).
    """
    weight, stride, dilation = params["weight"], pair(stride), pair(dilation)
    if are_free(x.shape[1:3]):
        pads = padding if isinstance(padding, str) else explicit_padding(padding)
        return add_bias(params, plain(x, weight, stride, pads, dilation))
    pads = resolve_padding(padding, x.shape[1:3], weight.shape[:2], stride, dilation)
    x, pads = within_reach(x, pads, weight.shape[:2], dilation)
    return add_bias(params, convolve(x, weight, stride, pads, dilation))


def conv_transpose2d_init(
    key: Array,
    in_dim: int,
    out_dim: int,
    kernel: int | tuple[int, int],
    *,
    bias: bool = True,
    init: Initializer = lecun_normal,
) -> dict[str, Array]:
    return conv2d_init(key, in_dim, out_dim, kernel, bias=bias, init=init)


@op
def conv_transpose2d(
    params: PyTree,
    x: Float[Array, "batch height width in_dim"],
    *,
    stride: int | tuple[int, int] = 1,
    padding: Padding = "SAME",
) -> Float[Array, "batch out_height out_width out_dim"]:
    """Upsamples: convolves x with `stride - 1` zeros between its pixels.

    Explicit padding is added around these zeros.
    """
    weight, stride = params["weight"], pair(stride)
    pads = transposed_padding(padding, weight.shape[:2], stride)

    def xla(
        x: Float[Array, "batch height width in_dim"],
        weight: Float[Array, "kernel_height kernel_width in_dim out_dim"],
    ) -> Float[Array, "batch out_height out_width out_dim"]:
        return lax.conv_transpose(x, weight, stride, pads, dimension_numbers=LAYOUT)

    if stride == (1, 1):
        x, pads = within_reach(x, pads, weight.shape[:2])
    if are_free(x.shape[1:3]) or stride == (1, 1):
        return add_bias(params, xla(x, weight))
    in_phases = partial(conv_forms.phases, stride=stride, pads=pads)
    return add_bias(params, on_cpu(in_phases, xla, x, weight))


def transposed_padding(padding: Padding, kernel: tuple[int, ...], stride: tuple[int, ...]) -> Pads:
    """As in lax.conv_transpose, SAME returns `stride` times the size, VALID all that x reaches."""
    if not isinstance(padding, str):
        return explicit_padding(padding)
    whole = [(k - 1, k - 1 + max(s - k, 0)) for k, s in zip(kernel, stride, strict=True)]
    return tuple(whole) if padding == "VALID" else tuple(map(same_padding, kernel, stride))


def same_padding(kernel: int, stride: int) -> tuple[int, int]:
    total = kernel + stride - 2
    before = kernel - 1 if stride > kernel - 1 else -(-total // 2)
    return before, total - before


def within_reach(
    x: Float[Array, "batch height width dim"],
    pads: Pads,
    kernel: tuple[int, ...],
    dilation: tuple[int, ...] = (1, 1),
) -> tuple[Float[Array, "batch padded_height padded_width dim"], Pads]:
    """(x, pads) with zeros added to x where the padding is wider than the kernel reaches. For such
    a padding XLA's CPU backend computes a wrong gradient of x (jax 0.10.2)."""
    reach = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    excess = [(max(a - r, 0), max(b - r, 0)) for (a, b), r in zip(pads, reach, strict=True)]
    if not any(map(any, excess)):
        return x, pads
    left = tuple((a - b, c - d) for (a, c), (b, d) in zip(pads, excess, strict=True))
    return jnp.pad(x, ((0, 0), *excess, (0, 0))), left


def convolve(
    x: Float[Array, "batch height width in_dim"],
    weight: Float[Array, "kernel_height kernel_width group_dim out_dim"],
    stride: tuple[int, ...],
    pads: Pads,
    dilation: tuple[int, ...],
) -> Float[Array, "batch out_height out_width out_dim"]:
    """A convolution in the fastest form for its shapes and the platform."""
    kernel, channels = weight.shape[:2], x.shape[-1]
    groups = channels // weight.shape[2]
    xla = partial(plain, stride=stride, pads=pads, dilation=dilation)
    if groups == 1 and pads == ((0, 0), (0, 0)):
        if kernel == (1, 1):  # a flat product is the fastest form everywhere
            return matmul(x[:, :: stride[0], :: stride[1]], weight[0, 0])
        # XLA's convolution does not make use of patches that do not overlap.
        if kernel == stride and dilation == (1, 1):
            return on_cpu(conv_forms.patches, xla, x, weight)
    if groups == channels > 1:
        form = partial(conv_forms.depthwise, stride=stride, pads=pads, dilation=dilation)
        return on_cpu(form, xla, x, weight)
    if groups > 1:
        joined = joined_groups(groups, weight.shape[2], weight.shape[3] // groups)
        form = partial(conv_forms.in_blocks, dense=xla, groups=groups, joined=joined)
        return on_cpu(form, xla, x, weight)
    return xla(x, weight)


def resolve_padding(
    padding: Padding,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int] = (1, 1),
) -> Pads:
    """A padding of any form as ((top, bottom), (left, right))."""
    if not isinstance(padding, str):
        return explicit_padding(padding)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    return tuple(lax.padtype_to_pads(size, reach, stride, padding))


def explicit_padding(padding: int | Sequence[int | Sequence[int]]) -> Pads:
    return tuple(pair(p) for p in pair(padding))


def pair(value: int | Sequence[T]) -> tuple[int | T, int | T]:
    first, second = (value, value) if isinstance(value, int) else value
    return first, second
