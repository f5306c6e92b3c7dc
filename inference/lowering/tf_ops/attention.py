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


def earlier(queries, keys):
    """Whether a key is not after a query: (T, S), of these sizes."""
    if not any(map(tf.is_tensor, (queries, keys))):
        return np.tril(np.ones((queries, keys), bool))
    return tf.reshape(tf.range(queries), (-1, 1)) >= tf.reshape(tf.range(keys), (1, -1))


def masked(scores, causal, mask, lowest=LOWEST, sizes=None):
    """The scores with the lowest number at masked positions; `sizes` are their last two."""
    if causal:
        past = earlier(*(sizes or (size_of(scores, 2), size_of(scores, 3))))
        combine = np.logical_and if is_constant(mask, past) else tf.logical_and
        mask = past if mask is None else combine(past, mask)
    return scores if mask is None else tf.where(mask, scores, np.float32(lowest))


def weighted_mean(target, q, k, v, mask, bias, *, causal, scale, lowest):
    """Attention without its projections, of (batch, position, head, feature)."""
    sizes = free_sizes(target)
    q, k, v = (tf.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))
    scores = tf.matmul(q * np.float32(scale), k, transpose_b=True)  # (B, H, T, S)
    scores = scores if bias is None else scores + bias
    y = tf.matmul(tf.nn.softmax(masked(scores, causal, mask, lowest, sizes)), v)
    return tf.transpose(y, (0, 2, 1, 3))


def free_sizes(target):
    """The numbers of queries and keys. Free ones are computed from the file's inputs, so that all
    layers share that."""
    queries, keys, *_ = target.operand_shapes
    return target.size(queries[1]), target.size(keys[1])


def attend(target, q, k, v, mask, *, causal):
    """`weighted_mean`, in which several heads of queries may share one head of keys."""
    (batch, length, heads, dim), (_, context, groups, _), *_ = target.operand_shapes
    scale = np.float32(1 / math.sqrt(dim))
    if heads == groups:
        options = {"causal": causal, "scale": scale, "lowest": LOWEST}
        return weighted_mean(target, q, k, v, mask, None, **options)
    shared = heads // groups

    def reshape(x, *shape):
        return tf.reshape(x, target.new_sizes(shape))

    # The queries of one group are the rows of one matrix.
    q = tf.transpose(reshape(q * scale, batch, length, groups, shared, dim), (0, 2, 3, 1, 4))
    q = reshape(q, batch, groups, shared * length, dim)
    scores = tf.matmul(q, tf.transpose(k, (0, 2, 1, 3)), transpose_b=True)
    if causal or mask is not None:
        scores = reshape(scores, batch, heads, length, context)
        scores = masked(scores, causal, mask, sizes=free_sizes(target))
        scores = reshape(scores, batch, groups, shared * length, context)
    y = tf.matmul(tf.nn.softmax(scores), tf.transpose(v, (0, 2, 1, 3)))
    y = tf.transpose(reshape(y, batch, groups, shared, length, dim), (0, 3, 1, 2, 4))
    return reshape(y, batch, length, heads, dim)


def write(target, cache, new, where):
    """The cache, (B, K, S, D), with one token of each text, (B, 1, K, D), at a place, (B, 1)."""
    here = tf.equal(tf.range(target.operand_shapes[0][2]), where)  # (B, S)
    new = tf.transpose(tf.cast(new, cache.dtype), (0, 2, 1, 3))
    return tf.where(here[:, None, :, None], new, cache)


LAYERS = {
    "attention": attention,
    "attend": attend,
    "weighted_mean": weighted_mean,
    "write": write,
}
