"""What moves numbers about without changing them."""

import itertools

import numpy as np
import tensorflow as tf


def reshape(target, x, *, new_sizes, **_):
    return tf.reshape(x, target.new_sizes(new_sizes))


def squeeze(target, x, *, dimensions):
    return tf.reshape(x, target.new_sizes(target.out[0].shape))


def transpose(target, x, *, permutation):
    return tf.transpose(x, permutation)


def reverse(target, x, *, dimensions):
    for axis in dimensions:  # TFLite's takes one axis
        x = tf.reverse(x, [axis])
    return x


def concatenate(target, *operands, dimension):
    return tf.concat(operands, dimension)


def stack(target, *operands, axis, **_):
    return tf.stack(operands, axis)


def unstack(target, x, *, axis, **_):
    return tf.unstack(x, axis=axis)


def tile(target, x, *, reps):
    return tf.tile(x, reps)


def split(target, x, *, sizes, axis):
    edges = np.cumsum([0, *sizes])
    return [cut(target, x, {axis: (int(a), int(b), 1)}) for a, b in itertools.pairwise(edges)]


def slice_(target, x, *, start_indices, limit_indices, strides):
    """To the end of an axis nothing need be known of its size."""
    ends = [
        None if end == size else target.size(end)
        for end, size in zip(limit_indices, target.given[0], strict=True)
    ]
    steps = strides or (1,) * len(ends)
    return x[
        tuple(
            slice(target.size(a), b, step)
            for a, b, step in zip(start_indices, ends, steps, strict=True)
        )
    ]


def cut(target, x, where):
    return x[tuple(slice(*where.get(axis, (None,))) for axis in range(len(x.shape)))]


def pad(target, x, value, *, padding_config):
    """Numbers around and between; where there are fewer than none, some are cut away."""
    for axis, (_, _, between) in enumerate(padding_config):
        x = spread(target, x, value, axis, between) if between else x
    where = {
        i: (max(-low, 0), high if high < 0 else None)
        for i, (low, high, _) in enumerate(padding_config)
    }
    x = cut(target, x, where) if any(low < 0 or high < 0 for low, high, _ in padding_config) else x
    rims = [(max(low, 0), max(high, 0)) for low, high, _ in padding_config]
    return tf.pad(x, rims, constant_values=value) if any(map(any, rims)) else x


def spread(target, x, value, axis, between):
    """`between` times the value after each number but the last."""
    size = x.shape[axis]
    wide = tf.pad(
        tf.expand_dims(x, axis + 1),
        [(0, between if i == axis + 1 else 0) for i in range(len(x.shape) + 1)],
        constant_values=value,
    )
    shape = [-1 if n is None else n for n in x.shape]
    shape[axis] = size * (between + 1)
    return cut(target, tf.reshape(wide, shape), {axis: (0, (size - 1) * (between + 1) + 1)})


def iota(target, *, shape, dimension, **_):
    dtype = target.out[0].dtype
    count = tf.range(target.size(shape[dimension]), dtype=tf.int32)
    line = tf.reshape(count, [-1 if i == dimension else 1 for i in range(len(shape))])
    return tf.cast(tf.broadcast_to(line, target.sizes(shape)), dtype)


def dim_as_value(target, *, dim):
    return tf.cast(target.size(dim), target.out[0].dtype)


PRIMITIVES = {
    **{
        "reshape": reshape,
        "squeeze": squeeze,
        "transpose": transpose,
        "rev": reverse,
        "concatenate": concatenate,
    },
    **{
        "tile": tile,
        "stack": stack,
        "unstack": unstack,
        "split": split,
        "slice": slice_,
        "pad": pad,
        "iota": iota,
        "dim_as_value": dim_as_value,
    },
}
