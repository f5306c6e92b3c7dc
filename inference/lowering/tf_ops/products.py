"""Products of arrays over any of their axes."""

import math

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.elementwise import is_float, widened


def dot_general(target, x, y, *, dimension_numbers, **_):
    """The common axes first, then the free ones of x, then those of y."""
    over, common = dimension_numbers
    out = target.out[0]
    x, y = (as_type(each, out.dtype) for each in (x, y))
    if (
        isinstance(x, np.ndarray) and not common[0]
    ):  # TFLite's products have their constant on the right
        free = len(x.shape) - len(over[0])
        swapped = product(target, y, x, over[::-1], common, [*out.shape[free:], *out.shape[:free]])
        rank = len(out.shape)
        result = moved(swapped, [*range(rank - free, rank), *range(rank - free)])
    else:
        result = product(target, x, y, over, common, out.shape)
    return tf.cast(result, out.dtype)


def as_type(x, dtype):
    return x.astype(dtype) if isinstance(x, np.ndarray) else tf.cast(x, dtype)


def product(target, x, y, over, common, shape):
    """As matrices, batches of them where axes are common."""
    x_free = [i for i in range(len(x.shape)) if i not in (*over[0], *common[0])]
    y_free = [i for i in range(len(y.shape)) if i not in (*over[1], *common[1])]
    batch, inner, free = (
        list(shape[: len(common[0])]),
        joint(x.shape[i] for i in over[0]),
        len(x_free),
    )
    x, y = moved(x, (*common[0], *x_free, *over[0])), moved(y, (*common[1], *over[1], *y_free))
    columns = list(shape[len(batch) + free :])
    y = reshaped(target, y, [*batch, inner, joint(columns)])
    if batch:
        x = reshaped(target, x, [*batch, joint(shape[len(batch) : len(batch) + free]), inner])
    elif len(over[0]) != 1 or not x_free:  # else the free axes stay as they are
        x = reshaped(target, x, [*(shape[:free] or [1]), inner])
    return reshaped(target, tf.matmul(x, y) if is_float(x) else whole_product(x, y), shape)


def joint(sizes):
    """-1 where one is free, for a reshape to find."""
    sizes = list(sizes)
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else -1


def whole_product(x, y):
    """TFLite multiplies matrices of floats alone."""
    return tf.reduce_sum(x[..., :, None] * tf.expand_dims(y, -3), -2)


def moved(x, order):
    if list(order) == sorted(order):
        return x
    return np.transpose(x, order) if isinstance(x, np.ndarray) else tf.transpose(x, order)


def reshaped(target, x, shape):
    if isinstance(x, np.ndarray):
        return x.reshape(shape)
    known = [None if not isinstance(d, int) else d for d in shape]
    return x if x.shape.as_list() == known else tf.reshape(x, target.new_sizes(shape))


PRIMITIVES = {"dot_general": widened(dot_general)}
