"""Every activation and layer: functions of a batch of examples."""

import numpy as np

from model.layers import activations
from model.layers.attention import attend, attention, attention_init, rotary, rotation
from model.layers.conv import conv2d, conv2d_init, conv_transpose2d, conv_transpose2d_init
from model.layers.embedding import embedding, unembedding
from model.layers.linear import linear, linear_init, linears
from model.layers.norm import by_statistics, group_norm, layer_norm, rms_norm
from model.layers.pool import avg_pool, global_avg_pool, global_max_pool, max_pool
from model.layers.recurrent import gru, gru_init, lstm, lstm_init
from tests.inference.made import learned, scale_and_bias, weights

ACTIVATIONS = {
    "relu": activations.relu,
    "leaky_relu": activations.leaky_relu,
    "leaky_relu with a slope": lambda x: activations.leaky_relu(x, 0.3),
    "elu": activations.elu,
    "elu with an alpha": lambda x: activations.elu(x, 0.7),
    "gelu": activations.gelu,
    "gelu_tanh": activations.gelu_tanh,
    "sigmoid": activations.sigmoid,
    "silu": activations.silu,
    "hard_sigmoid": activations.hard_sigmoid,
    "hard_swish": activations.hard_swish,
    "tanh": activations.tanh,
    "softplus": activations.softplus,
    "mish": activations.mish,
    "softmax": activations.softmax,
    "log_softmax": activations.log_softmax,
}

LINEAR, PLAIN_LINEAR = learned(linear_init, 8, 5), learned(linear_init, 8, 5, bias=False)
NORM = scale_and_bias(8)
STATISTICS = {"mean": weights(8), "var": np.abs(weights(8)) + 0.5}
ATTENTION = learned(attention_init, 8)
CROSS = learned(attention_init, 8, context_dim=6)

TABLE = weights(5, 8)
LSTM, GRU = learned(lstm_init, 8, 4), learned(gru_init, 8, 4)


def heads(x, count):
    return x.reshape(*x.shape[:2], count, -1)


def grouped(x, context):
    """Queries of 4 heads, and keys and values of 2."""
    return heads(x, 4), heads(context[..., ::2], 2), heads(context[..., 1::2], 2)


SEQUENCES = {
    "linear": lambda x, *_: linear(LINEAR, x),
    "linear of vectors": lambda x, *_: linear(LINEAR, x[:, 0]),
    "linear without bias": lambda x, *_: linear(PLAIN_LINEAR, x),
    "layer_norm": lambda x, *_: layer_norm(NORM, x),
    "rms_norm": lambda x, *_: rms_norm(NORM, x),
    "attention": lambda x, *_: attention(ATTENTION, x, heads=2),
    "attention, causal": lambda x, *_: attention(ATTENTION, x, heads=2, causal=True),
    "attention with a mask": lambda x, _, mask, *__: attention(ATTENTION, x, heads=2, mask=mask),
    "attention, causal with a mask": lambda x, _, mask, *__: attention(
        ATTENTION, x, heads=2, causal=True, mask=mask
    ),
    "attention to a context": lambda x, context, *_: attention(CROSS, x, context, heads=4),
    "attend": lambda x, *_: attend(heads(x, 2), heads(x[..., ::-1], 2), heads(x, 2), causal=True),
    "attend, one key for two queries": lambda x, *_: attend(*grouped(x, x)),
    "attend, the same, causal": lambda x, *_: attend(*grouped(x, x), causal=True),
    "attend, the same, with a mask": lambda x, _, mask, *__: attend(*grouped(x, x), mask),
    "attend, the same, both": lambda x, _, mask, *__: attend(
        *grouped(x, x), mask.repeat(4, axis=1), causal=True
    ),
    "attend, a step": lambda x, _, mask, *__: attend(*grouped(x[:, :1], x), mask[:, :, :1]),
    "rotary": lambda x, *_: rotary(heads(x, 2), rotation(np.arange(5), 4)),
    "lstm": lambda x, *_: lstm(LSTM, x),
    "lstm, reverse with lengths": lambda x, _, __, ids: lstm(LSTM, x, ids[:, 0], reverse=True),
    "gru": lambda x, *_: gru(GRU, x, reverse=True),
    "gru with lengths": lambda x, _, __, ids: gru(GRU, x, ids[:, 1]),
    "linears": lambda x, *_: linears([LINEAR, PLAIN_LINEAR], x),
    "unembedding": lambda x, *_: unembedding({"weight": TABLE}, x),
    "embedding": lambda _, __, ___, ids: embedding({"weight": LINEAR["weight"]}, ids),
}


def conv(*args, transposed=False, groups=1, **kwargs):
    """A convolution with new weights."""
    if transposed:
        params = learned(conv_transpose2d_init, *args)
        return lambda x: conv_transpose2d(params, x, **kwargs)
    params = learned(conv2d_init, *args, groups=groups)
    return lambda x: conv2d(params, x, **kwargs)


NORM4, STATISTICS4 = scale_and_bias(4), {"mean": weights(4), "var": np.abs(weights(4)) + 0.5}

IMAGES = {
    "conv2d": conv(4, 6, 3),
    "conv2d, strided": conv(4, 6, 3, stride=2),
    "conv2d, even kernel": conv(4, 6, 2, stride=(1, 2)),
    "conv2d, valid": conv(4, 6, (3, 2), padding="VALID"),
    "conv2d, padded": conv(4, 6, 3, padding=((2, 0), (1, 3))),
    "conv2d, dilated": conv(4, 6, 3, dilation=2),
    "conv2d, grouped": conv(4, 6, 3, groups=2),
    "conv2d, depthwise": conv(4, 8, 3, groups=4),
    "conv2d, 1x1": conv(4, 6, 1),
    "conv2d, 1x1 strided": conv(4, 6, 1, stride=2),
    "conv2d, patches": conv(4, 6, 2, stride=2, padding="VALID"),
    "conv_transpose2d": conv(4, 6, 3, transposed=True, stride=2),
    "conv_transpose2d, valid": conv(4, 6, 3, transposed=True, stride=2, padding="VALID"),
    "conv_transpose2d, padded": conv(
        4, 6, 3, transposed=True, stride=(2, 1), padding=((1, 0), (2, 3))
    ),
    "max_pool": lambda x: max_pool(x, 2),
    "max_pool, overlapping": lambda x: max_pool(x, 3, stride=2, padding="SAME"),
    "avg_pool": lambda x: avg_pool(x, 2),
    "avg_pool, padded": lambda x: avg_pool(x, 3, stride=2, padding=1),
    "global_max_pool": global_max_pool,
    "global_avg_pool": global_avg_pool,
    "group_norm": lambda x: group_norm(NORM4, x, groups=2),
    "batch_norm": lambda x: by_statistics(NORM4, STATISTICS4, x, eps=1e-5),
}
