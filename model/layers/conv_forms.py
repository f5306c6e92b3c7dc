"""What a convolution of NHWC images is on the CPU where XLA's own is slow: matrix products, or moved images added up."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax

from model.layers import forms
from model.layers.linear import matmul


def patches(x, weight):
    """A convolution whose stride is its kernel, unpadded: every patch is one row of a matrix."""
    b, (kh, kw, c, d) = x.shape[0], weight.shape
    h, w = x.shape[1] // kh, x.shape[2] // kw
    x = (
        x[:, : h * kh, : w * kw].reshape(b, h, kh, w, kw, c).transpose(0, 1, 3, 2, 4, 5)
    )  # (B, H', W', kh, kw, C)
    return matmul(x.reshape(b, h, w, kh * kw * c), weight.reshape(kh * kw * c, d))


def depthwise(x, weight, stride, pads, dilation):
    """A depthwise convolution, in the form that its shapes ask for."""
    x = jnp.repeat(
        x, weight.shape[-1] // x.shape[-1], axis=-1
    )  # outputs of the same channel lie side by side
    form = forms.depthwise(*x.shape[1:], weight.shape[0] * weight.shape[1])
    return {"shifted": shifted, "banded": banded, "banded_rows": banded_rows}[form](
        x, weight, stride, pads, dilation
    )


def shifted(x, weight, stride, pads, dilation):
    """A sum over the kernel's taps of the moved image, each channel times its weight."""
    wide = jnp.promote_types(x.dtype, jnp.float32)  # as XLA adds up
    views = moved(x.astype(wide), 0, weight.shape[:2], stride, pads, dilation)
    kernel = weight.astype(wide).reshape(-1, weight.shape[-1])
    return sum(view * tap for view, tap in zip(views, kernel, strict=True)).astype(x.dtype)


def banded(x, weight, stride, pads, dilation):
    """One (H W, H' W') matrix a channel, banded with the kernel's taps."""
    geometry = zip(x.shape[1:3], weight.shape[:2], stride, pads, dilation, strict=True)
    rows, columns = (jnp.asarray(taps(*axis), x.dtype) for axis in geometry)
    matrix = jnp.einsum("iok,jpl,klc->cijop", rows, columns, weight[:, :, 0])
    return jnp.einsum("bijc,cijop->bopc", x, matrix)


def banded_rows(x, weight, stride, pads, dilation):
    """One (W, W') matrix a channel and row of the kernel: a map of any height costs the same for each of its pixels."""
    columns = jnp.asarray(
        taps(x.shape[2], weight.shape[1], stride[1], pads[1], dilation[1]), x.dtype
    )
    matrices = jnp.einsum("jpl,klc->kcjp", columns, weight[:, :, 0])
    x = x.transpose(3, 0, 1, 2)[..., None]  # (C, B, H, W, 1): rows are moved alone
    views = moved(
        x.reshape(-1, *x.shape[2:]),
        0,
        (len(weight), 1),
        (stride[0], 1),
        (pads[0], (0, 0)),
        (dilation[0], 1),
    )
    views = [view.reshape(x.shape[0], -1, view.shape[2]) for view in views]  # (C, B H', W)
    product = partial(
        jnp.matmul, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32)
    )  # as XLA adds up
    y = sum(product(view, matrix) for view, matrix in zip(views, matrices, strict=True)).astype(
        x.dtype
    )
    return y.reshape(x.shape[0], x.shape[1], -1, y.shape[-1]).transpose(1, 2, 3, 0)


def moved(x, padding, window, stride, pads, dilation=(1, 1)):
    """For each position in a window, the pixels that it sees, as an image: [(B, H', W', C)], row by row."""
    x = lax.pad(
        x, jnp.asarray(padding, x.dtype), ((0, 0, 0), (*pads[0], 0), (*pads[1], 0), (0, 0, 0))
    )
    reach = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    ends = [
        size - r + 1 for size, r in zip(x.shape[1:3], reach, strict=True)
    ]  # of the first position
    starts = [(i * dilation[0], j * dilation[1]) for i, j in np.ndindex(*window)]
    return [x[:, i : i + ends[0] : stride[0], j : j + ends[1] : stride[1]] for i, j in starts]


def taps(size, kernel, stride, pads, dilation):
    """Along one axis, whether output o reads input i through tap k of the kernel: (size, out, kernel)."""
    out = (sum(pads) + size - dilation * (kernel - 1) - 1) // stride + 1
    i, o, k = np.ogrid[:size, :out, :kernel]
    return i == o * stride + k * dilation - pads[0]


def in_blocks(x, weight, dense, groups):
    """A grouped convolution as a few dense ones, by `dense`; zeros where one of them joins several groups."""
    joined = forms.joined_groups(groups, weight.shape[2])
    own = np.kron(
        np.eye(joined), np.ones((weight.shape[2], weight.shape[3] // groups))
    )  # what belongs to a group
    blocks = zip(*(jnp.split(a, groups // joined, axis=-1) for a in (x, weight)), strict=True)
    return jnp.concatenate(
        [dense(a, jnp.tile(w, (joined, 1)) * own.astype(w.dtype)) for a, w in blocks], axis=-1
    )
