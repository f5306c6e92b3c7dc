"""Writing at places that are known only when the model runs."""

import numpy as np
from jax.lax import GatherScatterMode

from inference.lowering.onnx_ops.elementwise import wide
from inference.lowering.onnx_ops.positions import Windows, clamped, flat_positions, inside, starts
from inference.lowering.value import Value


def scatter(reduction):
    """Updates take the place of numbers, or are combined with them, in the flattened array."""

    def function(t, x, indices, updates, *, dimension_numbers, mode, **_):
        windows = reached(x, indices, updates, dimension_numbers, mode)
        found, outside = starts(t, windows), None
        if mode == GatherScatterMode.CLIP:
            found = {axis: clamped(t, start, windows.limit(axis)) for axis, start in found.items()}
        elif mode == GatherScatterMode.FILL_OR_DROP:
            outside = inside(t, windows, found)
        places = flat_positions(t, windows, found)
        places = (
            t.Expand(places, t.shape(updates.shape))
            if len(updates.shape)
            else t.Reshape(places, [1])
        )
        if outside is not None:
            kept = (
                t.Unsqueeze(outside, np.array(sorted(windows.window.values()), np.int64))
                if windows.window
                else outside
            )
            places = t.Where(kept, places, t.size(count(x.shape)))
        return wide(
            t, lambda a, b: written(t, a, b, places, reduction, outside is not None), x, updates
        )

    return function


def reached(x, indices, updates, numbers, mode):
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(x.shape)) if axis not in dropped]
    window = dict(zip(kept, numbers.update_window_dims, strict=True))
    sizes = [updates.shape[window[axis]] if axis in window else 1 for axis in range(len(x.shape))]
    batched = dict(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    return Windows(
        x.shape,
        sizes,
        indices,
        numbers.scatter_dims_to_operand_dims,
        batched,
        window,
        len(updates.shape),
        mode,
    )


def written(t, x, updates, places, reduction, drops):
    """The array with the updates at these places; what is dropped goes to one more place at the end."""
    flat, one = t.Reshape(x, [-1]), np.array([1], np.int64)
    if drops:
        flat = t.Pad(flat, np.array([0, 1], np.int64))
    flat = t.ScatterElements(
        flat, t.Reshape(places, [-1]), t.Reshape(updates, [-1]), axis=0, reduction=reduction
    )
    if drops:
        flat = t.Slice(flat, 0 * one, -one)
    return t.Reshape(flat, t.shape(x.shape))


def count(shape):
    size = 1
    for dimension in shape:
        size = size * dimension
    return size


def scatter_subtract(t, x, indices, updates, **params):
    return scatter("add")(
        t, x, indices, Value(t.Neg(updates), updates.shape, updates.dtype), **params
    )


PRIMITIVES = {
    "scatter": scatter(None),
    "scatter-add": scatter("add"),
    "scatter-sub": scatter_subtract,
    "scatter-mul": scatter("mul"),
    "scatter-max": scatter("max"),
    "scatter-min": scatter("min"),
}
