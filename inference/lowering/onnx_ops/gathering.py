"""Reads at positions that are computed while the model runs."""

import numpy as np
from jax.lax import GatherScatterMode

from inference.lowering.onnx_ops.dims import is_same
from inference.lowering.onnx_ops.elementwise import where
from inference.lowering.onnx_ops.positions import (
    Windows,
    clamped,
    flat_positions,
    inside,
    window_starts,
)
from inference.lowering.value import Value, constant


def gather(t, x, indices, *, dimension_numbers, slice_sizes, mode, fill_value, **_):
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


def filler(value, dtype):
    """The result of a read outside of the array."""
    if value is not None:
        return np.asarray(value, dtype)
    if dtype.kind in "iu":
        return np.asarray(np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max, dtype)
    return np.asarray(True if dtype.kind == "b" else np.nan, dtype)


def read(t, x, windows, starts):
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
    return t.Gather(t.Reshape(x, [-1]), flat_positions(t, windows, starts))


def picks_whole_rows(windows, axis):
    """Whether a window has size 1 along one axis and covers all others."""
    if windows.batched or axis in windows.window:
        return False
    return all(is_same(n, windows.shape[a]) for a, n in enumerate(windows.sizes) if a != axis)


def rows(t, x, windows, item):
    """Whole rows by a Gather, which puts the axes of the indices in place of the axis it reads."""
    axis, start = item
    order = {}  # {axis of the result: axis of the Gather}
    for i, (_, out) in enumerate(sorted(windows.window.items())):
        order[out] = i if i < axis else i + len(windows.index_axes)
    order |= {out: axis + i for i, out in enumerate(windows.index_axes)}
    return t.transpose(t.Gather(x, start, axis=axis), [order[out] for out in range(windows.rank)])


def one_per_row(t, x, windows, item):
    """One number for each row."""
    axis, start = item
    left = next(a for a in range(windows.rank) if a not in windows.batched.values())
    order = [left if a == axis else windows.batched[a] for a in range(len(x.shape))]
    return t.transpose(t.GatherElements(x, t.transpose(start, order), axis=axis), np.argsort(order))


def slice_at(t, x, begins, sizes):
    """A slice of known sizes; `begins` are {axis: tensor with the start}."""
    if not begins:
        return x
    low = t.Concat(*begins.values(), axis=0) if len(begins) > 1 else next(iter(begins.values()))
    length = t.shape([sizes[axis] for axis in begins])
    is_known = isinstance(low, Value) and isinstance(length, np.ndarray)
    high = constant(low.data + length) if is_known else t.Add(low, length)
    return t.Slice(x, low, high, np.array(list(begins), np.int64))


def begin(t, start, size, length):
    """The start of a slice, moved so that the slice ends inside, as a tensor of one number."""
    return one_number(t, clamped(t, t.cast(start, np.int64), size - length))


def one_number(t, start):
    """A start as a tensor with one axis."""
    if isinstance(start, Value) and start.constant:
        return constant(start.data.reshape(1))
    return t.Reshape(start, [1])


def dynamic_slice(t, x, *starts, slice_sizes, **_):
    begins = {
        axis: begin(t, start, x.shape[axis], size)
        for axis, (start, size) in enumerate(zip(starts, slice_sizes, strict=True))
        if not is_same(size, x.shape[axis])
    }
    return slice_at(t, x, begins, slice_sizes)


def dynamic_update_slice(t, x, update, *starts, **_):
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
        update = dynamic_update_slice(t, part, update, *starts)
    before = t.Slice(x, np.array([0]), low, along)
    after = t.Slice(x, high, np.array([np.iinfo(np.int64).max]), along)
    return t.Concat(before, update, after, axis=axis)


PRIMITIVES = {
    "gather": gather,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}
