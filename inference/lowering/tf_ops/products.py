"""Products of arrays over any of their axes."""

import math

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.elementwise import is_float, widened


def dot_general(target, x, y, *, dimension_numbers, **_):
    """A product; the result has the shared axes first, then the free axes of x, then those of y."""
    summed, shared = dimension_numbers
    out, shapes = target.out[0], target.operand_shapes
    x, y = as_dtype(x, out.dtype), as_dtype(y, out.dtype)
    if isinstance(x, np.ndarray) and not shared[0]:
        # TFLite's products have their constant on the right
        free, rank = len(x.shape) - len(summed[0]), len(out.shape)
        shape = [*out.shape[free:], *out.shape[:free]]
        swapped = product(target, y, x, shapes[::-1], summed[::-1], shared, shape)
        result = transposed(swapped, [*range(rank - free, rank), *range(rank - free)])
    else:
        result = product(target, x, y, shapes, summed, shared, out.shape)
    return tf.cast(result, out.dtype)


def as_dtype(x, dtype):
    return x.astype(dtype) if isinstance(x, np.ndarray) else tf.cast(x, dtype)


def product(target, x, y, shapes, summed, shared, shape):
    """One matrix product per index of the shared axes."""
    x_free = [i for i in range(len(x.shape)) if i not in (*summed[0], *shared[0])]
    y_free = [i for i in range(len(y.shape)) if i not in (*summed[1], *shared[1])]
    x = transposed(x, (*shared[0], *x_free, *summed[0]))
    y = transposed(y, (*shared[1], *summed[1], *y_free))
    first, last = len(shared[0]), len(shared[0]) + len(x_free)  # the free axes of x in the result
    batch, inner = list(shape[:first]), math.prod(shapes[0][i] for i in summed[0])
    y = reshaped(target, y, [*batch, inner, math.prod(shape[last:])])
    if batch:
        x = reshaped(target, x, [*batch, math.prod(shape[first:last]), inner])
    elif len(summed[0]) != 1 or not x_free:  # otherwise the free axes need not be merged
        x = reshaped(target, x, [*(shape[:last] or [1]), inner])
    return reshaped(target, tf.matmul(x, y) if is_float(x) else integer_product(x, y), shape)


def integer_product(x, y):
    """TFLite only has matrix products of floats."""
    return tf.reduce_sum(x[..., :, None] * tf.expand_dims(y, -3), -2)


def transposed(x, order):
    if list(order) == sorted(order):
        return x
    return np.transpose(x, order) if isinstance(x, np.ndarray) else tf.transpose(x, order)


def reshaped(target, x, shape):
    if isinstance(x, np.ndarray):
        return x.reshape(shape)
    static = [d if isinstance(d, int) else None for d in shape]
    return x if x.shape.as_list() == static else tf.reshape(x, target.new_sizes(shape))


PRIMITIVES = {"dot_general": widened(dot_general)}
