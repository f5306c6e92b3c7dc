"""Pooling: reductions over sliding windows."""

import itertools

import numpy as np
from jax import lax

from inference.lowering.onnx_ops.convolutions import padded
from inference.lowering.onnx_ops.elementwise import PRIMITIVES as ELEMENTWISE
from inference.lowering.onnx_ops.elementwise import never_in_float64
from inference.lowering.onnx_ops.shapes import cut, pad
from inference.lowering.value import Value, constant
from model.layers.pool import geometry


def max_pool(t, x, window, *, stride, padding):
    window, stride, pads = geometry(x, window, stride, padding)
    return pooled(t, "MaxPool", x, (1, 2), window, stride, pads)


def avg_pool(t, x, window, *, stride, padding):
    """The mean of the pixels in each window, without the padding."""
    window, stride, pads = geometry(x, window, stride, padding)
    return pooled(t, "AveragePool", t.cast(x, t.out[0].dtype), (1, 2), window, stride, pads)


def pooled(t, op, x, axes, window, stride, pads, **attributes):
    """A pooling node over these axes, which ONNX puts last, after exactly two others."""
    if any(pad >= size for size, pair in zip(window, pads, strict=True) for pad in pair):
        t.refuse(op, "with a padding as large as its window")
    others = [axis for axis in range(len(x.shape)) if axis not in axes]
    order = (*others, *axes)
    x, padding = padded(t, x, pads, axes, window, stride, (1,) * len(axes))
    attributes |= {"kernel_shape": window, "strides": stride, **padding}
    y = t.add(op, t.transpose(x, order), **attributes)
    return t.transpose(y, np.argsort(order))


def window_op(op, combine, start):
    """A reduction over windows: one node where ONNX has it, else one slice per offset."""

    def function(
        t, x, *, window_dimensions, window_strides, padding, base_dilation, window_dilation
    ):
        per_window = (window_dimensions, window_strides, padding)
        dilation = (base_dilation, window_dilation)
        is_plain = set(base_dilation) == set(window_dilation) == {1} and x.dtype == np.float32
        per_axis = enumerate(zip(*per_window, strict=True))
        axes = [axis for axis, values in per_axis if values != (1, 1, (0, 0))]
        has_node = op and is_plain and 0 < len(axes) == len(x.shape) - 2
        if has_node and is_allowed(window_dimensions, padding, x.shape, window_strides):
            window, stride, pads = ([values[a] for a in axes] for values in per_window)
            return one_node(t, op, x, axes, window, stride, pads)
        return by_slices(t, combine, start(x.dtype), x, *per_window, *dilation)

    return function


def is_allowed(window, padding, sizes, strides):
    """Whether every padding is smaller than its window, which ONNX Runtime requires.

    The padding of a free size must be that of SAME, which a node can compute.
    """
    if not all(isinstance(p, int | np.integer) for pads in padding for p in pads):
        return tuple(map(tuple, padding)) == tuple(
            lax.padtype_to_pads(sizes, window, strides, "SAME")
        )
    return all(0 <= p < size for size, pads in zip(window, padding, strict=True) for p in pads)


def one_node(t, op, x, axes, window, stride, pads):
    if op == "MaxPool":
        return pooled(t, op, x, axes, window, stride, pads)
    mean = pooled(t, op, x, axes, window, stride, pads, count_include_pad=1)
    return t.Mul(mean, np.asarray(np.prod(window), x.dtype))


def by_slices(t, combine, start, x, window, strides, padding, base_dilation, window_dilation):
    """A combination of strided slices, one for each offset in the window."""
    dilated = zip(padding, base_dilation, strict=True)
    config = [(low, high, base - 1) for (low, high), base in dilated]
    sizes = [
        size + (size - 1) * between + low + high
        for size, (low, high, between) in zip(x.shape, config, strict=True)
    ]
    padded = pad(t, x, constant(start), padding_config=config)
    padded = Value(t.tensor(padded), sizes, x.dtype)
    reach = [(size - 1) * dilation for size, dilation in zip(window, window_dilation, strict=True)]
    total = None
    for offset in itertools.product(*map(range, window)):
        low = [o * dilation for o, dilation in zip(offset, window_dilation, strict=True)]
        high = [size - r + o for size, r, o in zip(sizes, reach, low, strict=True)]
        part = cut(t, padded, start_indices=low, limit_indices=high, strides=strides)
        part = Value(t.tensor(part), t.out[0].shape, x.dtype)
        if total is not None:
            result = ELEMENTWISE[combine](t, total, part)
            part = Value(result, t.out[0].shape, x.dtype)
        total = part
    return total


def lowest(dtype):
    return np.asarray(-np.inf if dtype.kind in "fV" else np.iinfo(dtype).min, dtype)


def highest(dtype):
    return np.asarray(np.inf if dtype.kind in "fV" else np.iinfo(dtype).max, dtype)


LAYERS = {"max_pool": max_pool, "avg_pool": never_in_float64(avg_pool)}
PRIMITIVES = {
    "reduce_window_max": window_op("MaxPool", "max", lowest),
    "reduce_window_min": window_op(None, "min", highest),
    "reduce_window_sum": window_op("AveragePool", "add", lambda dtype: np.zeros((), dtype)),
}
