"""What makes one number of many: reductions, running ones, places of the largest, and order."""

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.elementwise import is_float, maximum, minimum, widened


def reduction(function):
    return widened(lambda target, x, *, axes, **_: function(x, axes))


def odd(target, x, *, axes, **_):
    """Whether an odd number of them is true."""
    if x.dtype.name != "bool":
        target.refuse("reduce_xor", f"of {x.dtype.name}")
    count = tf.reduce_sum(tf.cast(x, tf.int32), axes)
    return tf.equal(tf.math.floormod(count, 2), 1)


def extreme(function):
    """nan where there is one; TFLite passes it over."""

    def reduce(target, x, *, axes, **_):
        result = function(x, axes)
        if not is_float(x):
            return result
        spoilt = tf.reduce_any(tf.not_equal(x, x), axes)
        return tf.where(spoilt, np.asarray(np.nan, x.dtype.name), result)

    return widened(reduce)


def place(function):
    """The first place of the largest, or smallest; of the first nan where there is one."""

    def find(target, x, *, axes, index_dtype):
        (axis,) = axes
        x = tf.cast(x, tf.int32) if x.dtype.name == "bool" else x
        found = function(x, axis, output_type=tf.int32)
        if is_float(x):
            is_nan = tf.not_equal(x, x)
            found = tf.where(
                tf.reduce_any(is_nan, axis),
                tf.argmax(tf.cast(is_nan, tf.int32), axis, tf.int32),
                found,
            )
        return tf.cast(found, index_dtype)

    return find


def running_sum(target, x, *, axis, reverse):
    return tf.cumsum(x, axis, reverse=reverse)


def running(combine, start):
    """A running combination, of twice as many numbers after each step."""

    def scan(target, x, *, axis, reverse):
        size, reach = x.shape[axis], 1
        first = np.asarray(start(x.dtype.as_numpy_dtype), x.dtype.name)
        while reach < size:
            x = combine(target, x, shifted(x, axis, -reach if reverse else reach, first))
            reach *= 2
        return x

    return scan


def shifted(x, axis, by, first):
    """x moved along an axis, with `first` where nothing comes from."""
    where = slice(None, -by) if by > 0 else slice(-by, None)
    kept = x[(slice(None),) * axis + (where,)]
    rims = [[0, 0] for _ in x.shape]
    rims[axis] = [max(by, 0), max(-by, 0)]
    return tf.pad(kept, rims, constant_values=first)


def lowest(dtype):
    return -np.inf if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).min


def highest(dtype):
    return np.inf if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).max


def log_add_exp(target, x, y):
    largest = tf.maximum(x, y)
    origin = tf.where(tf.abs(largest) < np.float32(np.inf), largest, tf.zeros_like(largest))
    return tf.math.log(tf.exp(x - origin) + tf.exp(y - origin)) + origin


def sort(target, *operands, dimension, is_stable, num_keys):
    """By the first operands, of which the first weighs most; the others follow."""
    order = [i for i in range(len(operands[0].shape)) if i != dimension] + [dimension]
    back = np.argsort(order)
    rows = [tf.transpose(x, order) for x in operands]
    for i in reversed(range(num_keys)):  # each keeps the order of what is equal for it
        places = ascending(rows[i])
        rows = [taken(x, places) for x in rows]
    return [tf.transpose(x, back) for x in rows]


def ascending(keys):
    """The places of each row's numbers, the smallest first."""
    keys = (
        tf.cast(keys, tf.int32) if keys.dtype.name in ("bool", "int8", "uint8", "int16") else keys
    )
    return tf.math.top_k(-keys if is_float(keys) else -1 - keys, keys.shape[-1]).indices


def taken(rows, places):
    """From each row, what stands at its places."""
    size, count = rows.shape[-1], places.shape[-1]
    flat = tf.gather(tf.reshape(rows, (-1, size)), tf.reshape(places, (-1, count)), batch_dims=1)
    return tf.reshape(flat, [-1 if n is None else n for n in places.shape])


def top_k(target, x, *, k, axis=-1, **_):
    order = [i for i in range(len(x.shape)) if i != axis % len(x.shape)] + [axis % len(x.shape)]
    found, places = tf.math.top_k(tf.transpose(x, order), k)
    back = np.argsort(order)
    return tf.transpose(found, back), tf.transpose(places, back)


PRIMITIVES = {
    **{
        "reduce_sum": reduction(tf.reduce_sum),
        "reduce_prod": reduction(tf.reduce_prod),
        "mean": reduction(tf.reduce_mean),
    },
    **{
        "reduce_and": reduction(tf.reduce_all),
        "reduce_or": reduction(tf.reduce_any),
        "reduce_xor": odd,
    },
    **{"reduce_max": extreme(tf.reduce_max), "reduce_min": extreme(tf.reduce_min)},
    **{"argmax": place(tf.argmax), "argmin": place(tf.argmin)},
    **{"cumsum": running_sum, "cumprod": running(lambda target, x, y: x * y, lambda dtype: 1)},
    **{"cummax": running(maximum, lowest), "cummin": running(minimum, highest)},
    **{"cumlogsumexp": running(log_add_exp, lowest), "sort": sort, "top_k": top_k},
}
