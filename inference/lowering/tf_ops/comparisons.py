"""Elementwise comparisons.

For an infinite constant, TensorFlow's converter writes the largest finite number, so what is
compared with one is computed in another way.
"""

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.elementwise import is_bool, is_float, widened


def equal(target, x, y):
    """Equality with infinity is computed as >= or <=."""
    x, y, sign = infinite_last(x, y)
    return tf.equal(x, y) if sign == 0 else x >= y if sign > 0 else x <= y


def not_equal(target, x, y):
    x, y, sign = infinite_last(x, y)
    if sign == 0:
        return tf.not_equal(x, y)
    return tf.logical_or(x < y if sign > 0 else x > y, tf.not_equal(x, x))  # true for nan


ORDERS = {"lt": tf.less, "le": tf.less_equal, "gt": tf.greater, "ge": tf.greater_equal}
SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
NEVER = {("gt", 1), ("lt", -1)}  # (comparison, sign of the infinity on the right)
ALWAYS = {("le", 1), ("ge", -1)}  # except for nan


def ordered(name):
    """A comparison, with a constant on the right; booleans are compared as integers."""

    def function(target, x, y):
        if is_bool(x):
            x, y = tf.cast(x, tf.int32), tf.cast(y, tf.int32)
        order = name
        if not tf.is_tensor(x):
            x, y, order = y, x, SWAPPED[name]
        _, _, sign = infinite_last(x, y)
        if (order, sign) in NEVER:
            return tf.less(x, x)
        return tf.equal(x, x) if (order, sign) in ALWAYS else ORDERS[order](x, y)

    return function


def less_in_total_order(target, x, y):
    """x < y, where nan is the largest number."""
    if not is_float(x):
        return tf.less(x, y)
    return tf.logical_or(x < y, tf.logical_and(tf.equal(x, x), tf.not_equal(y, y)))


def less_equal_in_total_order(target, x, y):
    return tf.logical_or(x <= y, tf.not_equal(y, y)) if is_float(x) else tf.less_equal(x, y)


def equal_in_total_order(target, x, y):
    both_nan = tf.logical_and(tf.not_equal(x, x), tf.not_equal(y, y)) if is_float(x) else False
    return tf.logical_or(equal(target, x, y), both_nan)


def infinite_last(x, y):
    """(x, y, sign) with an infinite constant as y, and its sign; the sign is 0 without one."""
    for a, b in ((x, y), (y, x)):
        is_constant = isinstance(b, np.ndarray) and b.size and is_float(b)
        if is_constant and np.isinf(b).all() and len(np.unique(b)) == 1:
            return a, b, int(np.sign(b.flat[0]))
    return x, y, 0


OWN = {
    **{"eq": equal, "ne": not_equal, "eq_to": equal_in_total_order},
    **{"lt_to": less_in_total_order, "le_to": less_equal_in_total_order},
}
PRIMITIVES = {
    **{name: widened(function) for name, function in OWN.items()},
    **{name: widened(ordered(name)) for name in ORDERS},
}
