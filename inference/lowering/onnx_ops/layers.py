"""Linear and recurrent layers, embeddings, normalizations and attention, as one node where ONNX
has it.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from inference.lowering.onnx_ops.elementwise import in_result_type
from inference.lowering.onnx_ops.target import (
    OnnxTarget,
    Params,
    Tensor,
    stored_type,
)
from inference.lowering.value import Size, Value, constant, is_number, is_positive
from inference.lowering.walk import Lowering


def linear(t: OnnxTarget, params: Params, x: Value) -> Tensor:
    if "bias" in params and len(x.shape) == 2:
        return t.Gemm(x, params["weight"], params["bias"])
    return project(t, params, x)


def linears(t: OnnxTarget, layers: Sequence[Params], x: Value) -> list[Tensor]:
    """One product for each layer, so that every weight keeps its name."""
    return [linear(t, params, x) for params in layers]


def unembedding(t: OnnxTarget, params: Params, x: Value) -> Tensor:
    """The table is transposed in the file's graph, since `embedding` reads it as it is."""
    return t.MatMul(x, t.Transpose(params["weight"], perm=(1, 0)))


def embedding(t: OnnxTarget, params: Params, ids: Value) -> Tensor:
    """The rows of the ids; as in JAX, nan for an id past the end, or below 0."""
    weight = params["weight"]
    count = weight.shape[0]
    ids = ids if ids.dtype in (np.int32, np.int64) else t.cast(ids, np.int64)
    possible = t.Clip(ids, *(np.asarray(end, ids.dtype) for end in (0, count - 1)))
    inside = t.Unsqueeze(t.Equal(ids, possible), np.array([-1]))
    return t.Where(inside, t.Gather(weight, possible, axis=0), np.nan)


def in_float32(function: Lowering) -> Lowering:
    """The function computed in at least float32, like the layer; the result has the dtype of x."""

    def wide(t: OnnxTarget, *operands: Any, **attributes: Any) -> Tensor:
        def widen(value: Value) -> Value:
            return t.cast(value, np.promote_types(stored_type(value.dtype), np.float32))

        *trees, x = operands
        trees = [{name: widen(value) for name, value in tree.items()} for tree in trees]
        result = function(t, *trees, widen(x), **attributes)
        return result if widen(x) is x else t.to(result, t.out[0].dtype)

    return wide


def layer_norm(t: OnnxTarget, params: Params, x: Value, *, eps: float) -> Tensor:
    weights = [params[name] for name in ("scale", "bias") if name in params]
    return t.LayerNormalization(x, *weights, axis=-1, epsilon=float(eps))


def rms_norm(t: OnnxTarget, params: Params, x: Value, *, eps: float) -> Tensor:
    if t.opset >= 23:
        return t.RMSNormalization(x, params["scale"], axis=-1, epsilon=float(eps))
    mean = t.ReduceMean(t.Mul(x, x), np.array([-1]), keepdims=1)
    return t.Mul(t.Div(x, t.Sqrt(t.Add(mean, np.asarray(eps, x.dtype)))), params["scale"])


