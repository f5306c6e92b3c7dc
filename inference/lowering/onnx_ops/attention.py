"""Attention, as one node or in its parts."""

import math

import numpy as np

from inference.lowering.dims import is_number
from inference.lowering.onnx_ops.activations import in_result_type
from inference.lowering.onnx_ops.graph import stored_type
from inference.lowering.value import Value, constant


def attention(t, params, x, context=None, *, heads, causal, mask):
    context = x if context is None else context
    # the Attention node gives nan where a mask leaves nothing to attend to
    if t.opset >= 23 and mask is None:
        q, k, v = (project(t, params[name], source) for name, source in sources(x, context))
        y = t.Attention(q, k, v, q_num_heads=heads, kv_num_heads=heads, is_causal=int(causal))
    else:
        y = in_parts(t, params, x, context, heads, causal, mask)
    return project(t, params["out"], y)


def sources(x, context):
    return [("query", x), ("key", context), ("value", context)]


def in_parts(t, params, x, context, heads, causal, mask):
    """Attention without the output projection; the scale is folded into the query's weights."""
    width = params["query"]["weight"].shape[-1]
    params = params | {"query": scaled(t, params["query"], math.sqrt(heads / width))}

    def split_heads(name, source, order):
        shape = (*source.shape[:2], heads, width // heads)
        return t.transpose(t.reshape(project(t, params[name], source), shape), order)

    orders = [(0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)]  # the keys are transposed as well
    q, k, v = (
        split_heads(name, source, order)
        for (name, source), order in zip(sources(x, context), orders, strict=True)
    )
    scores = masked(t, t.MatMul(q, k), x.shape[1], context.shape[1], causal, mask)  # (B, H, T, S)
    y = t.transpose(t.MatMul(t.Softmax(scores, axis=-1), v), (0, 2, 1, 3))
    return t.reshape(y, x.shape)


def scaled(t, params, scale):
    """The params of a linear layer whose result is multiplied by a number."""
    if all(value.constant for value in params.values()):
        return {
            name: constant((value.data * scale).astype(value.dtype), value.name)
            for name, value in params.items()
        }
    by = np.asarray(scale, t.out[0].dtype)
    return {
        name: Value(t.Mul(value, by), value.shape, value.dtype) for name, value in params.items()
    }


def project(t, params, x):
    y = t.MatMul(x, params["weight"])
    return t.Add(y, params["bias"]) if "bias" in params else y


def masked(t, scores, length, context_length, causal, mask, lowest=None):
    """The scores with the lowest number, or another one, at masked positions."""
    if causal:
        past = earlier(t, length, context_length)
        mask = past if mask is None else t.And(past, mask)
    if mask is None:
        return scores
    lowest = np.finfo(stored_type(t.out[0].dtype)).min if lowest is None else lowest
    return t.Where(mask, scores, float(lowest))


def earlier(t, length, context_length):
    """Whether a position of the context is not after one of x: (T, S)."""
    if is_number(length) and is_number(context_length):
        return constant(np.tril(np.ones((length, context_length), bool)))
    rows, columns = (
        t.Range(np.int64(0), t.Squeeze(t.size(size), np.array([0])), np.int64(1))
        for size in (length, context_length)
    )
    return t.GreaterOrEqual(t.Unsqueeze(rows, np.array([1])), columns)


def weighted_mean(t, q, k, v, mask, bias, *, causal, scale, lowest):
    """Attention without its projections, of (batch, position, head, feature)."""
    if t.opset >= 23 and mask is None:
        q, k, v = (t.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))
        y = t.Attention(q, k, v, bias, scale=scale, is_causal=int(causal))
        return t.transpose(y, (0, 2, 1, 3))
    lengths = q.shape[1], k.shape[1]
    scores = product(t, t.transpose(q, (0, 2, 1, 3)), k, scale)  # (B, H, T, S)
    scores = scores if bias is None else t.Add(scores, bias)
    scores = masked(t, scores, *lengths, causal, mask, lowest)
    y = t.MatMul(t.Softmax(scores, axis=-1), t.transpose(v, (0, 2, 1, 3)))
    return t.transpose(y, (0, 2, 1, 3))


def product(t, q, k, scale):
    """The scaled product of queries, (B, K, T, D), and keys, (B, S, K, D). ONNX Runtime computes it
    in one node, with the transposition of the keys' last two axes."""
    q = q if scale == 1 else t.Mul(q, float(scale))
    return t.MatMul(q, t.transpose(k, (0, 2, 3, 1)))


def write(t, cache, new, where):
    """The cache, (B, K, S, D), with T new tokens, (B, T, K, D), at positions, (B, T)."""
    (_, heads, _, dim), (_, length) = cache.shape, where.shape
    where = t.reshape(t.cast(where, np.int64), (where.shape[0], 1, length, 1))
    positions = t.Add(where, np.zeros((heads, 1, dim), np.int64))  # one for each number
    new = t.transpose(t.cast(new, cache.dtype), (0, 2, 1, 3))
    return t.ScatterElements(cache, positions, new, axis=2)


def attend(t, q, k, v, mask, *, causal):
    """`weighted_mean`, in which several heads of queries may share one head of keys."""
    (batch, length, heads, dim), groups = q.shape, k.shape[2]
    scale = 1 / math.sqrt(dim)
    if heads == groups or (t.opset >= 23 and mask is None):
        options = {"causal": causal, "scale": scale, "lowest": None}
        return weighted_mean(t, q, k, v, mask, None, **options)
    shared = heads // groups
    # The queries of one group are the rows of one matrix.
    q = t.transpose(t.reshape(q, (batch, length, groups, shared, dim)), (0, 2, 3, 1, 4))
    q = t.reshape(q, (batch, groups, shared * length, dim))
    scores = product(t, q, k, scale)
    if causal or mask is not None:
        scores = t.reshape(scores, (batch, heads, length, k.shape[1]))
        scores = masked(t, scores, length, k.shape[1], causal, mask)
        scores = t.reshape(scores, (batch, groups, shared * length, k.shape[1]))
    y = t.MatMul(t.Softmax(scores, axis=-1), t.transpose(v, (0, 2, 1, 3)))
    y = t.transpose(t.reshape(y, (batch, groups, shared, length, dim)), (0, 3, 1, 2, 4))
    return t.reshape(y, (batch, length, heads, dim))


LAYERS = {
    "attention": in_result_type(attention),
    "attend": attend,
    "weighted_mean": weighted_mean,
    "write": write,
}
