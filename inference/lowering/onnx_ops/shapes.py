"""Ops that move numbers, read and write at positions that are computed while the model runs, or
compute numbers from sizes.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jax import lax
from jax.lax import GatherScatterMode
from numpy.typing import DTypeLike

from inference.lowering.onnx_ops.elementwise import WIDER, where, wide
from inference.lowering.onnx_ops.target import (
    OnnxTarget,
    Tensor,
)
from inference.lowering.value import (
    Shape,
    Size,
    Value,
    constant,
    is_number,
    is_same,
    is_zero,
    product,
)
from inference.lowering.walk import Lowering

Starts: TypeAlias = dict[int, Tensor]  # {axis: where windows start}


def reshape(
    t: OnnxTarget,
    x: Value,
    *,
    new_sizes: Sequence[Size],
    dimensions: Sequence[int] | None = None,
    **_: object,
) -> Tensor:
    """x in another shape, its axes read in the order of `dimensions`."""
    if dimensions is not None:
        order = tuple(dimensions)
        shape = [x.shape[axis] for axis in order]
        x = t.walk.value(t.transpose(x, order), Value("", shape, x.dtype))
    return t.reshape(x, new_sizes)


def squeeze(t: OnnxTarget, x: Value, *, dimensions: Sequence[int], **_: object) -> Tensor:
    return t.Squeeze(x, np.array(dimensions, np.int64))


def expand_dims(t: OnnxTarget, x: Value, *, dimensions: Sequence[int], **_: object) -> Tensor:
    return t.Unsqueeze(x, np.array(dimensions, np.int64))


def transpose(t: OnnxTarget, x: Value, *, permutation: Sequence[int], **_: object) -> Tensor:
    return t.transpose(x, permutation)


def concatenate(t: OnnxTarget, *operands: Value, dimension: int, **_: object) -> Tensor:
    parts = [x for x in operands if not is_zero(x.shape[dimension])] or [operands[0]]
    return t.Concat(*parts, axis=dimension) if len(parts) > 1 else parts[0]


def stack(t: OnnxTarget, *operands: Value, axis: int, **_: object) -> Tensor:
    return t.Concat(*(t.Unsqueeze(x, np.array([axis])) for x in operands), axis=axis)


def unstack(t: OnnxTarget, x: Value, *, axis: int, **_: object) -> list[Tensor]:
    return [t.Gather(x, np.int64(i), axis=axis) for i in range(x.shape[axis])]


def tile(t: OnnxTarget, x: Value, *, reps: Sequence[Size], **_: object) -> Tensor:
    return t.Tile(x, t.shape(reps))


def split(
    t: OnnxTarget, x: Value, *, sizes: Sequence[Size], axis: int, **_: object
) -> Sequence[Tensor]:
    if len(sizes) == 1:
        return [x]
    return t.add_several("Split", len(sizes), x, t.shape(sizes), axis=axis)


def cut(
    t: OnnxTarget,
    x: Value,
    *,
    start_indices: Sequence[Size],
    limit_indices: Sequence[Size],
    strides: Sequence[int] | None,
    **_: object,
) -> Tensor:
    """A Slice of only the axes that it shortens."""
    steps = strides or (1,) * len(x.shape)
    parts = zip(start_indices, limit_indices, steps, x.shape, strict=True)
    axes = [
        i
        for i, (start, limit, step, size) in enumerate(parts)
        if (start, limit, step) != (0, size, 1)
    ]
    if not axes:
        return x
    starts = t.shape([start_indices[i] for i in axes])
    limits = t.shape([limit_indices[i] for i in axes])
    steps = np.array([steps[i] for i in axes], np.int64)
    return t.Slice(x, starts, limits, np.array(axes, np.int64), steps)


def reverse(t: OnnxTarget, x: Value, *, dimensions: Sequence[int], **_: object) -> Tensor:
    """A Slice with a step of -1."""
    ones = np.ones(len(dimensions), np.int64)
    return t.Slice(x, -ones, np.iinfo(np.int64).min * ones, np.array(dimensions, np.int64), -ones)


def pad(
    t: OnnxTarget,
    x: Value,
    value: Value,
    *,
    padding_config: Sequence[tuple[Size, Size, int]],
    **_: object,
) -> Tensor:
    """Padding around the numbers and between them; a negative padding cuts off numbers."""
    if x.dtype == bool or x.dtype.name in WIDER:
        wide, filler = t.cast(x, np.int64), t.cast(value, np.int64)
        return t.to(pad(t, wide, filler, padding_config=padding_config), x.dtype)
    y, sizes = x, list(x.shape)
    for axis, config in enumerate(padding_config):
        if between := config[2]:
            y, sizes[axis] = pad_between(t, y, value, sizes, axis, between)
    around = [config[0] for config in padding_config] + [config[1] for config in padding_config]
    return y if all(map(is_zero, around)) else t.Pad(y, t.shape(around), value)


def pad_between(
    t: OnnxTarget,
    x: Tensor,
    value: Value,
    sizes: Sequence[Size],
    axis: int,
    between: int,
) -> tuple[Tensor, Size]:
    """(x with `between` values between neighbours along an axis, the new size of the axis)."""
    split_sizes = [*sizes[: axis + 1], 1, *sizes[axis + 1 :]]
    pads = np.zeros(2 * len(split_sizes), np.int64)
    pads[len(split_sizes) + axis + 1] = between
    wide = t.Pad(t.reshape(x, split_sizes), pads, value)
    size = sizes[axis] * (between + 1)
    wide = t.reshape(wide, [*sizes[:axis], size, *sizes[axis + 1 :]])
    cut_off = np.array([-between]), np.array([axis], np.int64)
    return t.Slice(wide, np.array([0]), *cut_off), size - between


def iota(
    t: OnnxTarget, *, dimension: int, shape: Sequence[Size], dtype: DTypeLike, **_: object
) -> Tensor:
    """0, 1, 2, ... along an axis."""
    size = shape[dimension]
    along = [size if axis == dimension else 1 for axis in range(len(shape))]
    if is_number(size):
        numbers = constant(np.arange(size, dtype=dtype).reshape(along))
    else:
        count = t.Range(np.int64(0), t.scalar(size), np.int64(1))
        numbers = t.reshape(t.to(count, dtype), along)
    return t.Expand(numbers, t.shape(shape)) if len(shape) > 1 else numbers


def dim_as_value(t: OnnxTarget, *, dim: Size, **_: object) -> Tensor:
    return t.to(t.scalar(dim), t.out[0].dtype)


@dataclass
class Windows:
    """One window of `sizes` per index, in an array of `shape`; gather's result has `rank` axes.

    For a scatter, its updates take the part of the result.
    """

    shape: Shape
    sizes: Sequence[Size]
    indices: Value  # (..., number of indexed axes)
    indexed: Sequence[int]  # the axes of the array that an index refers to
    batched: dict[int, int]  # {axis of the array: axis of the indices} that are paired
    window: dict[int, int]  # {axis of the array: axis of the result}
    rank: int
    mode: GatherScatterMode

    @property
    def index_axes(self) -> list[int]:
        """The axes of the result that come from the indices."""
        return [axis for axis in range(self.rank) if axis not in self.window.values()]

    def limit(self, axis: int) -> Size:
        """The last position at which a window can start."""
        return self.shape[axis] - self.sizes[axis]


def window_starts(t: OnnxTarget, windows: Windows) -> Starts:
    """{axis: the start of each window, a Value or the name of an int64 tensor}."""
    indices, starts = windows.indices, {}
    for i, axis in enumerate(windows.indexed):
        if indices.constant:
            column = np.broadcast_to(indices.data, indices.shape)[..., i]
            starts[axis] = constant(column.astype(np.int64))
        else:
            starts[axis] = t.Gather(t.cast(indices, np.int64), np.asarray(i, np.int64), axis=-1)
    return starts


def clamped(t: OnnxTarget, start: Tensor, limit: Size) -> Tensor:
    """A start, moved so that its window lies inside."""
    if isinstance(start, Value) and start.constant:
        if is_number(limit):
            return constant(np.clip(start.data, 0, limit))
        if not start.data.any():  # the first position is inside, whatever the limit
            return start
    if is_number(limit):
        return t.Clip(start, np.int64(0), np.int64(limit))
    return t.Max(t.Min(start, t.scalar(limit)), np.int64(0))


def inside(t: OnnxTarget, windows: Windows, starts: Starts) -> Tensor | None:
    """Whether each window lies inside, one boolean per index; None where all are known to."""
    result = None
    for axis, start in starts.items():
        limit = windows.limit(axis)
        if (
            isinstance(start, Value)
            and is_number(limit)
            and np.all((start.data >= 0) & (start.data <= limit))
        ):
            continue
        is_below = t.LessOrEqual(start, t.scalar(limit))
        fits = t.And(t.GreaterOrEqual(start, np.int64(0)), is_below)
        result = fits if result is None else t.And(result, fits)
    return result


def flat_positions(t: OnnxTarget, windows: Windows, starts: Starts) -> Tensor:
    """The position of every number of every window in the flattened array, in result order."""
    window_axes = np.array(sorted(windows.window.values()), np.int64)
    terms, stride = [], 1
    for axis in reversed(range(len(windows.shape))):
        parts = []
        if axis in starts:
            start = starts[axis]
            parts.append(t.Unsqueeze(start, window_axes) if len(window_axes) else start)
        if axis in windows.batched:
            index_axis = windows.index_axes[windows.batched[axis]]
            parts.append(range_along(t, windows.shape[axis], index_axis, windows.rank))
        if axis in windows.window:
            result_axis = windows.window[axis]
            parts.append(range_along(t, windows.sizes[axis], result_axis, windows.rank))
        for part in parts:
            terms.append(t.Mul(part, np.int64(stride) if is_number(stride) else t.size(stride)))
        stride = stride * windows.shape[axis]
    return functools.reduce(t.Add, terms)


def range_along(t: OnnxTarget, size: Size, axis: int, rank: int) -> Tensor:
    """0, 1, 2, ... along one axis of an array with this rank."""
    shape = [size if a == axis else 1 for a in range(rank)]
    return t.table["iota"](t, dimension=axis, shape=shape, dtype=np.int64)


def gather(
    t: OnnxTarget,
    x: Value,
    indices: Value,
    *,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[Size],
    mode: GatherScatterMode,
    fill_value: float | None,
    **_: object,
) -> Tensor:
    numbers, out = dimension_numbers, t.out[0]
    batched = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(x.shape)) if axis not in dropped]
    window = dict(zip(kept, numbers.offset_dims, strict=True))
    axes = (numbers.start_index_map, dict(batched), window)
    windows = Windows(x.shape, slice_sizes, indices, *axes, len(out.shape), mode)
    starts = window_starts(t, windows)
    is_inside = inside(t, windows, starts) if mode == GatherScatterMode.FILL_OR_DROP else None
    if mode != GatherScatterMode.FILL_OR_DROP or is_inside is not None:
        # XLA clamps positions that are only promised to be inside; ONNX Runtime raises an error
        starts = {axis: clamped(t, start, windows.limit(axis)) for axis, start in starts.items()}
    result = read(t, x, windows, starts)
    if is_inside is None:
        return result
    if numbers.offset_dims:
        is_inside = t.Unsqueeze(is_inside, np.array(numbers.offset_dims, np.int64))
    result = Value(t.tensor(result), out.shape, out.dtype)
    return where(t, is_inside, result, constant(filler(fill_value, out.dtype)))


def filler(value: float | None, dtype: np.dtype) -> np.ndarray:
    """The result of a read outside of the array."""
    if value is not None:
        return np.asarray(value, dtype)
    if dtype.kind in "iu":
        return np.asarray(np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max, dtype)
    return np.asarray(True if dtype.kind == "b" else np.nan, dtype)


def read(t: OnnxTarget, x: Value, windows: Windows, starts: Starts) -> Tensor:
    """The windows, read by the simplest possible node."""
    if not windows.index_axes and not windows.batched:
        axes = [axis for axis in starts if not is_same(windows.sizes[axis], x.shape[axis])]
        begins = {axis: one_number(t, starts[axis]) for axis in axes}
        part = slice_at(t, x, begins, windows.sizes)
        dropped = [axis for axis in range(len(x.shape)) if axis not in windows.window]
        return t.Squeeze(part, np.array(dropped, np.int64)) if dropped else part
    if len(starts) == 1 and picks_whole_rows(windows, *starts):
        return rows(t, x, windows, *starts.items())
    is_one_per_row = len(windows.batched) + 1 == len(windows.index_axes) == len(x.shape)
    if len(starts) == 1 and not windows.window and is_one_per_row:
        return one_per_row(t, x, windows, *starts.items())
    return t.Gather(t.Reshape(x, np.array([-1])), flat_positions(t, windows, starts))


def picks_whole_rows(windows: Windows, axis: int) -> bool:
    """Whether a window has size 1 along one axis and covers all others."""
    if windows.batched or axis in windows.window:
        return False
    return all(is_same(n, windows.shape[a]) for a, n in enumerate(windows.sizes) if a != axis)


def rows(t: OnnxTarget, x: Value, windows: Windows, item: tuple[int, Tensor]) -> Tensor:
    """Whole rows by a Gather, which puts the axes of the indices in place of the axis it reads."""
    axis, start = item
    order = {}  # {axis of the result: axis of the Gather}
    for i, (_, out) in enumerate(sorted(windows.window.items())):
        order[out] = i if i < axis else i + len(windows.index_axes)
    order |= {out: axis + i for i, out in enumerate(windows.index_axes)}
    return t.transpose(t.Gather(x, start, axis=axis), [order[out] for out in range(windows.rank)])


def one_per_row(t: OnnxTarget, x: Value, windows: Windows, item: tuple[int, Tensor]) -> Tensor:
    """One number for each row."""
    axis, start = item
    left = next(a for a in range(windows.rank) if a not in windows.batched.values())
    order = [left if a == axis else windows.batched[a] for a in range(len(x.shape))]
    return t.transpose(t.GatherElements(x, t.transpose(start, order), axis=axis), np.argsort(order))


def slice_at(t: OnnxTarget, x: Value, begins: Starts, sizes: Sequence[Size]) -> Tensor:
    """A slice of known sizes; `begins` are {axis: tensor with the start}."""
    if not begins:
        return x
    low = t.Concat(*begins.values(), axis=0) if len(begins) > 1 else next(iter(begins.values()))
    length = t.shape([sizes[axis] for axis in begins])
    if isinstance(low, Value) and isinstance(length, np.ndarray):
        high = constant(low.data + length)
    else:
        high = t.Add(low, length)
    return t.Slice(x, low, high, np.array(list(begins), np.int64))


def begin(t: OnnxTarget, start: Value, size: Size, length: Size) -> Tensor:
    """The start of a slice, moved so that the slice ends inside, as a tensor of one number."""
    return one_number(t, clamped(t, t.cast(start, np.int64), size - length))


def one_number(t: OnnxTarget, start: Tensor) -> Tensor:
    """A start as a tensor with one axis."""
    if isinstance(start, Value) and start.constant:
        return constant(start.data.reshape(1))
    return t.Reshape(start, np.array([1]))


def dynamic_slice(
    t: OnnxTarget, x: Value, *starts: Value, slice_sizes: Sequence[Size], **_: object
) -> Tensor:
    begins = {
        axis: begin(t, start, x.shape[axis], size)
        for axis, (start, size) in enumerate(zip(starts, slice_sizes, strict=True))
        if not is_same(size, x.shape[axis])
    }
    return slice_at(t, x, begins, slice_sizes)


def dynamic_update_slice(
    t: OnnxTarget, x: Value, update: Value, *starts: Value, **_: object
) -> Tensor:
    """Concatenates what comes before, the update and what comes after, one axis at a time."""
    sizes = enumerate(zip(x.shape, update.shape, strict=True))
    axes = [axis for axis, (whole, part) in sizes if not is_same(whole, part)]
    if not axes:
        return update
    axis, size = axes[0], update.shape[axes[0]]
    low = begin(t, starts[axis], x.shape[axis], size)
    high, along = t.Add(low, t.shape([size])), np.array([axis], np.int64)
    if len(axes) > 1:
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        part = Value(t.Slice(x, low, high, along), shape, x.dtype)
        middle = dynamic_update_slice(t, part, update, *starts)
    else:
        middle = update
    before = t.Slice(x, np.array([0]), low, along)
    after = t.Slice(x, high, np.array([np.iinfo(np.int64).max]), along)
    return t.Concat(before, middle, after, axis=axis)


def scatter(reduction: str | None) -> Lowering:
    """Updates replace numbers of the flattened array, or are combined with them."""

    def function(
        t: OnnxTarget,
        x: Value,
        indices: Value,
        updates: Value,
        *,
        dimension_numbers: lax.ScatterDimensionNumbers,
        mode: GatherScatterMode,
        **_: object,
    ) -> Tensor:
        windows = windows_of(x, indices, updates, dimension_numbers, mode)
        starts, is_inside = window_starts(t, windows), None
        if mode == GatherScatterMode.CLIP:
            starts = {axis: clamped(t, x, windows.limit(axis)) for axis, x in starts.items()}
        elif mode == GatherScatterMode.FILL_OR_DROP:
            is_inside = inside(t, windows, starts)
        positions = flat_positions(t, windows, starts)
        if len(updates.shape):
            positions = t.Expand(positions, t.shape(updates.shape))
        else:
            positions = t.Reshape(positions, np.array([1]))
        if is_inside is not None:
            if windows.window:
                axes = np.array(sorted(windows.window.values()), np.int64)
                is_inside = t.Unsqueeze(is_inside, axes)
            positions = t.Where(is_inside, positions, t.size(product(x.shape)))
        drops = is_inside is not None
        return wide(t, lambda a, b: write(t, a, b, positions, reduction, drops), x, updates)

    return function


def windows_of(
    x: Value,
    indices: Value,
    updates: Value,
    numbers: lax.ScatterDimensionNumbers,
    mode: GatherScatterMode,
) -> Windows:
    batched = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(x.shape)) if axis not in dropped]
    window = dict(zip(kept, numbers.update_window_dims, strict=True))
    sizes = [updates.shape[window[axis]] if axis in window else 1 for axis in range(len(x.shape))]
    axes = (numbers.scatter_dims_to_operand_dims, dict(batched), window)
    return Windows(x.shape, sizes, indices, *axes, len(updates.shape), mode)


def write(
    t: OnnxTarget, x: Value, updates: Value, positions: Tensor, reduction: str | None, drops: bool
) -> Tensor:
    """The array with the updates; dropped updates are written to one extra element at the end."""
    flat, one = t.Reshape(x, np.array([-1])), np.array([1], np.int64)
    if drops:
        flat = t.Pad(flat, np.array([0, 1], np.int64))
    lines = t.Reshape(positions, np.array([-1])), t.Reshape(updates, np.array([-1]))
    flat = t.ScatterElements(flat, *lines, axis=0, reduction=reduction)
    if drops:
        flat = t.Slice(flat, 0 * one, -one)
    return t.Reshape(flat, t.shape(x.shape))


def scatter_subtract(
    t: OnnxTarget, x: Value, indices: Value, updates: Value, **params: Any
) -> Tensor:
    negative = Value(t.Neg(updates), updates.shape, updates.dtype)
    return scatter("add")(t, x, indices, negative, **params)


PRIMITIVES = {
    "reshape": reshape,
    "squeeze": squeeze,
    "expand_dims": expand_dims,
    "transpose": transpose,
    "concatenate": concatenate,
    "stack": stack,
    "unstack": unstack,
    "tile": tile,
    "split": split,
    "slice": cut,
    "rev": reverse,
    "pad": pad,
    "iota": iota,
    "dim_as_value": dim_as_value,
    "gather": gather,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "scatter": scatter(None),
    "scatter-add": scatter("add"),
    "scatter-sub": scatter_subtract,
    "scatter-mul": scatter("mul"),
    "scatter-max": scatter("max"),
    "scatter-min": scatter("min"),
}
