"""Multi-head attention as matrix products, since TFLite has no op for it."""

import math

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.indexing import size_of
from inference.lowering.tf_ops.layers import linear
from inference.lowering.tf_ops.pending import folds, is_constant, resolved


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
    scores = tf.matmul(q, k, transpose_b=True)  # (B, H, T, S)
    if causal:
        past = earlier(x, context)  # (T, S)
        combine = np.logical_and if is_constant(mask, past) else tf.logical_and
        mask = past if mask is None else combine(past, mask)
    if mask is not None:
        scores = tf.where(mask, scores, np.finfo(np.float32).min)
    y = tf.transpose(tf.matmul(tf.nn.softmax(scores), v), (0, 2, 1, 3))
    return linear(target, params["out"], tf.reshape(y, sizes_of(x)))


def split_heads(x, heads):
    """(B, T, D) -> (B, H, T, D / H)."""
    *sizes, dim = sizes_of(x)
    return tf.transpose(tf.reshape(x, (*sizes, heads, dim // heads)), (0, 2, 1, 3))


def sizes_of(x):
    """The shape of x for tf.reshape, in which the size of the batch need not be computed."""
    return [-1, *(size_of(x, axis) for axis in range(1, len(x.shape)))]


def earlier(x, context):
    """Whether a position of the context is not after one of x: (T, S)."""
    length, context_length = x.shape[1], context.shape[1]
    if length is not None and context_length is not None:
        return np.tril(np.ones((length, context_length), bool))
    rows = tf.reshape(tf.range(size_of(x, 1)), (-1, 1))
    return rows >= tf.reshape(tf.range(size_of(context, 1)), (1, -1))


LAYERS = {"attention": attention}
