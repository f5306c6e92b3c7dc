"""The plain jax.numpy and lax of a user's model: functions of a batch of examples."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.inference.made import weights

EDGES = np.array([-1, -0.25, 0.5, 1], np.float32)

UNARY = {
    **{
        name: getattr(lax, name)
        for name in ("abs", "neg", "sign", "exp", "exp2", "sin", "cos", "sinh", "cosh", "erf")
    },
    **{
        name: getattr(lax, name)
        for name in ("logistic", "tan", "atan", "asinh", "ceil", "floor", "cbrt", "square")
    },
    "lax.tanh": lax.tanh,
    "erfc": lambda x: (lax.erfc(x), 1e4 * lax.erfc(jnp.abs(x) + 2)),
    "erf_inv": lambda x: lax.erf_inv(jnp.tanh(x)),
    "asin": lambda x: lax.asin(jnp.tanh(x)),
    "acos": lambda x: lax.acos(jnp.tanh(x)),
    "atanh": lambda x: lax.atanh(jnp.tanh(x)),
    "acosh": lambda x: lax.acosh(1 + jnp.abs(x)),
    "log": lambda x: lax.log(jnp.abs(x)),
    "sqrt": lambda x: lax.sqrt(jnp.abs(x)),
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x)),
    "expm1": lambda x: (lax.expm1(x), 1e6 * lax.expm1(1e-6 * x)),
    "log1p": lambda x: (lax.log1p(jnp.abs(x)), 1e6 * lax.log1p(1e-6 * x)),
    "round": lambda x: (jnp.round(x * 2), lax.round(x * 2)),  # to even, away from zero
    "is_finite": lambda x: jnp.isfinite(1 / jnp.floor(x)),
    "isnan": lambda x: jnp.isnan(jnp.log(x)),
    "integer_pow": lambda x: (x**2, x**3, x**4, x**-1, x**-2),
    "reduce_precision": lambda x: [
        lax.reduce_precision(x, 8, 23),
        lax.reduce_precision(x, 8, 7),
        lax.reduce_precision(x, 5, 10),
    ],
    "clamp": lambda x: jnp.clip(x, -0.5, 0.7),
    "searchsorted": lambda x: (
        jnp.searchsorted(EDGES, x),
        jnp.searchsorted(jnp.sort(x[0]), jnp.log(x), side="right"),
    ),
    "searchsorted by all": lambda x: (
        jnp.digitize(x, EDGES),
        jnp.searchsorted(jnp.log(x[0]), jnp.log(x), method="compare_all"),
    ),
    "interp": lambda x: jnp.interp(x, EDGES, EDGES**2),
    "nan_to_num": lambda x: jnp.nan_to_num(jnp.log(x)),
    "relu of jax.nn": jax.nn.relu,
    "gelu of jax.nn": lambda x: (jax.nn.gelu(x), jax.nn.gelu(x, approximate=False)),
    "silu of jax.nn": jax.nn.silu,
    "elu of jax.nn": jax.nn.elu,
    "softmax of jax.nn": lambda x: (jax.nn.softmax(x), jax.nn.log_softmax(x)),
    "softplus of jax.nn": jax.nn.softplus,
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=-1),
    "lgamma": lax.lgamma,
    "digamma": lax.digamma,
    "nextafter": lambda x: jnp.nextafter(x, 0.0),
    "bits of numbers": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "random numbers of a known key": lambda x: (
        x + jax.random.normal(jax.random.fold_in(jax.random.key(0), 7), (6,))
    ),
    "random": lambda x: jax.random.bernoulli(
        jnp.abs(x[0, :2]).astype(jnp.uint32), 0.5, (6,)
    ),  # of a key that is an input
    "one_hot": lambda x: jax.nn.one_hot(jnp.argmax(x, 1), 6),
}

BINARY = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "rem": lambda x, y: lax.rem(5 * x, y),
    "mod": lambda x, y: jnp.mod(5 * x, y),
    "pow": lambda x, y: jnp.abs(x) ** y,
    "atan2": jnp.arctan2,
    "max": lambda x, y: jnp.maximum(x, jnp.log(y)),  # nan wins
    "min": lambda x, y: jnp.minimum(x, jnp.log(y)),
    "comparisons": lambda x, y: (x < y, x <= y, x > y, x >= y, x == y, x != y),
    "logic": lambda x, y: ((x > 0) & (y > 0), (x > 0) | (y > 0), (x > 0) ^ (y > 0), ~(x > 0)),
    "where": lambda x, y: jnp.where(x > y, x, 2.0),
    "select by number": lambda x, y: lax.select_n(
        jnp.clip(jnp.round(x + 1), 0, 2).astype(int), x, y, x + y
    ),
    "logaddexp": jnp.logaddexp,
    "stop_gradient": lambda x, y: lax.stop_gradient(x) + y,
    "broadcasting": lambda x, y: x[:, :, None] + y[:, None, :] + jnp.arange(6.0),
    "outer broadcasting": lambda x, y: x[:, None] - y[None],  # (B, B, 6)
}

INTEGERS = {
    "integer arithmetic": lambda i, j: (i + j, i - j, i * j, -i, jnp.abs(i), jnp.sign(i), i**3),
    "integer division": lambda i, j: (lax.div(i, j), i // j),  # one truncates, one floors
    "integer remainder": lambda i, j: (lax.rem(i, j), i % j),
    "integer comparisons": lambda i, j: (
        i < j,
        i == j,
        jnp.maximum(i, j),
        jnp.minimum(i, j),
        jnp.clip(i, -3, 3),
    ),
    "bits": lambda i, j: (i & j, i | j, i ^ j, ~i),
    "shifts": lambda i, j: (
        i << 3,
        i >> 2,
        lax.shift_right_logical(i, 2),
        i.astype(jnp.uint32) >> 3,
    ),
    "population_count": lambda i, j: lax.population_count(i),
    "integers of numbers too large": lambda i, j: [
        (i * 1e9).astype(t) for t in ("int8", "uint8", "int16", "int32", "uint32")
    ],
    "small integers": lambda i, j: (
        i.astype(jnp.uint8) * 7,
        i.astype(jnp.int8) + j.astype(jnp.int8),
    ),
    "integers and numbers": lambda i, j: (
        i / j,
        (i * 0.37).astype(int),
        i.astype(bool),
        (i > 0).astype(jnp.float32) * 0.5,
    ),
    "integer reductions": lambda i, j: (
        i.sum(1),
        i.max(1),
        i.prod(1),
        i.argmax(1),
        (i > 0).any(1),
        (i > -9).all(1),
    ),
    "integer product": lambda i, j: i @ jnp.arange(12).reshape(6, 2),
    "integer sort": lambda i, j: (jnp.sort(i, axis=1), jnp.argsort(i % 3, axis=1)),
    "integer cumsum": lambda i, j: (jnp.cumsum(i, axis=1), lax.cummax(i, axis=1)),
    "half precision": lambda i, j: (i.astype(jnp.bfloat16) * 0.5 + 1).astype(jnp.float32),
}

ALONG = {
    "reductions": lambda x: (
        x.sum(1),
        x.mean((1, 2)),
        x.max(2),
        x.min((1, 2)),
        x.prod(1),
        x.var(1),
        x.std((0, 1)),
    ),
    "any and all": lambda x: ((x > 0).any(1), (x > -1).all(2)),
    "argmax": lambda x: (x.argmax(1), jnp.round(x).argmax(2)),  # of equal numbers the first
    "argmin": lambda x: (x.argmin(1), jnp.round(x).argmin(2)),
    "cumsum": lambda x: (jnp.cumsum(x, axis=1), lax.cumsum(x, axis=2, reverse=True)),
    "cumprod": lambda x: (jnp.cumprod(x, axis=1), lax.cumprod(x, axis=2, reverse=True)),
    "cummax": lambda x: (lax.cummax(x, axis=1), lax.cummax(x, axis=2, reverse=True)),
    "cummin": lambda x: (lax.cummin(x, axis=1), lax.cummin(x, axis=2, reverse=True)),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, axis=2),
    "sort": lambda x: (jnp.sort(x, axis=1), jnp.sort(x, axis=2, descending=True)),
    "argsort": lambda x: jnp.argsort(jnp.round(x), axis=1),
    "sort by two keys": lambda x: lax.sort(
        (jnp.round(x), jnp.round(3 * x), x), dimension=2, num_keys=2
    ),
    "median": lambda x: jnp.median(x, axis=2),
    "top_k": lambda x: lax.top_k(x, 3),
    "pad": lambda x: (
        jnp.pad(x, ((0, 0), (1, 2), (0, 1)), constant_values=7),
        jnp.pad(x, ((0, 0), (1, 1), (2, 0)), mode="edge"),
    ),
    "pad, negative": lambda x: lax.pad(x, 1.5, ((0, 0, 0), (-1, 2, 0), (1, -2, 0))),
    "pad, interior": lambda x: lax.pad(x, 1.5, ((0, 0, 0), (1, 0, 1), (0, -1, 2))),
    "slice": lambda x: (x[:, 1:3], x[:, ::2, 1::3], x[:, -2:], x[:, 1], x[:, 1, 2]),
    "rev": lambda x: (x[:, ::-1], jnp.flip(x, (1, 2))),
    "roll": lambda x: jnp.roll(x, 2, axis=2),
    "concatenate": lambda x: (
        jnp.concatenate([x, x * 2], 1),
        jnp.concatenate([x, x], 0),
        jnp.stack([x, x], 1),
    ),
    "split": lambda x: (jnp.split(x, 3, axis=2), jnp.unstack(x, axis=1)),
    "reshape": lambda x: (
        x.reshape(x.shape[0], -1),
        x.reshape(-1, 6),
        x.reshape(x.shape[0] * 2, 12),
        x.ravel(),
    ),
    "transpose": lambda x: (x.transpose(0, 2, 1), x.T, jnp.moveaxis(x, 0, 1)),
    "squeeze": lambda x: (
        x[:, :1].squeeze(1),
        x[:, :1, None].squeeze((1, 2)),
        jnp.expand_dims(x, (1, 3)),
    ),
    "broadcast": lambda x: (
        jnp.broadcast_to(x[:, :1], x.shape),
        jnp.repeat(x, 2, axis=1),
        jnp.tile(x, (1, 2, 1)),
    ),
    "iota": lambda x: (
        jnp.arange(6) + x,
        jnp.arange(x.shape[0]),
        jnp.ones((x.shape[0], 2)),
        x.shape[0] * x,
        jnp.eye(4) @ x,
    ),
    "fft": lambda x: jnp.abs(jnp.fft.rfft(x)),
    "cholesky": lambda x: jnp.linalg.cholesky(x @ jnp.swapaxes(x, 1, 2) + jnp.eye(4)),
    "diagonal": lambda x: (jnp.tril(x), jnp.trace(x, axis1=1, axis2=2)),
}

PRODUCT = weights(6, 5)

PRODUCTS = {
    "product": lambda x, y: x @ PRODUCT,
    "product of vectors": lambda x, y: (x[:, 0] @ PRODUCT + 1, jnp.dot(x, PRODUCT[:, 0])),
    "product of batches": lambda x, y: x @ y,
    "product, transposed": lambda x, y: (
        jnp.einsum("bik,bjk->bij", x, x),
        jnp.einsum("bki,bkj->bji", x, x),
    ),
    "product over two axes": lambda x, y: (
        jnp.einsum("bij,bji->b", x, y),
        jnp.tensordot(x, jnp.ones((4, 6, 2)), 2),
    ),
    "product of all": lambda x, y: (
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
    "index of a table": lambda x, ids: jnp.asarray(PRODUCT)[ids],
    "index by two lists": lambda x, ids: (
        x[:, jnp.array([0, 1]), jnp.array([2, 3])],
        x[jnp.arange(x.shape[0]), ids[:, 0]],
    ),
    "gather of windows": lambda x, ids: jax.vmap(
        lambda a, i: lax.dynamic_slice(a, (i[0], i[1]), (2, 3))
    )(x, ids),
    "dynamic_slice": lambda x, ids: lax.dynamic_slice(x, (0, ids[0, 0], 5), (1, 2, 3)),
    "dynamic_update_slice": lambda x, ids: lax.dynamic_update_slice(
        x, jnp.ones((1, 2, 2)), (0, ids[0, 0], 3)
    ),
    "set": lambda x, ids: (
        x.at[:, 1].set(3.0),
        x.at[:, ids[0], 2].set(5.0),
        x.at[:, 1:3, ::2].set(0),
    ),
    "set, dropped": lambda x, ids: x.at[:, jnp.array([0, 9])].set(1.0),
    "subtract at": lambda x, ids: x.at[:, ids[0]].subtract(1.0),
    "add at": lambda x, ids: (
        x.at[:, ids[0]].add(1.0),
        x.at[jnp.arange(x.shape[0])[:, None], ids].add(x[:, :2]),
    ),
    "multiply at": lambda x, ids: x.at[:, ids[0]].multiply(2.0),
    "max and min at": lambda x, ids: (x.at[:, ids[0]].max(0.1), x.at[:, ids[0]].min(0.1)),
    "segment_sum": lambda x, ids: jax.ops.segment_sum(x[0], jnp.array([0, 2, 0, 1]), 3),
    "bincount": lambda x, ids: jnp.zeros(6).at[ids.ravel()].add(1.0),
}


def convolution(shape, dims, **kwargs):
    """A plain convolution with fresh weights, of the input as it is or reshaped."""
    kernel = weights(*shape)
    return lambda x, **given: lax.conv_general_dilated(x, kernel, dimension_numbers=dims, **kwargs)


IMAGE, WIDE = ("NHWC", "HWIO", "NHWC"), {"window_strides": (1, 1), "padding": "SAME"}
ODD = {"window_strides": (1, 1), "padding": ((1, 0), (3, 1))}

CONVOLUTIONS = {
    "conv": convolution((3, 3, 4, 5), IMAGE, **WIDE),
    "conv, dilated and grouped": convolution(
        (3, 2, 2, 6), IMAGE, **WIDE, rhs_dilation=(2, 1), feature_group_count=2
    ),
    "conv, spread": convolution((3, 2, 4, 5), IMAGE, **ODD, lhs_dilation=(2, 3)),
    "conv, spread and grouped": convolution(
        (3, 3, 2, 6), IMAGE, **ODD, lhs_dilation=(2, 2), feature_group_count=2
    ),
    "conv, spread and strided": convolution(
        (3, 3, 4, 5), IMAGE, **ODD | {"window_strides": (2, 2)}, lhs_dilation=(3, 3)
    ),
    "conv, channels first": convolution((5, 6, 3, 3), ("NCHW", "OIHW", "NHWC"), **WIDE),
    "conv of one axis": lambda x: convolution_1d(x[:, 0]),
    "conv of three axes": lambda x: convolution_3d(x[..., None]),
    "conv of batches in groups": lambda x: lax.conv_general_dilated(
        jnp.concatenate([x, x + 1]),
        KERNEL,
        (1, 1),
        "SAME",
        dimension_numbers=IMAGE,
        batch_group_count=2,
    ),
    "conv with made weights": lambda x: lax.conv_general_dilated(
        x, KERNEL * x.mean(), (1, 1), ODD["padding"], dimension_numbers=IMAGE, lhs_dilation=(2, 2)
    ),
    "windows of maxima": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 3, 2, 1), (1, 2, 1, 1), "SAME"
    ),
    "windows of minima": lambda x: lax.reduce_window(
        x, jnp.inf, lax.min, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    ),
    "windows of sums": lambda x: lax.reduce_window(
        x, 0.0, lax.add, (1, 3, 2, 1), (1, 2, 1, 1), "SAME"
    ),
    "windows, dilated": lambda x: lax.reduce_window(
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
    """The square root, until it changes no more."""

    def step(state):
        y, i = state
        return (y + jnp.abs(x) / y) / 2, i + 1

    return lax.while_loop(lambda state: state[1] < 8, step, (jnp.ones_like(x), 0))


def grown(state):
    total, x, rounds = state
    return total + jnp.abs(x).sum(0), x * 1.5, rounds + 1


def recurrent(x):
    """A recurrent layer over the second axis."""

    def step(h, row):
        h = jnp.tanh(row + h @ SQUARE)
        return h, h.sum(-1)

    return lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.moveaxis(x, 1, 0))


SQUARE = weights(6, 6)

CONTROL = {
    "while": newton,
    "while, by what it sums": lambda x: lax.while_loop(
        lambda s: s.sum() < 50, lambda s: s + jnp.abs(x) + 1, jnp.zeros_like(x)
    ),
    "while of each example": jax.vmap(
        lambda x: lax.while_loop(lambda s: s[0].sum() < 9, grown, (jnp.zeros(6), x, 0))
    ),
    "fori_loop of each example": jax.vmap(
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
