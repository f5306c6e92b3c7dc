"""Ops that move numbers, or compute them from sizes."""

import numpy as np

from inference.lowering.dims import is_number, is_zero
from inference.lowering.onnx_ops.elementwise import WIDER
from inference.lowering.value import Value, constant


def reshape(t, x, *, new_sizes, dimensions=None, **_):
    """x in another shape, its axes read in the order of `dimensions`."""
    if dimensions is not None:
        order = tuple(dimensions)
        shape = [x.shape[axis] for axis in order]
        x = t.walk.value(t.transpose(x, order), Value("", shape, x.dtype))
    return t.reshape(x, new_sizes)


def squeeze(t, x, *, dimensions, **_):
    return t.Squeeze(x, np.array(dimensions, np.int64))


def expand_dims(t, x, *, dimensions, **_):
    return t.Unsqueeze(x, np.array(dimensions, np.int64))


def transpose(t, x, *, permutation, **_):
    return t.transpose(x, permutation)


def concatenate(t, *operands, dimension, **_):
    parts = [x for x in operands if not is_zero(x.shape[dimension])] or operands[:1]
    return t.Concat(*parts, axis=dimension) if len(parts) > 1 else parts[0]


def stack(t, *operands, axis, **_):
    return t.Concat(*(t.Unsqueeze(x, np.array([axis])) for x in operands), axis=axis)


def unstack(t, x, *, axis, **_):
    return [t.Gather(x, np.int64(i), axis=axis) for i in range(x.shape[axis])]


def tile(t, x, *, reps, **_):
    return t.Tile(x, t.shape(reps))


def split(t, x, *, sizes, axis, **_):
    if len(sizes) == 1:
        return [x]
    return t.Split(x, t.shape(sizes), axis=axis, outputs=len(sizes))


def cut(t, x, *, start_indices, limit_indices, strides, **_):
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


def reverse(t, x, *, dimensions, **_):
    """A Slice with a step of -1."""
    ones = np.ones(len(dimensions), np.int64)
    return t.Slice(x, -ones, np.iinfo(np.int64).min * ones, np.array(dimensions, np.int64), -ones)


def pad(t, x, value, *, padding_config, **_):
    """Padding around the numbers and between them; a negative padding cuts off numbers."""
    if x.dtype == bool or x.dtype.name in WIDER:
        dtype, x, value = x.dtype, t.cast(x, np.int64), t.cast(value, np.int64)
        return t.to(pad(t, x, value, padding_config=padding_config), dtype)
    sizes = list(x.shape)
    for axis, (_, _, between) in enumerate(padding_config):
        if between:
            x, sizes[axis] = pad_between(t, x, value, sizes, axis, between)
    around = [low for low, _, _ in padding_config] + [high for _, high, _ in padding_config]
    return x if all(map(is_zero, around)) else t.Pad(x, t.shape(around), value)


def pad_between(t, x, value, sizes, axis, between):
    """(x with `between` values between neighbours along an axis, the new size of the axis)."""
    split_sizes = [*sizes[: axis + 1], 1, *sizes[axis + 1 :]]
    pads = np.zeros(2 * len(split_sizes), np.int64)
    pads[len(split_sizes) + axis + 1] = between
    wide = t.Pad(t.reshape(x, split_sizes), pads, value)
    size = sizes[axis] * (between + 1)
    wide = t.reshape(wide, [*sizes[:axis], size, *sizes[axis + 1 :]])
    cut_off = np.array([-between]), np.array([axis], np.int64)
    return t.Slice(wide, np.array([0]), *cut_off), size - between


def iota(t, *, dimension, shape, dtype, **_):
    """0, 1, 2, ... along an axis."""
    size = shape[dimension]
    along = [size if axis == dimension else 1 for axis in range(len(shape))]
    if is_number(size):
        numbers = constant(np.arange(size, dtype=dtype).reshape(along))
    else:
        scalar = t.Squeeze(t.size(size), np.array([0]))
        numbers = t.reshape(t.to(t.Range(np.int64(0), scalar, np.int64(1)), dtype), along)
    return t.Expand(numbers, t.shape(shape)) if len(shape) > 1 else numbers


def dim_as_value(t, *, dim, **_):
    return t.to(t.Squeeze(t.size(dim), np.array([0])), t.out[0].dtype)


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
}
