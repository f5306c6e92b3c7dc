"""Ops that move numbers without changing them."""

import itertools

import tensorflow as tf

from inference.lowering.tf_ops.elementwise import WIDER_TO_MOVE, widened
from inference.lowering.tf_ops.indexing import shape_of, size_of
from inference.lowering.value import is_one


def reshape(target, x, *, new_sizes, dimensions=None, **_):
    """x in another shape, its axes read in the order of `dimensions`."""
    x = x if dimensions is None else tf.transpose(x, dimensions)
    return tf.reshape(x, target.new_sizes(new_sizes))


def squeeze(target, x, *, dimensions):
    return tf.reshape(x, target.new_sizes(target.out[0].shape))


def transpose(target, x, *, permutation):
    return tf.transpose(x, permutation)


def reverse(target, x, *, dimensions):
    for axis in dimensions:  # TFLite reverses one axis at a time
        x = tf.reverse(x, [axis])
    return x


def concatenate(target, *operands, dimension):
    parts = [x for x in operands if x.shape[dimension] != 0]  # TFLite does not slice to nothing
    return tf.concat(parts or operands[:1], dimension)


def stack(target, *operands, axis, **_):
    return tf.stack(operands, axis)


def unstack(target, x, *, axis, **_):
    return tf.unstack(x, axis=axis)


def tile(target, x, *, reps):
    """Copies by a broadcast: the converter drops a Tile of a free axis before an addition."""
    shape, wide = [], []
    for size, count in zip(target.operand_shapes[0], reps, strict=True):
        copies = [] if is_one(count) else [count]
        shape += [*(1 for _ in copies), size]
        wide += [*copies, size]
    x = tf.broadcast_to(tf.reshape(x, target.new_sizes(shape)), target.sizes(wide))
    return tf.reshape(x, target.new_sizes(target.out[0].shape))


def split(target, x, *, sizes, axis):
    edges = map(target.size, itertools.accumulate(sizes, initial=0))
    return [cut(x, {axis: (start, end, 1)}) for start, end in itertools.pairwise(edges)]


def slice_(target, x, *, start_indices, limit_indices, strides):
    """A slice; one that reaches the end of an axis does not need the axis's size."""
    limits = zip(limit_indices, target.operand_shapes[0], strict=True)
    ends = [None if end == size else target.size(end) for end, size in limits]
    steps = strides or (1,) * len(ends)
    parts = zip(start_indices, ends, steps, strict=True)
    x = tf.convert_to_tensor(x) if any(map(tf.is_tensor, ends)) else x  # no slice of an array
    return x[tuple(slice(target.size(start), end, step) for start, end, step in parts)]


def cut(x, parts):
    """x[...] with a slice of these arguments, {axis: (start, stop)}."""
    return x[tuple(slice(*parts.get(axis, (None,))) for axis in range(len(x.shape)))]


def pad(target, x, value, *, padding_config):
    """Padding around the numbers and between them; a negative padding cuts off numbers, also of the
    padding on the other side."""
    for axis, (_, _, between) in enumerate(padding_config):
        x = pad_between(x, value, axis, between) if between else x
    pads = [[low, high] for low, high, _ in padding_config]
    x = pad_around(target, x, value, [[0 if is_negative(n) else n for n in pair] for pair in pads])
    if not any(is_negative(size) for pair in pads for size in pair):
        return x
    kept = ((cut_off(low), -cut_off(high) or None) for low, high in pads)
    return cut(x, dict(enumerate(kept)))


def pad_around(target, x, value, pads):
    """Padding with these numbers of values before and after each axis."""
    if all(isinstance(size, int) for pair in pads for size in pair):
        return tf.pad(x, pads, constant_values=value) if any(map(any, pads)) else x
    shape = [
        n + sum(pair) if n is not None and all(isinstance(size, int) for size in pair) else None
        for n, pair in zip(x.shape, pads, strict=True)
    ]
    x = tf.pad(x, tf.stack([target.sizes(pair) for pair in pads]), constant_values=value)
    x.set_shape(shape)
    return x


def is_negative(size):
    """Whether a padding cuts numbers off; one that depends on a free size adds some."""
    return isinstance(size, int) and size < 0


def cut_off(size):
    return -size if is_negative(size) else 0


def pad_between(x, value, axis, between):
    """x with `between` values between neighbours along an axis."""
    size = size_of(x, axis)
    pads = [(0, between if i == axis + 1 else 0) for i in range(len(x.shape) + 1)]
    wide = tf.pad(tf.expand_dims(x, axis + 1), pads, constant_values=value)
    shape = [size_of(x, i) for i in range(len(x.shape))]
    shape[axis] = size * (between + 1)
    return cut(tf.reshape(wide, shape_of(shape)), {axis: (0, (size - 1) * (between + 1) + 1)})


def iota(target, *, shape, dimension, **_):
    dtype = target.out[0].dtype
    count = tf.range(target.size(shape[dimension]), dtype=tf.int32)
    line = tf.reshape(count, [-1 if i == dimension else 1 for i in range(len(shape))])
    return tf.cast(tf.broadcast_to(line, target.sizes(shape)), dtype)


def dim_as_value(target, *, dim):
    return tf.cast(target.size(dim), target.out[0].dtype)


PRIMITIVES = {
    "reshape": reshape,
    "squeeze": squeeze,
    "transpose": widened(transpose, WIDER_TO_MOVE),
    "rev": widened(reverse),
    "concatenate": concatenate,
    "tile": widened(tile),
    "stack": stack,
    "unstack": widened(unstack, WIDER_TO_MOVE),
    "split": widened(split, WIDER_TO_MOVE),
    "slice": widened(slice_, WIDER_TO_MOVE),
    "pad": widened(pad),  # there is no padding of uint8
    "iota": iota,
    "dim_as_value": dim_as_value,
}
