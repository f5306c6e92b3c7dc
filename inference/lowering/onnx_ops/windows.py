"""What slides over windows: pooling."""

import itertools

import numpy as np

from inference.lowering.onnx_ops.convolutions import onnx_pads
from inference.lowering.onnx_ops.elementwise import never_in_float64, wide
from inference.lowering.onnx_ops.shapes import cut, pad
from inference.lowering.value import Value
from model.layers.pool import geometry


def max_pool(t, x, window, *, stride, padding):
    window, stride, pads = geometry(x, window, stride, padding)
    return pooled(t, "MaxPool", x, (1, 2), window, stride, pads)


def avg_pool(t, x, window, *, stride, padding):
    """Padding does not count."""
    window, stride, pads = geometry(x, window, stride, padding)
    return pooled(t, "AveragePool", t.cast(x, t.out[0].dtype), (1, 2), window, stride, pads)


def pooled(t, op, x, axes, window, stride, pads, **attributes):
    """Windows over these axes, which ONNX has last, after exactly two others."""
    others = [axis for axis in range(len(x.shape)) if axis not in axes]
    order = (*others, *axes)
    first = t.transpose(x, order)
    y = t.add(op, first, kernel_shape=window, strides=stride, pads=onnx_pads(pads), **attributes)
    return t.transpose(y, np.argsort(order))


def window_op(op, combine, start):
    """A sliding maximum or sum: one node where ONNX has it, else the windows' numbers one after another."""

    def function(
        t, x, *, window_dimensions, window_strides, padding, base_dilation, window_dilation
    ):
        is_simple = set(base_dilation) == set(window_dilation) == {1} and x.dtype == np.float32
        moved = zip(window_dimensions, window_strides, padding, strict=True)
        axes = [axis for axis, about in enumerate(moved) if about != (1, 1, (0, 0))]
        if (
            op
            and is_simple
            and 0 < len(axes) == len(x.shape) - 2
            and fits(window_dimensions, padding)
        ):
            window, stride, pads = (
                [all_[a] for a in axes] for all_ in (window_dimensions, window_strides, padding)
            )
            return one_node(t, op, x, axes, window, stride, pads)
        about = (window_dimensions, window_strides, padding, base_dilation, window_dilation)
        return one_by_one(t, combine, start(x.dtype), x, *about)

    return function


def fits(window, padding):
    """ONNX Runtime wants every padding smaller than its window."""
    return all(0 <= p < size for size, pads in zip(window, padding, strict=True) for p in pads)


def one_node(t, op, x, axes, window, stride, pads):
    if op == "MaxPool":
        return pooled(t, op, x, axes, window, stride, pads)
    mean = pooled(t, op, x, axes, window, stride, pads, count_include_pad=1)
    return t.Mul(mean, np.asarray(np.prod(window), x.dtype))


def one_by_one(t, combine, start, x, window, strides, padding, base_dilation, window_dilation):
    """Each place of the window is a strided slice; they are combined."""
    config = [
        (low, high, base - 1) for (low, high), base in zip(padding, base_dilation, strict=True)
    ]
    sizes = [
        size + (size - 1) * base + low + high
        for size, (low, high, base) in zip(x.shape, config, strict=True)
    ]
    padded = Value(t.tensor(pad(t, x, start, padding_config=config)), sizes, x.dtype)
    reach = [(size - 1) * dilation for size, dilation in zip(window, window_dilation, strict=True)]
    total = None
    for place in itertools.product(*map(range, window)):
        low = [p * dilation for p, dilation in zip(place, window_dilation, strict=True)]
        high = [size - r + p for size, r, p in zip(sizes, reach, low, strict=True)]
        part = cut(t, padded, start_indices=low, limit_indices=high, strides=strides)
        part = Value(t.tensor(part), t.out[0].shape, x.dtype)
        total = (
            part
            if total is None
            else Value(combined(t, combine, total, part), t.out[0].shape, x.dtype)
        )
    return total


def combined(t, op, x, y):
    return wide(t, lambda a, b: t.add(op, a, b), x, y)


def lowest(dtype):
    return np.asarray(-np.inf if dtype.kind in "fV" else np.iinfo(dtype).min, dtype)


def highest(dtype):
    return np.asarray(np.inf if dtype.kind in "fV" else np.iinfo(dtype).max, dtype)


LAYERS = {"max_pool": max_pool, "avg_pool": never_in_float64(avg_pool)}
PRIMITIVES = {
    "reduce_window_max": window_op("MaxPool", "Max", lowest),
    "reduce_window_min": window_op(None, "Min", highest),
    "reduce_window_sum": window_op("AveragePool", "Add", lambda dtype: np.zeros((), dtype)),
}
