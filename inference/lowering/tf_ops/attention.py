"""Multi-head attention as matrix products, since TFLite has no op for it."""

import math

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.indexing import size_of
from inference.lowering.tf_ops.layers import linear
from inference.lowering.tf_ops.pending import folds, is_constant, resolved

LOWEST = np.finfo(np.float32).min


@folds
def attention(target, params, x, context=None, *, heads, causal, mask):
    """x, (B, T, D), attends to the context, (B, S, D)."""
    context = x if context is None else context
    dim = params["query"]["weight"].shape[-1]
    scale = np.float32(1 / math.sqrt(dim // heads))
    query = {name: array * scale for name, array in params["query"].items()}
    q, k, v = (
        split_heads(resolved(linear(target, layer, source)), heads)
        for layer, source in ((query, x), (params["key"], context), (params["value"], context))
    )
    scores = masked(tf.matmul(q, k, transpose_b=True), causal, mask)  # (B, H, T, S)
    y = tf.transpose(tf.matmul(tf.nn.softmax(scores), v), (0, 2, 1, 3))
    return linear(target, params["out"], tf.reshape(y, sizes_of(x)))


def split_heads(x, heads):
    """(B, T, D) -> (B, H, T, D / H)."""
    *sizes, dim = sizes_of(x)
    return tf.transpose(tf.reshape(x, (*sizes, heads, dim // heads)), (0, 2, 1, 3))


def sizes_of(x):
    """The shape of x for tf.reshape, in which the size of the batch need not be computed."""
    return [-1, *(size_of(x, axis) for axis in range(1, len(x.shape)))]


def earlier(scores):
    """Whether a key is not after a query: (T, S)."""
    if None not in scores.shape[-2:]:
        return np.tril(np.ones(scores.shape[-2:], bool))
    rows = tf.reshape(tf.range(size_of(scores, 2)), (-1, 1))
    return rows >= tf.reshape(tf.range(size_of(scores, 3)), (1, -1))


def masked(scores, causal, mask, lowest=LOWEST):
    """The scores with the lowest number at masked positions."""
    if causal:
        past = earlier(scores)  # (T, S)
        combine = np.logical_and if is_constant(mask, past) else tf.logical_and
        mask = past if mask is None else combine(past, mask)
    return scores if mask is None else tf.where(mask, scores, np.float32(lowest))


def weighted_mean(target, q, k, v, mask, bias, *, causal, scale, lowest):
    """Attention without its projections, of (batch, position, head, feature)."""
    q, k, v = (tf.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))
    scores = tf.matmul(q * np.float32(scale), k, transpose_b=True)  # (B, H, T, S)
    scores = scores if bias is None else scores + bias
    y = tf.matmul(tf.nn.softmax(masked(scores, causal, mask, lowest)), v)
    return tf.transpose(y, (0, 2, 1, 3))


LAYERS = {"attention": attention, "weighted_mean": weighted_mean}
