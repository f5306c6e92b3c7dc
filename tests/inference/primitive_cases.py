"""Ops of jax.numpy and jax.lax that are not elementwise: functions of a batch of examples."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.inference.made import weights

ALONG = {
    "reductions": lambda x: (x.sum(1), x.max(2), x.min((1, 2)), x.prod(1)),
    "mean and variance": lambda x: (x.mean((1, 2)), x.var(1), x.std((0, 1))),
    "any and all": lambda x: ((x > 0).any(1), (x > -1).all(2)),
    "argmax": lambda x: (x.argmax(1), jnp.round(x).argmax(2)),  # the first of equal numbers
    "argmax under vmap": lambda x: (
        jax.vmap(lambda row: jnp.argmin(row, axis=-1))(x),
        jax.vmap(jnp.argmax, in_axes=1)(x),
    ),
    "argmin": lambda x: (x.argmin(1), jnp.round(x).argmin(2)),
    "cumsum": lambda x: (jnp.cumsum(x, axis=1), lax.cumsum(x, axis=2, reverse=True)),
    "cumprod": lambda x: (jnp.cumprod(x, axis=1), lax.cumprod(x, axis=2, reverse=True)),
    "cummax": lambda x: (lax.cummax(x, axis=1), lax.cummax(x, axis=2, reverse=True)),
    "cummin": lambda x: (lax.cummin(x, axis=1), lax.cummin(x, axis=2, reverse=True)),
    "cumlogsumexp": lambda x: (
        lax.cumlogsumexp(x, axis=2),
        # Infinities are computed, since LiteRT makes a constant one finite on some CPUs.
        lax.cumlogsumexp(jnp.where(x > 1.5, 1e38 * (1e38 * x), x), axis=2),
    ),
    "a mean of integers": lambda x: (
        jnp.clip(50 * jnp.abs(x), 0, 250).astype(jnp.uint8).sum(2) // 6,
        lax.div((9 * x).astype(jnp.int32).sum(2), jnp.int32(6)),
    ),
    "windows of small integers": lambda x: [
        lax.reduce_window((9 * jnp.abs(x)).astype(d), start, op, (1, 2, 2), (1, 1, 1), "VALID")
        for d in (np.uint8, np.int8)
        for start, op in ((d(0), lax.add), (d(np.iinfo(d).min), lax.max))
    ],
    "sort": lambda x: (jnp.sort(x, axis=1), jnp.sort(x, axis=2, descending=True)),
    "argsort": lambda x: jnp.argsort(jnp.round(x), axis=1),
    "sorts over the batch": lambda x: (
        jnp.sort(x, axis=0),
        jnp.argsort(x[:, 0, 0]),
        jnp.quantile(x, 0.25, axis=0),
        jnp.median(jnp.moveaxis(x, 0, 2), axis=2),
    ),
    "sort by two keys": lambda x: lax.sort(
        (jnp.round(x), jnp.round(3 * x), x), dimension=2, num_keys=2
    ),
    "median": lambda x: jnp.median(x, axis=2),
    "top_k": lambda x: lax.top_k(x, 3),
    "pad": lambda x: (
        jnp.pad(x, ((0, 0), (1, 2), (0, 1)), constant_values=7),
        jnp.pad(x, ((0, 0), (1, 1), (2, 0)), mode="edge"),
    ),
    "pad, negative": lambda x: (
        lax.pad(x, 1.5, ((0, 0, 0), (-1, 2, 0), (1, -2, 0))),
        lax.pad(x[..., :1], 1.5, ((0, 0, 0), (0, 0, 0), (3, -2, 0))),  # more than there is
    ),
    "pad, interior": lambda x: lax.pad(x, 1.5, ((0, 0, 0), (1, 0, 1), (0, -1, 2))),
    "slice": lambda x: (x[:, 1:3], x[:, ::2, 1::3], x[:, -2:], x[:, 1], x[:, 1, 2]),
    "rev": lambda x: (x[:, ::-1], jnp.flip(x, (1, 2))),
    "roll": lambda x: jnp.roll(x, 2, axis=2),
    "concatenate": lambda x: (jnp.concatenate([x, x * 2], 1), jnp.concatenate([x, x], 0)),
    "stack": lambda x: jnp.stack([x, x], 1),
    "split": lambda x: (jnp.split(x, 3, axis=2), jnp.unstack(x, axis=1)),
    "reshape": lambda x: (
        x.reshape(x.shape[0], -1),
        x.reshape(-1, 6),
        x.reshape(x.shape[0] * 2, 12),
        x.ravel(),
    ),
    "reshape, axes in another order": lambda x: (
        x.reshape(x.shape[0], 12, 2, order="F"),
        lax.reshape(x, (6, x.shape[0] * 4), dimensions=(2, 0, 1)),
        jnp.abs(x).ravel(order="F"),
    ),
    "transpose": lambda x: (x.transpose(0, 2, 1), x.T, jnp.moveaxis(x, 0, 1)),
    "constants before transposed numbers": lambda x: (
        1 - x.T,
        jnp.arange(4.0) / (5 + jnp.abs(x).swapaxes(1, 2)),
        2 ** x.transpose(0, 2, 1),
        (jnp.abs(x.swapaxes(1, 2)) + 1) ** -3,
        lax.erfc(x.T),
        lax.lt(0.5, x.swapaxes(1, 2)),
        jnp.argsort(jnp.round(3 * x).astype(int), axis=1),
    ),
    "squeeze": lambda x: (x[:, :1].squeeze(1), x[:, :1, None].squeeze((1, 2))),
    "expand_dims": lambda x: jnp.expand_dims(x, (1, 3)),
    "broadcast": lambda x: jnp.broadcast_to(x[:, :1], x.shape),
    "repeat": lambda x: (jnp.repeat(x, 2, axis=1), jnp.tile(x, (1, 2, 1))),
    "repeat and tile over the batch": lambda x: jnp.repeat(x, 2, axis=0) + jnp.tile(x, (2, 1, 1)),
    "division by a small norm": lambda x: [
        1e-9 * x / limited
        for norm in (jnp.linalg.norm(1e-9 * x, axis=-1, keepdims=True),)
        for limited in (norm + 1e-8, jnp.maximum(norm, 1e-12))
    ],
    "iota": lambda x: (jnp.arange(6) + x, jnp.arange(x.shape[0]), jnp.eye(4) @ x),
    "constants as large as the batch": lambda x: (
        x / jnp.ones_like(x).sum(0),
        x + 2 * jnp.ones_like(x)[:1],
        (x > 0) & jnp.ones_like(x, bool).all(0),
    ),
    "size of the batch": lambda x: (jnp.ones((x.shape[0], 2)), x.shape[0] * x),
    "fft": lambda x: (jnp.abs(jnp.fft.rfft(x)), jnp.fft.fft(x, axis=1).imag),
    "fft, inverse": lambda x: (
        jnp.fft.irfft(jnp.fft.rfft(x) * (0.5 + 1j)),
        jnp.fft.irfft(jnp.fft.rfft(x, n=8) * jnp.fft.rfft(x[:, :1], n=8), axis=2),
        jnp.fft.ifft(x + 1j * x[:, ::-1]).real,
    ),
    "fft over two axes": lambda x: (
        jnp.abs(jnp.fft.fft2(x)),
        jnp.fft.irfft2(jnp.fft.rfft2(x) ** 2),
    ),
    "complex numbers": lambda x: (
        (x / (1 + 1j * x) + jnp.exp(1j * x)).real,
        jnp.einsum("bij,bkj->bik", x + 1j, jnp.conj(x * 1j)).imag,
        jnp.abs(jnp.where(x > 0, x * 1j, x + 2j)[:, 1:].sum(1)),
    ),
    "cholesky": lambda x: jnp.linalg.cholesky(x @ jnp.swapaxes(x, 1, 2) + jnp.eye(4)),
    "diagonal": lambda x: (jnp.tril(x), jnp.trace(x, axis1=1, axis2=2)),
}

PRODUCT = weights(6, 5)

PRODUCTS = {
    "product": lambda x, y: x @ PRODUCT,
    "product of vectors": lambda x, y: (x[:, 0] @ PRODUCT + 1, jnp.dot(x, PRODUCT[:, 0])),
    "batched product": lambda x, y: x @ y,
    "product, transposed": lambda x, y: (
        jnp.einsum("bik,bjk->bij", x, x),
        jnp.einsum("bki,bkj->bji", x, x),
    ),
    "product over two axes": lambda x, y: (
        jnp.einsum("bij,bji->b", x, y),
        jnp.tensordot(x, jnp.ones((4, 6, 2)), 2),
    ),
    "product with free axes": lambda x, y: (
        jnp.einsum("bij,cjk->bcik", x, y),
        jnp.einsum("bij,bik->jk", x, x),
    ),
    "outer product": lambda x, y: jnp.einsum("bi,bj->bij", x[:, 0], y[:, 0]),
    "product of mixed axes": lambda x, y: jnp.einsum(
        "bhik,jbkh->bhij", x.reshape(-1, 2, 4, 3), y.reshape(2, -1, 3, 4)[..., :2]
    ),
}

INDEXING = {
    "take": lambda x, ids: (
        jnp.take(x, jnp.array([2, 0]), axis=1),
        jnp.take(x, ids, axis=2, mode="clip"),
    ),
    "take, fill": lambda x, ids: jnp.take(x, jnp.array([1, 9, -1]), axis=2, fill_value=-7),
    "take_along_axis": lambda x, ids: jnp.take_along_axis(x, ids[:, :, None], axis=1),
    "index into a table": lambda x, ids: jnp.asarray(PRODUCT)[ids],
    "index by two lists": lambda x, ids: (
        x[:, jnp.array([0, 1]), jnp.array([2, 3])],
        x[jnp.arange(x.shape[0]), ids[:, 0]],
    ),
    "positions out of range": lambda x, ids: (
        x[ids[:, 0] * 3 - 4],
        x[:, ids[0] + 2],
        x[:, 1, ids[:, 0] * 9].T,
        jax.vmap(lambda a, i: a[i])(x, ids * 5 - 9),
    ),
    "index by booleans and bytes": lambda x, ids: (
        jnp.asarray(PRODUCT)[(x > 0).astype(int)],
        jnp.asarray(PRODUCT)[ids.astype(jnp.uint8)],
        jnp.take(x, (ids - 3).astype(jnp.int8), axis=1, fill_value=5),
        x[:, 1] * ((x[:, 0] > 0).astype(float) < 0.5),
    ),
    "windows as large as the batch": lambda x, ids: (
        jnp.roll(x, ids[0, 0], axis=0),
        jnp.fft.fftshift(x, axes=0),
        lax.dynamic_update_slice(jnp.concatenate([x, x]), x + 1, (ids[0, 0], 0, 0)),
    ),
    "gather of windows": lambda x, ids: jax.vmap(
        lambda a, i: lax.dynamic_slice(a, (i[0], i[1]), (2, 3))
    )(x, ids),
    "dynamic_slice": lambda x, ids: lax.dynamic_slice(x, (0, ids[0, 0], 5), (1, 2, 3)),
    "dynamic_update_slice": lambda x, ids: lax.dynamic_update_slice(
        x, jnp.ones((1, 2, 2)), (0, ids[0, 0], 3)
    ),
    "at[].set": lambda x, ids: (
        x.at[:, 1].set(3.0),
        x.at[:, ids[0], 2].set(5.0),
        x.at[:, 1:3, ::2].set(0),
    ),
    "at[].set, equal positions": lambda x, ids: (
        x.at[:, ids[:, 0] % 2].set(ids[:, :1] * jnp.arange(6.0)),
        x.at[ids.ravel() % 2, 1].set(jnp.arange(6.0) * ids.reshape(-1, 1)),
        x.at[jnp.array([0, 0, 0]), jnp.array([1, 2, 1])].set(jnp.arange(3.0)[:, None]),
        jax.vmap(lambda a, i: a.at[i, 1].set(jnp.array([7.0, 8.0])))(x, ids * 0),
    ),
    "at[].apply": lambda x, ids: (
        x.at[:, ids.ravel()].apply(lambda a: a * 2 + 1),
        x.at[:, 1::2].apply(jnp.sin),
        x.at[:, jnp.array([0, 9, 0])].apply(jnp.exp),
    ),
    "at[].set, out of range": lambda x, ids: x.at[:, jnp.array([0, 9])].set(1.0),
    "at[].subtract": lambda x, ids: x.at[:, ids[0]].subtract(1.0),
    "at[].add": lambda x, ids: (
        x.at[:, ids[0]].add(1.0),
        x.at[jnp.arange(x.shape[0])[:, None], ids].add(x[:, :2]),
    ),
    "at[].multiply": lambda x, ids: (
        x.at[:, ids[0]].multiply(2.0),
        x.at[:, ids.ravel() * 0].multiply(1.5),
    ),
    "at[].max and at[].min": lambda x, ids: (x.at[:, ids[0]].max(0.1), x.at[:, ids[0]].min(0.1)),
    "segment_max": lambda x, ids: (
        jax.ops.segment_max(x, ids[:, 0] * 0, 1),
        jax.ops.segment_prod(jnp.moveaxis(x, 1, 0), jnp.array([1, 0, 1, 1]), 2),
    ),
    "segment_sum": lambda x, ids: jax.ops.segment_sum(x[0], jnp.array([0, 2, 0, 1]), 3),
    "bincount": lambda x, ids: jnp.zeros(6).at[ids.ravel()].add(1.0),
}


def convolution(shape, dims, **kwargs):
    """A convolution with new weights."""
    kernel = weights(*shape)
    return lambda x: lax.conv_general_dilated(x, kernel, dimension_numbers=dims, **kwargs)


IMAGE, WIDE = ("NHWC", "HWIO", "NHWC"), {"window_strides": (1, 1), "padding": "SAME"}
ODD = {"window_strides": (1, 1), "padding": ((1, 0), (3, 1))}

CONVOLUTIONS = {
    "conv": convolution((3, 3, 4, 5), IMAGE, **WIDE),
    "conv, dilated and grouped": convolution(
        (3, 2, 2, 6), IMAGE, **WIDE, rhs_dilation=(2, 1), feature_group_count=2
    ),
    "conv, dilated input": convolution((3, 2, 4, 5), IMAGE, **ODD, lhs_dilation=(2, 3)),
    "conv, dilated input and grouped": convolution(
        (3, 3, 2, 6), IMAGE, **ODD, lhs_dilation=(2, 2), feature_group_count=2
    ),
    "conv, dilated input and strided": convolution(
        (3, 3, 4, 5), IMAGE, **ODD | {"window_strides": (2, 2)}, lhs_dilation=(3, 3)
    ),
    "conv, channels first": convolution((5, 6, 3, 3), ("NCHW", "OIHW", "NHWC"), **WIDE),
    "conv over one axis": lambda x: convolution_1d(x[:, 0]),
    "conv over three axes": lambda x: convolution_3d(x[..., None]),
    "conv with batch groups": lambda x: lax.conv_general_dilated(
        jnp.concatenate([x, x + 1]),
        KERNEL,
        (1, 1),
        "SAME",
        dimension_numbers=IMAGE,
        batch_group_count=2,
    ),
    "conv with computed weights": lambda x: lax.conv_general_dilated(
        x, KERNEL * x.mean(), (1, 1), ODD["padding"], dimension_numbers=IMAGE, lhs_dilation=(2, 2)
    ),
    "window maximum": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 3, 2, 1), (1, 2, 1, 1), "SAME"
    ),
    "window minimum": lambda x: lax.reduce_window(
        x, jnp.inf, lax.min, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    ),
    "window sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 2, 1), (1, 2, 1, 1), "SAME"),
    "window sum, dilated": lambda x: lax.reduce_window(
        x,
        0.0,
        lax.add,
        (1, 2, 2, 2),
        (1, 1, 1, 1),
        ((0, 0), (1, 1), (0, 2), (0, 0)),
        None,
        (1, 2, 1, 1),
    ),
}
KERNEL = weights(3, 3, 4, 6)
convolution_1d = convolution((3, 4, 5), ("NWC", "WIO", "NWC"), window_strides=(1,), padding="SAME")
convolution_3d = convolution(
    (2, 2, 2, 1, 3), ("NDHWC", "DHWIO", "NDHWC"), window_strides=(1, 2, 1), padding="VALID"
)


def newton(x):
    """The square root in 8 steps of Newton's method."""

    def step(state):
        y, i = state
        return (y + jnp.abs(x) / y) / 2, i + 1

    return lax.while_loop(lambda state: state[1] < 8, step, (jnp.ones_like(x), 0))


