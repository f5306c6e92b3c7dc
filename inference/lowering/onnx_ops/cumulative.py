"""Cumulative ops along an axis."""

import numpy as np

from inference.lowering.onnx_ops.dims import is_number
from inference.lowering.onnx_ops.elementwise import WIDER, extreme, wide
from inference.lowering.onnx_ops.windows import highest, lowest
from inference.lowering.value import Value


def cumsum(t, x, *, axis, reverse, **_):
    return wide(t, lambda a: t.CumSum(a, np.asarray(axis, np.int64), reverse=int(reverse)), x)


def cumulative(combine, start):
    """A cumulative op in log2(n) steps, each of which doubles how far every total reaches back."""

    def function(t, x, *, axis, reverse, **_):
        size, reach, dtype = x.shape[axis], 1, x.dtype
        if not is_number(size):
            t.refuse("a cumulative op", "over a free axis" if axis else "over the batch")
        x = t.cast(x, WIDER.get(dtype.name, dtype))
        while reach < size:
            before = shifted(t, x, start(x.dtype), axis, reach, reverse)
            x = Value(combine(t, x, before), x.shape, x.dtype)
            reach *= 2
        return t.cast(x, dtype)

    return function


def shifted(t, x, start, axis, distance, reverse):
    """x moved along an axis, filled with `start`."""
    pads = np.zeros(2 * len(x.shape), np.int64)
    distance = -distance if reverse else distance
    pads[axis], pads[len(x.shape) + axis] = distance, -distance
    return Value(t.Pad(x, pads, start), x.shape, x.dtype)


def log_of_sum(t, x, y):
    """log(exp(x) + exp(y)), shifted by the larger of the two, unless that is infinite."""
    largest = t.Max(x, y)
    near = t.Where(t.IsInf(largest), 0.0, largest)
    return t.Add(near, t.Log(t.Add(t.Exp(t.Sub(x, near)), t.Exp(t.Sub(y, near)))))


PRIMITIVES = {
    "cumsum": cumsum,
    "cumprod": cumulative(lambda t, x, y: t.Mul(x, y), lambda dtype: np.ones((), dtype)),
    "cummax": cumulative(extreme("Max"), lowest),
    "cummin": cumulative(extreme("Min"), highest),
    "cumlogsumexp": cumulative(log_of_sum, lowest),
}
