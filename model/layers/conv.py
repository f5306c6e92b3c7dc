"""Convolutions of NHWC images with HWIO weights, in the form that the platform runs fastest.

The form follows from static shapes; each has the values and gradients of `lax.conv_general_dilated`.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from model.layers.initializers import lecun_normal
from model.layers.linear import add_bias, matmul
from model.layers.op import op

LAYOUT = ("NHWC", "HWIO", "NHWC")
SMALL_MAP = 16 * 16  # a banded matrix costs H * W products a pixel: up to here it beats XLA's depthwise loop on the CPU


def conv2d_init(key, in_dim, out_dim, kernel, *, groups=1, bias=True, init=lecun_normal):
    if in_dim % groups or out_dim % groups:
        raise ValueError(f"groups: {groups} must divide both in_dim ({in_dim}) and out_dim ({out_dim})")
    params = {"weight": init(key, (*pair(kernel), in_dim // groups, out_dim))}
    return params | {"bias": jnp.zeros(out_dim)} if bias else params


@op
def conv2d(params, x, *, stride=1, padding="SAME", dilation=1):
    """(B, H, W, in) -> (B, H', W', out); `padding` is SAME, VALID, a number or ((top, bottom), (left, right))."""
    weight, stride, dilation = params["weight"], pair(stride), pair(dilation)
    pads = resolve_padding(padding, x.shape[1:3], weight.shape[:2], stride, dilation)
    return add_bias(params, convolve(x, weight, stride, pads, dilation))


def conv_transpose2d_init(key, in_dim, out_dim, kernel, *, bias=True, init=lecun_normal):
    return conv2d_init(key, in_dim, out_dim, kernel, bias=bias, init=init)


@op
def conv_transpose2d(params, x, *, stride=1, padding="SAME"):
    """Upsamples: a convolution of x with `stride - 1` zeros between its pixels; explicit padding goes around those."""
    if not isinstance(padding, str):
        padding = explicit_padding(padding)
    return add_bias(params, lax.conv_transpose(x, params["weight"], pair(stride), padding, dimension_numbers=LAYOUT))


def convolve(x, weight, stride, pads, dilation):
    kernel, channels = weight.shape[:2], x.shape[-1]
    groups = channels // weight.shape[2]

    def general(x, weight):
        return lax.conv_general_dilated(x, weight, stride, pads, None, dilation, LAYOUT, groups)

    def banded(x, weight):
        return depthwise_as_product(x, weight, stride, pads, dilation)

    if groups == 1 and pads == ((0, 0), (0, 0)):
        if kernel == (1, 1):  # a flat product is the fastest form everywhere
            return matmul(x[:, :: stride[0], :: stride[1]], weight[0, 0])
        if kernel == stride and dilation == (1, 1):  # XLA's convolution does not see that the patches do not overlap
            return lax.platform_dependent(x, weight, cpu=patches_as_product, default=general)
    if groups == channels > 1 and x.shape[1] * x.shape[2] <= SMALL_MAP:  # XLA's CPU loop is up to 100 times slower
        return lax.platform_dependent(x, weight, cpu=banded, default=general)
    return general(x, weight)


def patches_as_product(x, weight):
    """A convolution whose stride is its kernel, unpadded: every patch is one row of a matrix."""
    b, (kh, kw, c, d) = x.shape[0], weight.shape
    h, w = x.shape[1] // kh, x.shape[2] // kw
    x = x[:, : h * kh, : w * kw].reshape(b, h, kh, w, kw, c).transpose(0, 1, 3, 2, 4, 5)  # (B, H', W', kh, kw, C)
    return matmul(x.reshape(b, h, w, kh * kw * c), weight.reshape(kh * kw * c, d))


def depthwise_as_product(x, weight, stride, pads, dilation):
    """A depthwise convolution as one (H W, H' W') matrix a channel, banded with the kernel's taps."""
    geometry = zip(x.shape[1:3], weight.shape[:2], stride, pads, dilation, strict=True)
    rows, columns = (jnp.asarray(taps(*axis), x.dtype) for axis in geometry)
    matrix = jnp.einsum("iok,jpl,klc->cijop", rows, columns, weight[:, :, 0])
    x = jnp.repeat(x, weight.shape[-1] // x.shape[-1], axis=-1)  # outputs of the same channel lie side by side
    return jnp.einsum("bijc,cijop->bopc", x, matrix)


def taps(size, kernel, stride, pads, dilation):
    """Along one axis, whether output o reads input i through tap k of the kernel: (size, out, kernel)."""
    out = (sum(pads) + size - dilation * (kernel - 1) - 1) // stride + 1
    i, o, k = np.ogrid[:size, :out, :kernel]
    return i == o * stride + k * dilation - pads[0]


def resolve_padding(padding, size, kernel, stride, dilation=(1, 1)):
    """Any padding as ((top, bottom), (left, right))."""
    if not isinstance(padding, str):
        return explicit_padding(padding)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    return tuple(lax.padtype_to_pads(size, reach, stride, padding))


def explicit_padding(padding):
    return tuple(pair(p) for p in pair(padding))


def pair(value):
    return (value, value) if isinstance(value, int) else tuple(value)