def add_and_grow(state):
    total, x, steps = state
    return total + jnp.abs(x).sum(0), x * 1.5, steps + 1


def recurrent(x):
    """A recurrent layer over the second axis."""

    def step(h, row):
        h = jnp.tanh(row + h @ SQUARE)
        return h, h.sum(-1)

    return lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.moveaxis(x, 1, 0))


SQUARE = weights(6, 6)

CONTROL = {
    "while": newton,
    "while, until a sum is large": lambda x: lax.while_loop(
        lambda s: s.sum() < 50, lambda s: s + jnp.abs(x) + 1, jnp.zeros_like(x)
    ),
    "while, per example": jax.vmap(
        lambda x: lax.while_loop(lambda s: s[0].sum() < 9, add_and_grow, (jnp.zeros(6), x, 0))
    ),
    "fori_loop, per example": jax.vmap(
        lambda x: lax.fori_loop(0, (3 * jnp.abs(x[0, 0])).astype(int), lambda i, s: s * 0.5 + i, x)
    ),
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, s: s * 0.5 + i, x),
    "scan": recurrent,
    "scan, reverse": lambda x: lax.scan(
        lambda c, w: (c + w @ x[0].T, c), jnp.zeros((2, 4)), SQUARE.reshape(3, 2, 6), reverse=True
    ),
    "scan over the batch": lambda x: lax.scan(
        lambda c, row: (c + row, c * 2), jnp.zeros((4, 6)), x
    ),
    "scan from a constant state": lambda x: lax.scan(
        lambda c, row: (jnp.maximum(c, row), c), jnp.zeros_like(x[:, 0]) - 9, x.swapaxes(0, 1)
    ),
    "map": lambda x: lax.map(lambda row: row / row.sum(), x),
    "cond": lambda x: lax.cond(x.sum() > 0, lambda a: a + 1, lambda a: a * 2, x),
    "switch": lambda x: lax.switch(
        (x > 0).sum() % 3, [lambda a: a + 1, lambda a: a * 2, lambda a: a @ SQUARE], x
    ),
    "cond in scan": lambda x: lax.scan(
        lambda c, row: (lax.cond(c.sum() > 1, lambda: c * row, lambda: c + 1), c),
        jnp.zeros(6),
        x[0],
    ),
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x, axis=1),
    "calls": lambda x: (
        jax.checkpoint(jnp.sin)(x),
        lax.composite(jnp.cos, name="my.op")(x),
        jax.device_put(x),
    ),
}
