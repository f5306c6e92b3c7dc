"""Attention, whole or in its parts."""

import math

import numpy as np

from inference.lowering.onnx_ops.graph import stored_type
from inference.lowering.value import Value, constant


def attention(t, params, x, context=None, *, heads, causal, mask):
    """Softmax of the products of queries and keys, times the values."""
    context = x if context is None else context
    params = {
        name: {k: t.cast(w, t.out[0].dtype) for k, w in linear.items()}
        for name, linear in params.items()
    }
    if (
        t.opset >= 23 and mask is None
    ):  # where a mask leaves nothing to attend to, the whole op gives nan
        q, k, v = (project(t, params[name], source) for name, source in sources(x, context))
        y = t.Attention(q, k, v, q_num_heads=heads, kv_num_heads=heads, is_causal=int(causal))
    else:
        y = in_parts(t, params, x, context, heads, causal, mask)
    return project(t, params["out"], y)


def sources(x, context):
    return [("query", x), ("key", context), ("value", context)]


def in_parts(t, params, x, context, heads, causal, mask):
    """Attention before the last projection; the scale is in the query's weights."""
    width = params["query"]["weight"].shape[-1]
    params = params | {"query": scaled(t, params["query"], math.sqrt(heads / width))}
    orders = [(0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)]  # the keys come transposed
    q, k, v = (
        t.transpose(
            t.reshape(project(t, params[name], source), (*source.shape[:2], heads, width // heads)),
            order,
        )
        for (name, source), order in zip(sources(x, context), orders, strict=True)
    )
    scores = masked(t, t.MatMul(q, k), x.shape[1], context.shape[1], causal, mask)  # (B, H, T, S)
    y = t.transpose(t.MatMul(t.Softmax(scores, axis=-1), v), (0, 2, 1, 3))
    return t.reshape(y, x.shape)


def scaled(t, linear, scale):
    """The layer, with its results times a number."""
    if all(value.constant for value in linear.values()):
        return {
            name: constant((value.data * scale).astype(value.dtype), value.name)
            for name, value in linear.items()
        }
    by = np.asarray(scale, t.out[0].dtype)
    return {
        name: Value(t.Mul(value, by), value.shape, value.dtype) for name, value in linear.items()
    }


def project(t, linear, x):
    y = t.MatMul(x, linear["weight"])
    return t.Add(y, linear["bias"]) if "bias" in linear else y


def masked(t, scores, length, source, causal, mask):
    """Scores of what may not be attended to become the lowest number."""
    if causal:
        past = constant(np.tril(np.ones((length, source), bool)))
        mask = past if mask is None else t.And(past, mask)
    if mask is None:
        return scores
    return t.Where(mask, scores, t.number(np.finfo(stored_type(t.out[0].dtype)).min))


LAYERS = {"attention": attention}
