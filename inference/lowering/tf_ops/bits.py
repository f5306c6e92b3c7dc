"""Logical ops and bitwise ops."""

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.elementwise import is_bool, limited, widened


def exclusive_or(target, x, y):
    return tf.not_equal(x, y) if is_bool(x) else tf.bitwise.bitwise_xor(x, y)


def both(target, x, y):
    """x & y, which for integers is (x + y - (x ^ y)) / 2; TFLite has no op for it."""
    if is_bool(x):
        return tf.logical_and(x, y)
    if x.dtype.name == "uint32":
        return tf.cast(both(target, tf.cast(x, tf.int32), tf.cast(y, tf.int32)), tf.uint32)
    # computed on the halves, whose sum does not overflow; the last bits are multiplied
    x_half, y_half = tf.bitwise.right_shift(x, 1), tf.bitwise.right_shift(y, 1)
    above = tf.bitwise.right_shift(x_half + y_half - tf.bitwise.bitwise_xor(x_half, y_half), 1)
    return above * 2 + (x - x_half * 2) * (y - y_half * 2)


def either(target, x, y):
    return tf.logical_or(x, y) if is_bool(x) else x + y - both(target, x, y)


def negation(target, x):
    return tf.logical_not(x) if is_bool(x) else -x - 1


def shift_left(target, x, count):
    """A product with a power of 2, and 0 where every bit is shifted out."""
    bits = 8 * np.dtype(target.out[0].dtype).itemsize
    if bits == 64:
        target.refuse("shift_left", "of int64")
    power = tf.cast(tf.pow(np.int32(2), tf.cast(limited(count, 0, 30), tf.int32)), x.dtype)
    last = tf.where(tf.equal(count, 31), np.asarray(2, x.dtype.name), np.asarray(1, x.dtype.name))
    inside = tf.logical_and(count >= 0, count < bits)
    return tf.where(inside, x * power * last, tf.zeros_like(x))


def shift_right(target, x, count):
    """An arithmetic shift, which keeps the sign; JAX reads the count as unsigned."""
    last = 8 * np.dtype(target.out[0].dtype).itemsize - 1
    all_but_sign = np.asarray(last, count.dtype.name)
    return tf.bitwise.right_shift(x, tf.where(is_within(count, last), count, all_but_sign))


def shift_right_logical(target, x, count):
    """A shift that fills the highest bits with zeros."""
    last = 8 * np.dtype(x.dtype.name).itemsize - 1
    unsigned, wide = tf.cast(x, f"uint{last + 1}"), tf.uint32 if last == 31 else tf.int32
    count = tf.cast(count, tf.int32)
    by = tf.cast(limited(count, 0, last), wide)
    shifted = tf.cast(tf.bitwise.right_shift(tf.cast(unsigned, wide), by), tf.int32)
    return tf.cast(tf.where(is_within(count, last), shifted, 0), x.dtype)


def is_within(count, last):
    return tf.logical_and(count >= 0, count <= last)


def population_count(target, x):
    """The sum of all bits, each of which is y - 2 * (y >> 1) of a shifted number y."""
    bits, dtype = 8 * np.dtype(x.dtype.name).itemsize, np.dtype(target.out[0].dtype)
    if bits == 64:
        target.refuse("population_count", "of int64")
    x = tf.cast(x, tf.int32)
    shifted = tf.bitwise.right_shift(tf.expand_dims(x, -1), np.arange(bits, dtype=np.int32))
    ones = shifted - 2 * tf.bitwise.right_shift(shifted, np.ones((), np.int32))
    return tf.cast(tf.reduce_sum(ones, -1), dtype)


PRIMITIVES = {
    "xor": widened(exclusive_or),
    "and": widened(both),
    "or": widened(either),
    "not": widened(negation),
    "shift_left": widened(shift_left),
    "shift_right_arithmetic": widened(shift_right),
    "shift_right_logical": shift_right_logical,
    "population_count": population_count,
}
