"""Linear and recurrent layers, embeddings and normalizations, as one node where ONNX has it."""

import math

import numpy as np

from inference.lowering.dims import is_number, is_positive
from inference.lowering.onnx_ops.activations import in_result_type
from inference.lowering.onnx_ops.graph import stored_type
from inference.lowering.value import constant


def linear(t, params, x):
    if "bias" not in params:
        return t.MatMul(x, params["weight"])
    if len(x.shape) == 2:
        return t.Gemm(x, params["weight"], params["bias"])
    return t.Add(t.MatMul(x, params["weight"]), params["bias"])


def linears(t, layers, x):
    """One product for each layer, so that every weight keeps its name."""
    return [linear(t, params, x) for params in layers]


def unembedding(t, params, x):
    """The table is transposed in the file's graph, since `embedding` reads it as it is."""
    return t.MatMul(x, t.Transpose(params["weight"], perm=(1, 0)))


def embedding(t, params, ids):
    """The rows of the ids; as in JAX, nan for an id past the end, or below 0."""
    weight = params["weight"]
    count = weight.shape[0]
    ids = ids if ids.dtype in (np.int32, np.int64) else t.cast(ids, np.int64)
    possible = t.Clip(ids, *(np.asarray(end, ids.dtype) for end in (0, count - 1)))
    inside = t.Unsqueeze(t.Equal(ids, possible), np.array([-1]))
    return t.Where(inside, t.Gather(weight, possible, axis=0), np.nan)


def in_float32(function):
    """The function computed in at least float32, like the layer; the result has the dtype of x."""

    def wide(t, *operands, **attributes):
        def widen(value):
            return t.cast(value, np.promote_types(stored_type(value.dtype), np.float32))

        *trees, x = operands
        trees = [{name: widen(value) for name, value in tree.items()} for tree in trees]
        result = function(t, *trees, widen(x), **attributes)
        return result if widen(x) is x else t.to(result, t.out[0].dtype)

    return wide


def layer_norm(t, params, x, *, eps):
    weights = [params[name] for name in ("scale", "bias") if name in params]
    return t.LayerNormalization(x, *weights, axis=-1, epsilon=float(eps))


def rms_norm(t, params, x, *, eps):
    if t.opset >= 23:
        return t.RMSNormalization(x, params["scale"], axis=-1, epsilon=float(eps))
    mean = t.ReduceMean(t.Mul(x, x), np.array([-1]), keepdims=1)
    return t.Mul(t.Div(x, t.Sqrt(t.Add(mean, np.asarray(eps, x.dtype)))), params["scale"])


def group_norm(t, params, x, *, groups, eps):
    """Instance normalization, with each group as one channel."""
    (batch, *sizes, channels), dtype = x.shape, x.dtype
    x = t.transpose(x, (0, len(sizes) + 1, *range(1, len(sizes) + 1)))  # (B, C, ...)
    if groups == channels:
        y = t.InstanceNormalization(x, params["scale"], params["bias"], epsilon=float(eps))
        return t.transpose(y, (0, *range(2, len(sizes) + 2), 1))
    x = t.reshape(x, (batch, groups, math.prod(sizes) * channels // groups))
    ones, zeros = np.ones(groups, dtype), np.zeros(groups, dtype)
    y = t.InstanceNormalization(x, ones, zeros, epsilon=float(eps))
    y = t.transpose(t.reshape(y, (batch, channels, *sizes)), (0, *range(2, len(sizes) + 2), 1))
    return t.Add(t.Mul(y, params["scale"]), params["bias"])


def by_statistics(t, params, statistics, x, *, eps):
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


def lstm(t, params, x, lengths, *, reverse):
    return recurrent(t, "LSTM", LSTM, params, x, lengths, reverse)


def gru(t, params, x, lengths, *, reverse):
    # The reset gate comes after the product, as in model/layers/recurrent.py.
    return recurrent(t, "GRU", GRU, params, x, lengths, reverse, linear_before_reset=1)


def recurrent(t, op, order, params, x, lengths, reverse, **attributes):
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
    most = np.int32(steps) if is_number(steps) else free_length(t, steps)
    if lengths is not None:
        lengths = t.Clip(t.cast(lengths, np.int32), np.int32(0), most)
    elif not is_positive(steps):  # without lengths, a GRU of no steps ends the process
        lengths = t.Expand(most, t.shape(x.shape[:1]))
    y, last = t.add(
        op,
        t.transpose(t.cast(x, dtype), (1, 0, 2)),
        rows(t, weight, order),
        rows(t, hidden, order),
        t.Concat(rows(t, bias, order), other, axis=1),
        lengths,
        outputs=2,
        hidden_size=dim,
        direction="reverse" if reverse else "forward",
        **attributes,
    )
    y = t.Transpose(t.Squeeze(y, np.array([1])), perm=(1, 0, 2))  # (T, 1, B, D) -> (B, T, D)
    results = [y, t.Squeeze(last, np.array([0]))]
    return [t.to(each, out) for each in results] if out != dtype else results


def free_length(t, steps):
    """A free size as the int32 number that Clip takes."""
    return t.to(t.Squeeze(t.size(steps), np.array([0])), np.int32)


def rows(t, value, order):
    """A weight (in, gates * D) as ONNX has it, (1, gates * D, in); a bias (gates * D,) as a row."""
    gates = value.shape[-1] // len(order)
    chosen = np.concatenate([np.arange(i * gates, (i + 1) * gates) for i in order])
    if value.constant:
        return constant(np.take(value.data, chosen, -1).T[None], value.name)
    turned = t.transpose(value, tuple(range(len(value.shape)))[::-1])
    return t.Unsqueeze(t.Gather(turned, chosen, axis=0), np.array([0]))


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
}
