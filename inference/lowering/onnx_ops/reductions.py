"""Reductions, cumulative ops, and sorting with TopK, which keeps equal numbers in their order."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from inference.lowering.onnx_ops.elementwise import WIDER, extreme, in_result_type, wide
from inference.lowering.onnx_ops.target import (
    OnnxTarget,
    Tensor,
)
from inference.lowering.value import Size, Value, is_number, is_one
from inference.lowering.walk import Lowering


def reduction(op: str) -> Lowering:
    """A reduction. ONNX Runtime reduces integers in float64, and limits the result to their range;
    in int64, the result is exact up to 2**53, and wraps around as in JAX."""

    def function(t: OnnxTarget, x: Value, *, axes: Sequence[int], **_: object) -> Tensor:
        dtype = np.int64 if x.dtype.kind in "iu" else x.dtype
        result = over(t, op, t.cast(x, dtype), axes)
        return result if dtype == x.dtype else t.to(result, x.dtype)

    return function


def product(t: OnnxTarget, x: Value, *, axes: Sequence[int], **_: object) -> Tensor:
    """A product; integers are multiplied as in JAX where their number is known."""
    sizes = [x.shape[axis] for axis in axes]
    if x.dtype.kind not in "iu" or not all(map(is_number, sizes)) or 0 in sizes:
        return reduction("ReduceProd")(t, x, axes=axes)
    for axis in sorted(axes, reverse=True):
        totals = t.table["cumprod"](t, x, axis=axis, reverse=False)
        shape = (*x.shape[:axis], *x.shape[axis + 1 :])
        x = Value(t.Gather(totals, np.int64(x.shape[axis] - 1), axis=axis), shape, x.dtype)
    return x


def over(t: OnnxTarget, op: str, x: Value, axes: Sequence[int]) -> Tensor:
    """A reduction that drops its axes."""
    if all(is_one(x.shape[axis]) for axis in axes):
        return t.reshape(x, [d for axis, d in enumerate(x.shape) if axis not in axes])
    return t.add(op, x, np.array(sorted(axes), np.int64), keepdims=0)


def extreme_along_axes(op: str) -> Lowering:
    """The largest or smallest number. ONNX Runtime compares the lower halves of int64 as if they
    had signs, but not in TopK."""

    def function(t: OnnxTarget, x: Value, *, axes: Sequence[int], **params: Any) -> Tensor:
        if WIDER.get(x.dtype.name, x.dtype) != np.int64:
            return reduction(op)(t, x, axes=axes, **params)
        result: Tensor = t.cast(x, np.int64)
        for axis in axes:
            largest = int(op == "ReduceMax")
            attributes = {"axis": int(axis), "largest": largest}
            result = t.add_several("TopK", 2, result, np.array([1]), **attributes)[0]
        return t.to(t.Squeeze(result, np.array(axes, np.int64)), x.dtype)

    return function


def logical(op: str) -> Lowering:
    """A reduction of booleans, computed on 0 and 1; of none, ReduceMax is the lowest number."""

    def function(t: OnnxTarget, x: Value, *, axes: Sequence[int], **_: object) -> Tensor:
        only_booleans(t, x)
        return t.to(over(t, op, t.cast(x, np.uint8), axes), bool)

    return function


def odd(t: OnnxTarget, x: Value, *, axes: Sequence[int], **_: object) -> Tensor:
    """Whether an odd number of the booleans is true."""
    only_booleans(t, x)
    return t.to(t.Mod(over(t, "ReduceSum", t.cast(x, np.int32), axes), np.int32(2)), bool)


def only_booleans(t: OnnxTarget, x: Value) -> None:
    if x.dtype != bool:
        t.refuse("a bitwise reduction", f"of {x.dtype}")


def index_of(op: str) -> Lowering:
    """The index of the largest or smallest number, the first of equal ones."""

    def function(
        t: OnnxTarget, x: Value, *, axes: Sequence[int], index_dtype: np.dtype, **_: object
    ) -> Tensor:
        dtype = np.int32 if x.dtype == bool else WIDER.get(x.dtype.name, x.dtype)
        x = t.cast(x, dtype)
        x = t.cast(x, np.float64) if x.dtype == np.int64 else x
        return t.to(t.add(op, x, axis=axes[0], keepdims=0), index_dtype)

    return function


def mean(t: OnnxTarget, x: Value, axes: Sequence[int]) -> Tensor:
    return over(t, "ReduceMean", x, axes)


def global_max_pool(t: OnnxTarget, x: Value) -> Tensor:
    return over(t, "ReduceMax", x, (1, 2))


def global_avg_pool(t: OnnxTarget, x: Value) -> Tensor:
    return mean(t, x, (1, 2))


def lowest(dtype: np.dtype) -> np.ndarray:
    return np.asarray(-np.inf if dtype.kind in "fV" else np.iinfo(dtype).min, dtype)


def highest(dtype: np.dtype) -> np.ndarray:
    return np.asarray(np.inf if dtype.kind in "fV" else np.iinfo(dtype).max, dtype)


def cumsum(t: OnnxTarget, x: Value, *, axis: int, reverse: bool, **_: object) -> Tensor:
    return wide(t, lambda a: t.CumSum(a, np.asarray(axis, np.int64), reverse=int(reverse)), x)


def cumulative(combine: Lowering, start: Callable[[np.dtype], np.ndarray]) -> Lowering:
    """A cumulative op in log2(n) steps, each of which doubles how far every total reaches back."""

    def function(t: OnnxTarget, x: Value, *, axis: int, reverse: bool, **_: object) -> Value:
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


def shifted(
    t: OnnxTarget, x: Value, start: np.ndarray, axis: int, distance: int, reverse: bool
) -> Value:
    """x moved along an axis, filled with `start`."""
    pads = np.zeros(2 * len(x.shape), np.int64)
    distance = -distance if reverse else distance
    pads[axis], pads[len(x.shape) + axis] = distance, -distance
    return Value(t.Pad(x, pads, start), x.shape, x.dtype)


def log_of_sum(t: OnnxTarget, x: Value, y: Value) -> Tensor:
    """log(exp(x) + exp(y)), shifted by the larger of the two, unless that is infinite."""
    largest = t.Max(x, y)
    near = t.Where(t.IsInf(largest), 0.0, largest)
    return t.Add(near, t.Log(t.Add(t.Exp(t.Sub(x, near)), t.Exp(t.Sub(y, near)))))


def top_k(t: OnnxTarget, x: Value, *, k: Size, axis: int = -1, **_: object) -> list[Tensor]:
    values, indices = t.add_several("TopK", 2, sortable(t, x), t.shape([k]), axis=axis)
    return [to_dtype_of(t, values, x), t.to(indices, t.out[1].dtype)]


def sort(
    t: OnnxTarget, *operands: Value, dimension: int, num_keys: int, **_: object
) -> Sequence[Tensor]:
    """Sorts by the last key first. Each sort is stable, so that the first key matters most."""
    size = t.shape([operands[0].shape[dimension]])
    attributes = {"axis": dimension, "largest": 0}
    if len(operands) == 1:
        values = t.add_several("TopK", 2, sortable(t, operands[0]), size, **attributes)[0]
        return [to_dtype_of(t, values, operands[0])]
    for key in reversed(range(num_keys)):
        indices = t.add_several("TopK", 2, sortable(t, operands[key]), size, **attributes)[1]
        operands = tuple(
            Value(t.GatherElements(x, indices, axis=dimension), x.shape, x.dtype) for x in operands
        )
    return operands


def sortable(t: OnnxTarget, x: Value) -> Value:
    """x in a dtype that TopK takes."""
    return t.cast(x, sortable_type(x.dtype))


def to_dtype_of(t: OnnxTarget, tensor: str, x: Value) -> Tensor:
    return tensor if sortable_type(x.dtype) == x.dtype else t.to(tensor, x.dtype)


def sortable_type(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.int32) if dtype.kind == "b" else WIDER.get(dtype.name, dtype)


LAYERS = {
    "global_max_pool": global_max_pool,
    "global_avg_pool": in_result_type(global_avg_pool),
}
PRIMITIVES = {
    "reduce_sum": reduction("ReduceSum"),
    "reduce_prod": product,
    "reduce_max": extreme_along_axes("ReduceMax"),
    "reduce_min": extreme_along_axes("ReduceMin"),
    "reduce_and": logical("ReduceMin"),
    "reduce_or": logical("ReduceMax"),
    "reduce_xor": odd,
    "argmax": index_of("ArgMax"),
    "argmin": index_of("ArgMin"),
    "mean": mean,
    "cumsum": cumsum,
    "cumprod": cumulative(lambda t, x, y: t.Mul(x, y), lambda dtype: np.ones((), dtype)),
    "cummax": cumulative(extreme("Max"), lowest),
    "cummin": cumulative(extreme("Min"), highest),
    "cumlogsumexp": cumulative(log_of_sum, lowest),
    "sort": sort,
    "top_k": top_k,
}
