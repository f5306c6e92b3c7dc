"""Reading at places that are known only when the model runs."""

import numpy as np
from jax.lax import GatherScatterMode

from inference.lowering.onnx_ops.dims import is_number
from inference.lowering.onnx_ops.positions import Windows, clamped, flat_positions, inside, starts
from inference.lowering.value import Value


def gather(t, x, indices, *, dimension_numbers, slice_sizes, mode, fill_value, **_):
    numbers, out = dimension_numbers, t.out[0]
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(x.shape)) if axis not in dropped]
    batched = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    window = dict(zip(kept, numbers.offset_dims, strict=True))
    about = (numbers.start_index_map, batched, window, len(out.shape), mode)
    windows = Windows(x.shape, slice_sizes, indices, *about)
    found = starts(t, windows)
    is_inside = inside(t, windows, found) if mode == GatherScatterMode.FILL_OR_DROP else None
    if mode == GatherScatterMode.CLIP or is_inside is not None:
        found = {axis: clamped(t, start, windows.limit(axis)) for axis, start in found.items()}
    result = read(t, x, windows, found)
    if is_inside is None:
        return result
    mask = (
        t.Unsqueeze(is_inside, np.array(numbers.offset_dims, np.int64))
        if numbers.offset_dims
        else is_inside
    )
    return t.Where(mask, result, filling(fill_value, out.dtype))


def filling(value, dtype):
    """What is read outside."""
    if value is not None:
        return np.asarray(value, dtype)
    if dtype.kind in "iu":
        return np.asarray(np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max, dtype)
    return np.asarray(True if dtype.kind == "b" else np.nan, dtype)


def read(t, x, windows, found):
    """The windows, by the simplest node that reads them."""
    if not windows.listed and not windows.batched:
        axes = [axis for axis in found if not same(windows.sizes[axis], x.shape[axis])]
        part = slice_at(t, x, {axis: t.Reshape(found[axis], [1]) for axis in axes}, windows.sizes)
        gone = [axis for axis in range(len(x.shape)) if axis not in windows.window]
        return t.Squeeze(part, np.array(gone, np.int64)) if gone else part
    if len(found) == 1 and is_whole_but(windows, *found):
        return taken(t, x, windows, *found.items())
    if (
        len(found) == 1
        and not windows.window
        and len(windows.batched) == len(windows.listed) - 1 == len(x.shape) - 1
    ):
        return taken_along(t, x, windows, *found.items())
    return t.Gather(t.Reshape(x, [-1]), flat_positions(t, windows, found))


def is_whole_but(windows, axis):
    """Whether a window is the whole array but along one axis, of which it is one number."""
    whole = all(same(size, windows.shape[a]) for a, size in enumerate(windows.sizes) if a != axis)
    return whole and not windows.batched and axis not in windows.window


def taken(t, x, windows, item):
    """Whole rows: ONNX puts the axes of the indices where the axis was."""
    axis, start = item
    listed = len(windows.listed)
    order = {}
    for place, (_, out) in enumerate(sorted(windows.window.items())):
        order[out] = place if place < axis else place + listed
    order |= {out: axis + place for place, out in enumerate(windows.listed)}
    return t.transpose(t.Gather(x, start, axis=axis), [order[out] for out in range(windows.rank)])


def taken_along(t, x, windows, item):
    """One number for each row."""
    axis, start = item
    left = next(a for a in range(windows.rank) if a not in windows.batched.values())
    order = [left if a == axis else windows.batched[a] for a in range(len(x.shape))]
    return t.transpose(t.GatherElements(x, t.transpose(start, order), axis=axis), np.argsort(order))


def slice_at(t, x, begins, sizes):
    """A slice of these sizes from places that are known when the model runs."""
    if not begins:
        return x
    low = together(t, list(begins.values()))
    return t.Slice(
        x,
        low,
        t.Add(low, t.shape([sizes[axis] for axis in begins])),
        np.array(list(begins), np.int64),
    )


def together(t, parts):
    return parts[0] if len(parts) == 1 else t.Concat(*parts, axis=0)


def begin(t, start, size, length):
    """Where a slice begins, moved so that it ends inside, as a tensor of one number."""
    wide = t.cast(start, np.int64)
    return t.Reshape(clamped(t, wide, size - length), [1])


def same(a, b):
    return (is_number(a) and is_number(b) and a == b) or str(a) == str(b)


def dynamic_slice(t, x, *begins, slice_sizes, **_):
    begins = {
        axis: begin(t, start, x.shape[axis], size)
        for axis, (start, size) in enumerate(zip(begins, slice_sizes, strict=True))
        if not same(size, x.shape[axis])
    }
    return slice_at(t, x, begins, slice_sizes)


def dynamic_update_slice(t, x, update, *begins, **_):
    """Along one axis what comes before, the update, and what comes after; along more, the same within that slice."""
    axes = [
        axis
        for axis, (a, b) in enumerate(zip(x.shape, update.shape, strict=True))
        if not same(a, b)
    ]
    if not axes:
        return update
    axis, size = axes[0], update.shape[axes[0]]
    low = begin(t, begins[axis], x.shape[axis], size)
    high, along = t.Add(low, t.shape([size])), np.array([axis], np.int64)
    if len(axes) > 1:
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        update = dynamic_update_slice(
            t, Value(t.Slice(x, low, high, along), shape, x.dtype), update, *begins
        )
    before = t.Slice(x, np.array([0]), low, along)
    after = t.Slice(x, high, np.array([np.iinfo(np.int64).max]), along)
    return t.Concat(before, update, after, axis=axis)


PRIMITIVES = {
    "gather": gather,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}
