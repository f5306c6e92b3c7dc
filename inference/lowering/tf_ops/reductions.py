"""Reductions, cumulative ops, argmax and argmin, and sorting."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike

from inference.lowering.tf_ops.elementwise import (
    Tensor,
    is_bool,
    is_float,
    log,
    maximum,
    minimum,
    widened,
)
from inference.lowering.tf_ops.shapes import shape_of, size_of
from inference.lowering.value import Size
from inference.lowering.walk import Lowering

if TYPE_CHECKING:
    from inference.lowering.tf_ops.target import TfTarget


def reduction(function: Callable[..., Tensor]) -> Lowering:
    return widened(lambda target, x, *, axes, **_: function(x, axes))


def odd(target: "TfTarget", x: Tensor, *, axes: Sequence[int], **_: object) -> Tensor:
    """Whether an odd number of the booleans is true."""
    only_booleans(target, x)
    count = tf.reduce_sum(tf.cast(x, tf.int32), axes)
    return tf.equal(tf.math.floormod(count, 2), 1)


def only_booleans(target: "TfTarget", x: Tensor) -> None:
    if not is_bool(x):
        target.refuse("a bitwise reduction", f"of {x.dtype.name}")


def logical(function: Callable[..., Tensor]) -> Lowering:
    def reduce(target: "TfTarget", x: Tensor, *, axes: Sequence[int], **_: object) -> Tensor:
        only_booleans(target, x)
        return function(x, axes)

    return reduce


def extreme(function: Callable[..., Tensor]) -> Lowering:
    """A maximum or minimum that is nan if any number is; TFLite skips nan."""

    def reduce(target: "TfTarget", x: Tensor, *, axes: Sequence[int], **_: object) -> Tensor:
        if is_bool(x):
            return (tf.reduce_any if function is tf.reduce_max else tf.reduce_all)(x, axes)
        result = function(x, axes)
        if not is_float(x):
            return result
        has_nan = tf.reduce_any(tf.not_equal(x, x), axes)
        return tf.where(has_nan, np.asarray(np.nan, x.dtype.name), result)

    return widened(reduce)


def index_of(function: Callable[..., Tensor]) -> Lowering:
    """The first index of the largest or smallest number, or of the first nan if there is one."""

    def find(
        target: "TfTarget", x: Tensor, *, axes: Sequence[int], index_dtype: np.dtype
    ) -> Tensor:
        axis = int(axes[0])  # under vmap it is an int64 of NumPy
        x = tf.cast(x, tf.int32) if x.dtype.name == "bool" else x
        index = function(x, axis, output_type=tf.int32)
        if is_float(x):
            is_nan = tf.not_equal(x, x)
            first_nan = tf.argmax(tf.cast(is_nan, tf.int32), axis, tf.int32)
            index = tf.where(tf.reduce_any(is_nan, axis), first_nan, index)
        return tf.cast(index, index_dtype)

    return find


def cumsum(target: "TfTarget", x: Tensor, *, axis: int, reverse: bool) -> Tensor:
    return tf.cumsum(x, axis, reverse=reverse)


def cumulative(combine: Lowering, start: Callable[[type], float]) -> Lowering:
    """A cumulative op in log2(n) steps, each of which doubles how far every total reaches back."""

    def scan(target: "TfTarget", x: Tensor, *, axis: int, reverse: bool) -> Tensor:
        size, reach = x.shape[axis], 1
        if size is None:
            target.refuse("a cumulative op", "over a free axis" if axis else "over the batch")
        first = np.asarray(start(x.dtype.as_numpy_dtype), x.dtype.name)
        while reach < size:
            x = combine(target, x, shifted(x, axis, -reach if reverse else reach, first))
            reach *= 2
        return x

    return scan


def shifted(x: Tensor, axis: int, by: int, first: np.ndarray) -> Tensor:
    """x moved along an axis, filled with `first`."""
    part = slice(None, -by) if by > 0 else slice(-by, None)
    kept = x[(slice(None),) * axis + (part,)]
    pads = [[0, 0] for _ in x.shape]
    pads[axis] = [max(by, 0), max(-by, 0)]
    return tf.pad(kept, pads, constant_values=first)


def lowest(dtype: DTypeLike) -> float:
    return -np.inf if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).min


def highest(dtype: DTypeLike) -> float:
    return np.inf if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).max


def log_add_exp(target: "TfTarget", x: Tensor, y: Tensor) -> Tensor:
    largest = maximum(target, x, y)
    is_infinite = tf.abs(largest) >= np.float32(np.inf)
    origin = tf.where(is_infinite, tf.zeros_like(largest), largest)  # nan stays nan
    return log(target, tf.exp(x - origin) + tf.exp(y - origin)) + origin


def sort(
    target: "TfTarget", *operands: Tensor, dimension: int, is_stable: bool, num_keys: int
) -> list[Tensor]:
    """Sorts all operands by the first `num_keys`, of which the first matters most."""
    order = [i for i in range(len(operands[0].shape)) if i != dimension] + [dimension]
    back = np.argsort(order)
    rows = [tf.transpose(x, order) for x in operands]
    for i in reversed(range(num_keys)):  # each sort is stable
        indices = argsort(rows[i])
        rows = [take(x, indices) for x in rows]
    return [tf.transpose(x, back) for x in rows]


def argsort(keys: Tensor) -> Tensor:
    """The indices of each row's numbers, the smallest first."""
    if keys.dtype.name in ("bool", "int8", "uint8", "int16"):
        keys = tf.cast(keys, tf.int32)
    return tf.math.top_k(-keys if is_float(keys) else -keys - 1, size_of(keys, -1)).indices


def take(rows: Tensor, indices: Tensor) -> Tensor:
    """The numbers of each row at its indices."""
    if len(rows.shape) == 1:
        return tf.gather(rows, indices)
    size, count = size_of(rows, -1), size_of(indices, -1)
    flat = tf.gather(
        tf.reshape(rows, shape_of([-1, size])),
        tf.reshape(indices, shape_of([-1, count])),
        batch_dims=1,
    )
    return tf.reshape(flat, shape_of([size_of(indices, i) for i in range(len(indices.shape))]))


def top_k(
    target: "TfTarget", x: Tensor, *, k: Size, axis: int = -1, **_: object
) -> tuple[Tensor, Tensor]:
    order = [i for i in range(len(x.shape)) if i != axis % len(x.shape)] + [axis % len(x.shape)]
    values, indices = tf.math.top_k(tf.transpose(x, order), target.size(k))
    back = np.argsort(order)
    return tf.transpose(values, back), tf.transpose(indices, back)


PRIMITIVES = {
    "reduce_sum": reduction(tf.reduce_sum),
    "reduce_prod": reduction(tf.reduce_prod),
    "mean": reduction(tf.reduce_mean),
    "reduce_and": logical(tf.reduce_all),
    "reduce_or": logical(tf.reduce_any),
    "reduce_xor": odd,
    "reduce_max": extreme(tf.reduce_max),
    "reduce_min": extreme(tf.reduce_min),
    "argmax": widened(index_of(tf.argmax)),
    "argmin": widened(index_of(tf.argmin)),
    "cumsum": widened(cumsum),
    "cumprod": widened(cumulative(lambda target, x, y: x * y, lambda dtype: 1)),
    "cummax": widened(cumulative(maximum, lowest)),
    "cummin": widened(cumulative(minimum, highest)),
    "cumlogsumexp": cumulative(log_add_exp, lowest),
    "sort": widened(sort),
    "top_k": widened(top_k),
}
