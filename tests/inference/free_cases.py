"""Functions of inputs whose free sizes are more than the batch, for both op tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from model.layers.attention import attend, attention, attention_init, rotary, rotation
from model.layers.conv import conv2d, conv2d_init, conv_transpose2d, conv_transpose2d_init
from model.layers.norm import group_norm
from model.layers.pool import avg_pool, global_avg_pool, max_pool
from model.layers.recurrent import gru, gru_init, lstm, lstm_init
from tests.inference.layer_cases import grouped, heads
from tests.inference.made import learned, scale_and_bias, weights

PLAINLY = {"xla_backend_optimization_level": 0}
ATTENTION = learned(attention_init, 8)
PLAIN, DEPTHWISE = learned(conv2d_init, 4, 6, 3), learned(conv2d_init, 4, 4, 3, groups=4)
UP, NORM = learned(conv_transpose2d_init, 4, 6, 3), scale_and_bias(4)
LSTM, GRU = learned(lstm_init, 8, 4), learned(gru_init, 8, 4)
KERNEL = weights(3, 2, 4, 5)


def halves(x):
    """Two sizes that a division of a negative number rounds in different directions."""
    count = -(-x.shape[1] // 2)
    return x[:, :count].sum((1, 2)) / count


def lengths(x):
    """How many steps of each sequence count: 2, or more than it has."""
    return jnp.where(x[:, 0, 0] > 0, 99, 2)


def steps_after_first(x):
    return x[:, 1:].swapaxes(0, 1)


def first_and_last(x):
    order = jnp.argsort(x.sum(-1), axis=1)
    return jnp.take_along_axis(x, order[..., None], axis=1)


SEQUENCES = {
    "attention": lambda x: attention(ATTENTION, x, heads=2),
    "attention, causal": lambda x: attention(ATTENTION, x, heads=4, causal=True),
    "causal, to a context": lambda x: attention(ATTENTION, x, x[:, 1:], heads=2, causal=True),
    "attend": lambda x: attend(heads(x, 2), heads(x, 2), heads(x, 2), causal=True),
    "attend, one key for two queries": lambda x: attend(*grouped(x, x), causal=True),
    "rotary": lambda x: rotary(heads(x, 2), rotation(jnp.arange(x.shape[1]), 4)),
    "lstm, masked": lambda x: lstm(LSTM, x, lengths(x)),
    "gru, masked, backwards": lambda x: gru(GRU, x, lengths(x), reverse=True),
    "positions": lambda x: x + jnp.arange(x.shape[1])[:, None] / x.shape[1],
    "halves": halves,
    "sorted rows": first_and_last,
    "products": lambda x: jnp.einsum("btd,bsd->bts", x, x[:, ::2]),
    "scan over the steps": lambda x: jax.lax.scan(
        lambda total, row: (total + row, total * row), x[:, 0], jnp.moveaxis(x, 1, 0)
    )[1],
    "dilated": lambda x: jax.lax.conv_general_dilated(
        x, jnp.ones((3, 8, 2)), (1,), ((1, 2),), (2,), (2,), ("NWC", "WIO", "NWC")
    ),
    "strided": lambda x: jax.lax.conv_general_dilated(
        x, jnp.ones((4, 8, 2)), (3,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    ),
}
IMAGES = {
    "conv2d": lambda x: conv2d(PLAIN, x),
    "conv2d, strided": lambda x: conv2d(PLAIN, x, stride=(2, 3)),
    "conv2d, padded": lambda x: conv2d(PLAIN, x, stride=2, padding=1),
    "conv2d, depthwise": lambda x: conv2d(DEPTHWISE, x, stride=2),
    "conv_transpose2d": lambda x: conv_transpose2d(UP, x, stride=2),
    "max_pool": lambda x: max_pool(x, 2),
    "max_pool, SAME": lambda x: max_pool(x, 3, stride=2, padding="SAME"),
    "avg_pool, SAME": lambda x: avg_pool(x, 3, stride=2, padding="SAME"),
    "avg_pool, padded": lambda x: avg_pool(x, 3, stride=2, padding=1),
    "group_norm": lambda x: group_norm(NORM, x, groups=2),
    "global_avg_pool": lambda x: global_avg_pool(conv2d(PLAIN, x)),
    "jax.lax, strided and dilated": lambda x: jax.lax.conv_general_dilated(
        x, KERNEL, (2, 3), "SAME", rhs_dilation=(2, 1), dimension_numbers=("NHWC", "HWIO", "NHWC")
    ),
    "as rows": lambda x: x.reshape(x.shape[0], -1, 4) @ jnp.ones((4, 2)),
}
NO_STEPS = {
    "scan": lambda x: jax.lax.scan(
        lambda total, row: (total + row, (total * row, row > 0)), x[:, 0], steps_after_first(x)
    ),
    "nested": lambda x: jax.lax.scan(
        lambda total, row: (
            total - row,
            jax.lax.scan(lambda c, y: (c * y, c), row, steps_after_first(x), reverse=True),
        ),
        x[:, 0],
        steps_after_first(x),
    ),
    "map": lambda x: jax.lax.map(lambda row: row / 2, x.swapaxes(0, 1), batch_size=4),
    "while": lambda x: jax.lax.fori_loop(0, x.shape[1] - 1, lambda i, c: c / 2 + i, x[:, 0]),
    "lstm": lambda x: lstm(LSTM, x[:, 1:], reverse=True),
    "gru": lambda x: gru(GRU, x[:, 1:]),
    "reductions": lambda x: [
        ((x[:, 1:] > 0).any(1), (x[:, 1:] > 0).all(1), (9 * x[:, 1:]).astype(int).prod(1))
    ],
}
# {group: (its cases, the shape of one example, its free sizes, two choices of all sizes)}
FREE = {
    "sequences": (SEQUENCES, (6, 8), ["1:length:2-"], [(3, 5, 8), (2, 8, 8)]),
    "no steps": (NO_STEPS, (6, 8), ["1:length"], [(3, 5, 8), (2, 1, 8)]),
    "images": (IMAGES, (8, 8, 4), ["1:height", "2:width"], [(3, 7, 10, 4), (2, 12, 9, 4)]),
}


def together(cases):
    """All cases as one function (weights, x) -> {case: result}."""
    return lambda _, x: {name: case(x) for name, case in cases.items()}


@functools.cache
def jax_results(group, shape):
    """(inputs of this shape, JAX's results), compiled without optimization, which takes longer."""
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    function = jax.jit(together(FREE[group][0]), compiler_options=PLAINLY)
    return x, jax.tree.map(np.asarray, function(None, x))
