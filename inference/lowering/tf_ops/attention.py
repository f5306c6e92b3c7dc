"""Multi-head attention as matrix products, since TFLite has no op for it."""

import math

import numpy as np
import tensorflow as tf

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
    return linear(target, params["out"], tf.reshape(y, (-1, *x.shape[1:-1], dim)))


def split_heads(x, heads):
    """(B, T, D) -> (B, H, T, D / H)."""
    return tf.transpose(tf.reshape(x, (-1, x.shape[1], heads, x.shape[2] // heads)), (0, 2, 1, 3))


def masked(scores, causal, mask, lowest=LOWEST):
    """The scores with the lowest number at masked positions."""
    if causal:
        past = np.tril(np.ones(scores.shape[-2:], bool))  # (T, S)
        combine = np.logical_and if is_constant(mask) else tf.logical_and
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
