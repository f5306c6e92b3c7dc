"""Recurrent layers, each as the one node that ONNX has for it."""

import numpy as np

from inference.lowering.dims import is_positive
from inference.lowering.onnx_ops import dims
from inference.lowering.onnx_ops.graph import stored_type
from inference.lowering.value import constant

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
    most = np.int32(steps) if dims.is_number(steps) else free_length(t, steps)
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


LAYERS = {"lstm": lstm, "gru": gru}