def group_norm(t: OnnxTarget, params: Params, x: Value, *, groups: int, eps: float) -> Tensor:
    """Instance normalization, with each group as one channel."""
    (batch, *sizes, channels), dtype = x.shape, x.dtype
    images = t.transpose(x, (0, len(sizes) + 1, *range(1, len(sizes) + 1)))  # (B, C, ...)
    channels_last = (0, *range(2, len(sizes) + 2), 1)
    if groups == channels:
        y = t.InstanceNormalization(images, params["scale"], params["bias"], epsilon=float(eps))
        return t.transpose(y, channels_last)
    rows = t.reshape(images, (batch, groups, math.prod(sizes) * channels // groups))
    ones, zeros = np.ones(groups, dtype), np.zeros(groups, dtype)
    y = t.InstanceNormalization(rows, ones, zeros, epsilon=float(eps))
    y = t.transpose(t.reshape(y, (batch, channels, *sizes)), channels_last)
    return t.Add(t.Mul(y, params["scale"]), params["bias"])


def by_statistics(
    t: OnnxTarget, params: Params, statistics: Params, x: Value, *, eps: float
) -> Tensor:
    """One scale and shift per channel, which can be folded into the convolution before it."""
    scale, bias, mean, var = params["scale"], params["bias"], statistics["mean"], statistics["var"]
    if all(value.constant for value in (scale, bias, mean, var)):
        factor = scale.data / np.sqrt(var.data + np.asarray(eps, var.dtype))
        shift = bias.data - mean.data * factor
        return t.Add(t.Mul(x, constant(factor, scale.name)), constant(shift, bias.name))
    factor = t.Div(scale, t.Sqrt(t.Add(var, np.asarray(eps, var.dtype))))
    return t.Add(t.Mul(t.Sub(x, mean), factor), bias)


# The indices of this project's gates, in ONNX's order.
LSTM, GRU = (0, 3, 1, 2), (1, 0, 2)


def lstm(
    t: OnnxTarget, params: dict[str, Params], x: Value, lengths: Value | None, *, reverse: bool
) -> list[Tensor]:
    return recurrent(t, "LSTM", LSTM, params, x, lengths, reverse)


def gru(
    t: OnnxTarget, params: dict[str, Params], x: Value, lengths: Value | None, *, reverse: bool
) -> list[Tensor]:
    # The reset gate comes after the product, as in model/layers/recurrent.py.
    return recurrent(t, "GRU", GRU, params, x, lengths, reverse, linear_before_reset=1)


def recurrent(
    t: OnnxTarget,
    op: str,
    order: Sequence[int],
    params: dict[str, Params],
    x: Value,
    lengths: Value | None,
    reverse: bool,
    **attributes: Any,
) -> list[Tensor]:
    """(the outputs of all steps, those after the last step). ONNX Runtime has float32 and float64
    only, and refuses lengths beyond the sequence."""
    dtype, out = np.promote_types(stored_type(x.dtype), np.float32), t.out[0].dtype
    weight, bias = (t.cast(params["input"][name], dtype) for name in ("weight", "bias"))
    hidden, steps = t.cast(params["hidden"]["weight"], dtype), x.shape[1]
    dim = hidden.shape[0]
    zeros = np.zeros((1, len(order) * dim), dtype)  # of the products of the state
    if "candidate" in params:
        own = rows(t, t.cast(params["candidate"]["bias"], dtype), (0,))
        other = t.Concat(zeros[:, dim:], own, axis=1)
    else:
        other = zeros
    most = np.int32(steps) if is_number(steps) else t.to(t.scalar(steps), np.int32)
    used = None
    if lengths is not None:
        used = t.Clip(t.cast(lengths, np.int32), np.int32(0), most)
    elif not is_positive(steps):  # without lengths, a GRU of no steps ends the process
        used = t.Expand(most, t.shape(x.shape[:1]))
    y, last = t.add_several(
        op,
        2,
        t.transpose(t.cast(x, dtype), (1, 0, 2)),
        rows(t, weight, order),
        rows(t, hidden, order),
        t.Concat(rows(t, bias, order), other, axis=1),
        used,
        hidden_size=dim,
        direction="reverse" if reverse else "forward",
        **attributes,
    )
    y = t.Transpose(t.Squeeze(y, np.array([1])), perm=(1, 0, 2))  # (T, 1, B, D) -> (B, T, D)
    results: list[Tensor] = [y, t.Squeeze(last, np.array([0]))]
    return [t.to(each, out) for each in results] if out != dtype else results


def rows(t: OnnxTarget, value: Value, order: Sequence[int]) -> Tensor:
    """A weight (in, gates * D) as ONNX has it, (1, gates * D, in); a bias (gates * D,) as a row."""
    gates = value.shape[-1] // len(order)
    chosen = np.concatenate([np.arange(i * gates, (i + 1) * gates) for i in order])
    if value.constant:
        return constant(np.take(value.data, chosen, -1).T[None], value.name)
    turned = t.transpose(value, tuple(range(len(value.shape)))[::-1])
    return t.Unsqueeze(t.Gather(turned, chosen, axis=0), np.array([0]))


def attention(
    t: OnnxTarget,
    params: dict[str, Params],
    x: Value,
    context: Value | None = None,
    *,
    heads: int,
    causal: bool,
    mask: Value | None,
) -> Tensor:
    context = x if context is None else context
    # the Attention node gives nan where a mask leaves nothing to attend to
    if t.opset >= 23 and mask is None:
        q, k, v = (project(t, params[name], source) for name, source in sources(x, context))
        y = t.Attention(q, k, v, q_num_heads=heads, kv_num_heads=heads, is_causal=int(causal))
    else:
        y = in_parts(t, params, x, context, heads, causal, mask)
    return project(t, params["out"], y)


def sources(x: Value, context: Value) -> list[tuple[str, Value]]:
    return [("query", x), ("key", context), ("value", context)]


def in_parts(
    t: OnnxTarget,
    params: dict[str, Params],
    x: Value,
    context: Value,
    heads: int,
    causal: bool,
    mask: Value | None,
) -> Tensor:
    """Attention without the output projection; the scale is folded into the query's weights."""
    width = params["query"]["weight"].shape[-1]
    params = params | {"query": scaled(t, params["query"], math.sqrt(heads / width))}

    def split_heads(name: str, source: Value, order: Sequence[int]) -> Tensor:
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


def scaled(t: OnnxTarget, params: Params, scale: float) -> Params:
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


def project(t: OnnxTarget, params: Params, x: Tensor) -> Tensor:
    y = t.MatMul(x, params["weight"])
    return t.Add(y, params["bias"]) if "bias" in params else y


def masked(
    t: OnnxTarget,
    scores: Tensor,
    length: Size,
    context_length: Size,
    causal: bool,
    mask: Value | None,
    lowest: float | None = None,
) -> Tensor:
    """The scores with the lowest number, or another one, at masked positions."""
    allowed: Tensor | None = mask
    if causal:
        past = earlier(t, length, context_length)
        allowed = past if mask is None else t.And(past, mask)
    if allowed is None:
        return scores
    if lowest is None:
        lowest = float(np.finfo(stored_type(t.out[0].dtype)).min)
    return t.Where(allowed, scores, lowest)


def earlier(t: OnnxTarget, length: Size, context_length: Size) -> Tensor:
    """Whether a position of the context is not after one of x: (T, S)."""
    if is_number(length) and is_number(context_length):
        return constant(np.tril(np.ones((length, context_length), bool)))
    rows, columns = (
        t.Range(np.int64(0), t.scalar(size), np.int64(1)) for size in (length, context_length)
    )
    return t.GreaterOrEqual(t.Unsqueeze(rows, np.array([1])), columns)


def weighted_mean(
    t: OnnxTarget,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    bias: Value | None,
    *,
    causal: bool,
    scale: float,
    lowest: float | None,
) -> Tensor:
    """Attention without its projections, of (batch, position, head, feature)."""
    if t.opset >= 23 and mask is None:
        heads = [t.transpose(x, (0, 2, 1, 3)) for x in (q, k, v)]
        y = t.Attention(*heads, bias, scale=scale, is_causal=int(causal))
        return t.transpose(y, (0, 2, 1, 3))
    lengths = q.shape[1], k.shape[1]
    scores = product(t, t.transpose(q, (0, 2, 1, 3)), k, scale)  # (B, H, T, S)
    scores = scores if bias is None else t.Add(scores, bias)
    scores = masked(t, scores, *lengths, causal, mask, lowest)
    y = t.MatMul(t.Softmax(scores, axis=-1), t.transpose(v, (0, 2, 1, 3)))
    return t.transpose(y, (0, 2, 1, 3))


def product(t: OnnxTarget, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The scaled product of queries, (B, K, T, D), and keys, (B, S, K, D). ONNX Runtime computes it
    in one node, with the transposition of the keys' last two axes."""
    q = q if scale == 1 else t.Mul(q, float(scale))
    return t.MatMul(q, t.transpose(k, (0, 2, 3, 1)))


def write(t: OnnxTarget, cache: Value, new: Value, where: Value) -> Tensor:
    """The cache, (B, K, S, D), with T new tokens, (B, T, K, D), at positions, (B, T)."""
    (_, heads, _, dim), (_, length) = cache.shape, where.shape
    positions = t.reshape(t.cast(where, np.int64), (where.shape[0], 1, length, 1))
    positions = t.Add(positions, np.zeros((heads, 1, dim), np.int64))  # one for each number
    updates = t.transpose(t.cast(new, cache.dtype), (0, 2, 1, 3))
    return t.ScatterElements(cache, positions, updates, axis=2)


def attend(
    t: OnnxTarget, q: Value, k: Value, v: Value, mask: Value | None, *, causal: bool
) -> Tensor:
    """`weighted_mean`, in which several heads of queries may share one head of keys."""
    (batch, length, heads, dim), groups = q.shape, k.shape[2]
    scale = 1 / math.sqrt(dim)
    if heads == groups or (t.opset >= 23 and mask is None):
        return weighted_mean(t, q, k, v, mask, None, causal=causal, scale=scale, lowest=None)
    shared = heads // groups
    # The queries of one group are the rows of one matrix.
    rows = t.transpose(t.reshape(q, (batch, length, groups, shared, dim)), (0, 2, 3, 1, 4))
    scores = product(t, t.reshape(rows, (batch, groups, shared * length, dim)), k, scale)
    if causal or mask is not None:
        scores = t.reshape(scores, (batch, heads, length, k.shape[1]))
        scores = masked(t, scores, length, k.shape[1], causal, mask)
        scores = t.reshape(scores, (batch, groups, shared * length, k.shape[1]))
    y = t.MatMul(t.Softmax(scores, axis=-1), t.transpose(v, (0, 2, 1, 3)))
    y = t.transpose(t.reshape(y, (batch, groups, shared, length, dim)), (0, 3, 1, 2, 4))
    return t.reshape(y, (batch, length, heads, dim))


LAYERS = {
    "linear": in_result_type(linear),
    "linears": in_result_type(linears),
    "embedding": embedding,
    "unembedding": in_result_type(unembedding),
    "layer_norm": in_float32(layer_norm),
    "rms_norm": in_float32(rms_norm),
    "group_norm": in_float32(group_norm),
    "by_statistics": in_float32(by_statistics),
    "lstm": lstm,
    "gru": gru,
    "attention": in_result_type(attention),
    "attend": attend,
    "weighted_mean": weighted_mean,
    "write": write,
}
