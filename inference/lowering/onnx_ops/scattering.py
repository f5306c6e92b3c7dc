"""Writes at positions that are computed while the model runs."""

import numpy as np
from jax.lax import GatherScatterMode

from inference.lowering.onnx_ops.dims import product
from inference.lowering.onnx_ops.elementwise import wide
from inference.lowering.onnx_ops.positions import (
    Windows,
    clamped,
    flat_positions,
    inside,
    window_starts,
)
from inference.lowering.value import Value


def scatter(reduction):
    """Updates replace numbers of the flattened array, or are combined with them."""

    def function(t, x, indices, updates, *, dimension_numbers, mode, **_):
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
            positions = t.Reshape(positions, [1])
        if is_inside is not None:
            if windows.window:
                axes = np.array(sorted(windows.window.values()), np.int64)
                is_inside = t.Unsqueeze(is_inside, axes)
            positions = t.Where(is_inside, positions, t.size(product(x.shape)))
        drops = is_inside is not None
        return wide(t, lambda a, b: write(t, a, b, positions, reduction, drops), x, updates)

    return function


def windows_of(x, indices, updates, numbers, mode):
    batched = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(x.shape)) if axis not in dropped]
    window = dict(zip(kept, numbers.update_window_dims, strict=True))
    sizes = [updates.shape[window[axis]] if axis in window else 1 for axis in range(len(x.shape))]
    axes = (numbers.scatter_dims_to_operand_dims, dict(batched), window)
    return Windows(x.shape, sizes, indices, *axes, len(updates.shape), mode)


def write(t, x, updates, positions, reduction, drops):
    """The array with the updates; dropped updates are written to one extra element at the end."""
    flat, one = t.Reshape(x, [-1]), np.array([1], np.int64)
    if drops:
        flat = t.Pad(flat, np.array([0, 1], np.int64))
    positions, updates = t.Reshape(positions, [-1]), t.Reshape(updates, [-1])
    flat = t.ScatterElements(flat, positions, updates, axis=0, reduction=reduction)
    if drops:
        flat = t.Slice(flat, 0 * one, -one)
    return t.Reshape(flat, t.shape(x.shape))


def scatter_subtract(t, x, indices, updates, **params):
    negative = Value(t.Neg(updates), updates.shape, updates.dtype)
    return scatter("add")(t, x, indices, negative, **params)


PRIMITIVES = {
    "scatter": scatter(None),
    "scatter-add": scatter("add"),
    "scatter-sub": scatter_subtract,
    "scatter-mul": scatter("mul"),
    "scatter-max": scatter("max"),
    "scatter-min": scatter("min"),
}
