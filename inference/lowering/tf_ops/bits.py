"""Logic, and the bits of whole numbers."""

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.elementwise import is_bool, limited, widened


def exclusive_or(target, x, y):
    return tf.not_equal(x, y) if is_bool(x) else tf.bitwise.bitwise_xor(x, y)


def both(target, x, y):
    """Of whole numbers: x + y counts each common bit twice, x ^ y not at all."""
    if is_bool(x):
        return tf.logical_and(x, y)
    if x.dtype.name == "uint32":
        return tf.cast(both(target, tf.cast(x, tf.int32), tf.cast(y, tf.int32)), tf.uint32)
    x_half, y_half = (
        tf.bitwise.right_shift(x, 1),
        tf.bitwise.right_shift(y, 1),
    )  # whose sum does not overflow
    above = tf.bitwise.right_shift(x_half + y_half - tf.bitwise.bitwise_xor(x_half, y_half), 1)
    return above * 2 + (x - x_half * 2) * (y - y_half * 2)


def either(target, x, y):
    return tf.logical_or(x, y) if is_bool(x) else x + y - both(target, x, y)


def negation(target, x):
    return tf.logical_not(x) if is_bool(x) else -1 - x


def shift_left(target, x, count):
    """A product with a power of 2; nothing is left of a number that is shifted out of its bits."""
    bits = 8 * np.dtype(target.out[0].dtype).itemsize
    power = tf.cast(tf.pow(np.int32(2), tf.cast(limited(count, 0, 30), tf.int32)), x.dtype)
    last = tf.where(tf.equal(count, 31), np.asarray(2, x.dtype.name), np.asarray(1, x.dtype.name))
    inside = tf.logical_and(count >= 0, count < bits)
    return tf.where(inside, x * power * last, tf.zeros_like(x))


def shift_right(target, x, count):
    """Of whole numbers with their sign."""
    bits = 8 * np.dtype(target.out[0].dtype).itemsize
    return tf.bitwise.right_shift(x, limited(count, 0, bits - 1))


def shift_right_logical(target, x, count):
    """Zeros come in from above."""
    bits = 8 * np.dtype(x.dtype.name).itemsize
    unsigned = tf.cast(x, f"uint{bits}")
    wide = tf.uint32 if bits == 32 else tf.int32
    count = tf.cast(count, tf.int32)
    moved = tf.bitwise.right_shift(
        tf.cast(unsigned, wide), tf.cast(limited(count, 0, bits - 1), wide)
    )
    return tf.cast(tf.where(count < bits, tf.cast(moved, tf.int32), 0), x.dtype)


def population_count(target, x):
    """How many bits are set; a number less twice its half is its last bit."""
    shifted = tf.bitwise.right_shift(
        x[..., None], np.arange(8 * np.dtype(x.dtype.name).itemsize, dtype=x.dtype.name)
    )
    return tf.cast(
        tf.reduce_sum(shifted - 2 * tf.bitwise.right_shift(shifted, np.ones((), x.dtype.name)), -1),
        x.dtype,
    )


PRIMITIVES = {
    **{
        "xor": widened(exclusive_or),
        "and": widened(both),
        "or": widened(either),
        "not": widened(negation),
    },
    **{"shift_left": widened(shift_left), "shift_right_arithmetic": widened(shift_right)},
    **{"shift_right_logical": shift_right_logical, "population_count": population_count},
}
