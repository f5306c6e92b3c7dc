"""Elementwise arithmetic, selections and conversions.

TFLite computes in float32, int32 and int64. Narrower integers are cast to a wider dtype, and the
results back, so that an overflow wraps around as in JAX.
"""

import functools

import numpy as np
import tensorflow as tf

WIDER = {**dict.fromkeys(("int8", "uint8", "int16", "uint16"), "int32"), "uint32": "int64"}
WIDER_TO_MOVE = {"int16": "int32", "uint16": "int32", "uint32": "int64"}  # no Slice, no Transpose
NARROW = {"float16", "bfloat16"}  # stored as float32: TFLite ops support nothing narrower
PRECISIONS = {(8, 7): "bfloat16", (5, 10): "float16"}  # (exponent bits, mantissa bits)


def widened(function, wider=WIDER):
    """The function for operands cast to the wider dtype; its result is cast back."""

    @functools.wraps(function)
    def call(target, *operands, **params):
        if wider.keys().isdisjoint(x.dtype.name for x in operands):
            return function(target, *operands, **params)
        operands = [tf.cast(x, wider.get(x.dtype.name, x.dtype)) for x in operands]
        results = function(target, *operands, **params)
        if isinstance(results, list | tuple):
            pairs = zip(results, target.out, strict=True)
            return [tf.cast(x, aval.dtype) for x, aval in pairs]
        return tf.cast(results, target.out[0].dtype)

    return call


def where(condition, x, y):
    """x or y, which have one dtype; TFLite has no selection of uint8."""
    if (wider := WIDER.get(x.dtype.name)) is None:
        return tf.where(condition, x, y)
    return tf.cast(tf.where(condition, tf.cast(x, wider), tf.cast(y, wider)), x.dtype)


def is_float(x):
    return x.dtype.name == "float32"


def is_bool(x):
    return x.dtype.name == "bool"


def plain(function):
    """A TensorFlow function with the same meaning as a primitive."""
    return lambda target, *operands, **_: function(*operands)


def is_transposed(x, depth=8):
    """Whether a transposition is among the last ops that compute x."""
    if depth == 0 or not tf.is_tensor(x):
        return False
    return x.op.type == "Transpose" or any(is_transposed(y, depth - 1) for y in x.op.inputs)


def left(constant, x):
    """A constant as the left operand of x where their order matters.

    The converter moves transpositions behind elementwise ops and exchanges the operands: 1 / x.T
    becomes (x / 1).T. So the constant is multiplied by computed ones, or by 0 where x is nan.
    """
    if tf.is_tensor(constant) or not is_transposed(x):
        return constant
    return tf.cast(tf.logical_or(x > 0, x <= 0), x.dtype) * constant


def subtract(target, x, y):
    return left(x, y) - y


def divide(target, x, y):
    """Division; it truncates integers, as in TFLite, which only divides signed 32-bit ones."""
    if is_float(x):
        if isinstance(y, np.ndarray) and not y.all():
            target.refuse("div", "by a constant 0, for which the converter puts a finite number")
        if tf.is_tensor(y) and y.op.type == "Sqrt":  # the converter makes it an RSQRT
            inverse = inverse_root(y.op.inputs[0])
            return inverse if np.all(tf.get_static_value(x) == 1) else x * inverse
        # The converter makes x / (norm + 1e-12) an op that divides by no less than 1e-6.
        return tf.divide(left(x, y), tf.abs(y) if is_near_root(y) else y)
    if x.dtype.name == "int64":
        target.refuse("div", "of int64")
    if is_safe_divisor(y):
        return divide_unsigned(x, y) if x.dtype.name == "uint32" else tf.truncatediv(x, y)
    # x / 0 is -1 and x / -1 is -x, as in XLA; TFLite stops at the one, and at some x of the other
    safe = one_instead(y)
    if x.dtype.name == "uint32":
        return tf.where(tf.equal(y, 0), np.uint32(2**32 - 1), divide_unsigned(x, safe))
    quotient = tf.where(tf.equal(y, -1), -x, tf.truncatediv(x, safe))
    return tf.where(tf.equal(y, 0), np.int32(-1), quotient)


def is_near_root(y):
    """Whether y is a square root that is limited, or to which something is added."""
    if not tf.is_tensor(y) or y.op.type not in ("AddV2", "Maximum", "Reshape"):
        return False
    return any(x.op.type == "Sqrt" or is_near_root(x) for x in y.op.inputs)


def is_safe_divisor(y):
    return is_float(y) or (isinstance(y, np.ndarray) and not np.isin(y, [0, -1]).any())


def one_instead(y):
    """y with 1 in place of 0 and -1."""
    one = np.ones((), y.dtype.name)
    y = tf.where(tf.equal(y, np.zeros((), y.dtype.name)), one, y)
    return y if y.dtype.name == "uint32" else tf.where(tf.equal(y, -one), one, y)


def divide_unsigned(x, y):
    """x // y from x // 2, which fits a signed number; 2 * (x // 2 // y) may be 1 too small."""
    half = tf.cast(tf.bitwise.right_shift(x, np.ones((), np.uint32)), tf.int32)
    x, y = tf.cast(x, tf.int64), tf.cast(y, tf.int64)
    fits = y < 2**31
    divisor = tf.cast(tf.where(fits, y, 1), tf.int32)
    quotient = 2 * tf.cast(tf.truncatediv(half, divisor), tf.int64)
    quotient += tf.cast(x - quotient * y >= y, tf.int64)
    return tf.cast(tf.where(fits, quotient, tf.cast(x >= y, tf.int64)), tf.uint32)


def remainder(target, x, y):
    """The remainder with the sign of x; for integers, that by 0 is x."""
    divisor = y if is_safe_divisor(y) else one_instead(y)
    if x.dtype.name == "int32":  # of which the lowest number has no magnitude
        result = x - divisor * tf.truncatediv(x, divisor)
    else:
        size = tf.math.floormod(magnitude(x), magnitude(divisor))
        result = tf.where(x < 0, -size, size)
    return result if divisor is y else tf.where(tf.equal(y, np.zeros((), y.dtype.name)), x, result)


def magnitude(x):
    return tf.maximum(x, -x) if x.dtype.name == "int64" else tf.abs(x)


def power(target, x, y):
    if isinstance(y, np.ndarray) and np.all(y == -0.5):  # the converter makes it an RSQRT
        return inverse_root(x, tf.abs)
    y = tf.cast(y, x.dtype)
    return tf.pow(left(x, y), y)


def rsqrt(target, x, **_):
    return inverse_root(x)


def inverse_root(x, before=lambda x: x):
    """1 / sqrt(x), which TFLite computes as nan where x is 0; there it is 1 / before(x)."""
    result = tf.math.rsqrt(x)
    if is_positive(x):
        return result
    zeros = before(x)
    return tf.where(tf.equal(x, np.float32(0)), left(np.float32(1), zeros) / zeros, result)


def is_positive(x):
    """Whether x cannot be 0, as a variance to which a number is added; unknown is False."""
    if not tf.is_tensor(x):
        return bool(np.all(x > 0))
    if x.op.type in ("Reshape", "ExpandDims", "Squeeze", "BroadcastTo", "Transpose", "Identity"):
        return is_positive(x.op.inputs[0])
    numbers = map(tf.get_static_value, x.op.inputs)
    has_positive = any(number is not None and np.all(number > 0) for number in numbers)
    return x.op.type in ("Add", "AddV2", "Maximum") and has_positive


def exp(target, x, **_):
    """TFLite's op is 0 where x is nan."""
    return tf.where(tf.equal(x, x), tf.exp(x), x)


def integer_pow(target, x, *, y):
    """A power by repeated squaring."""
    result, factor, exponent = None, x, abs(y)
    while exponent:
        if exponent & 1:
            result = factor if result is None else result * factor
        exponent >>= 1
        factor = tf.square(factor) if exponent else factor
    return divide(target, np.ones((), np.float32), result) if y < 0 else result


def maximum(target, x, y):
    """nan if either operand is; TFLite's op passes on nan only from its first operand."""
    if is_bool(x):
        return tf.logical_or(x, y)
    if isinstance(x, np.ndarray):
        x, y = y, x
    if not may_be_nan(y):
        return tf.maximum(x, y)
    return tf.where(tf.logical_or(x > y, tf.not_equal(x, x)), x, y)


def minimum(target, x, y):
    if is_bool(x):
        return tf.logical_and(x, y)
    if isinstance(x, np.ndarray):
        x, y = y, x
    if not may_be_nan(y):
        return tf.minimum(x, y)
    return tf.where(tf.logical_or(x < y, tf.not_equal(x, x)), x, y)


def may_be_nan(x):
    return is_float(x) and not (isinstance(x, np.ndarray) and not np.isnan(x).any())


def limited(x, low, high):
    """x limited to a range; in the other order the converter uses an op that only floats have."""
    return tf.minimum(tf.maximum(x, low), high)


def clamp(target, low, x, high):
    return minimum(target, maximum(target, x, low), high)


def select_n(target, which, *cases):
    """The case whose number is in `which`."""
    if is_bool(which):
        return tf.where(which, cases[1], cases[0])
    chosen = cases[-1]
    for i in reversed(range(len(cases) - 1)):
        chosen = tf.where(which <= i, cases[i], chosen)
    return chosen


def convert(target, x, *, new_dtype, **_):
    """A cast, which clamps floats to the range of an integer, and turns NaN into 0."""
    name = np.dtype(new_dtype).name
    if name == "bool":
        return tf.not_equal(tf.cast(x, WIDER.get(x.dtype.name, x.dtype)), 0)
    if is_bool(x):
        # the converter replaces a comparison of a cast boolean by an op that TFLite lacks
        dtype = np.int32 if np.dtype(new_dtype).kind in "iu" else np.float32
        x = tf.where(x, dtype(1), dtype(0))
    if np.dtype(new_dtype).kind in "iu" and x.dtype.is_floating:
        x = tf.where(tf.equal(x, x), x, tf.zeros((), x.dtype))
    return rounded_to(x, name) if name in NARROW else tf.cast(x, new_dtype)


def rounded_to(x, dtype):
    """Numbers rounded to a narrower dtype, as float32."""
    return tf.cast(tf.cast(x, dtype), tf.float32)


def reduce_precision(target, x, *, exponent_bits, mantissa_bits):
    if exponent_bits >= 8 and mantissa_bits >= 23:
        return x
    dtype = PRECISIONS.get((exponent_bits, mantissa_bits))
    if dtype is None:
        what = f"to {exponent_bits} bits of exponent and {mantissa_bits} of fraction"
        target.refuse("reduce_precision", what)
    result = rounded_to(x, dtype)
    if dtype == "bfloat16":
        return result
    return tf.where(tf.abs(result) < 2.0**-14, np.float32(0), result)  # no subnormals, as in JAX


def log(target, x, **_):
    """On some CPUs, LiteRT's op returns 88.4 for inf, and 88.8 for nan."""
    return tf.where(x < np.float32(np.inf), tf.math.log(x), x)


def is_finite(target, x):
    return tf.abs(x) < np.float32(np.inf)


def rounded(target, x, *, rounding_method):
    if rounding_method.name == "TO_NEAREST_EVEN":
        return tf.round(x)
    whole = tf.sign(x) * tf.floor(tf.abs(x))
    return tf.where(tf.abs(x - whole) < 0.5, whole, whole + tf.sign(x))


PLAIN = {
    **{"add": tf.add, "add_any": tf.add, "mul": tf.multiply},
    **{"neg": tf.negative, "abs": tf.abs, "sign": tf.sign},
    **{"sqrt": tf.sqrt},
    **{"square": tf.square, "sin": tf.sin, "cos": tf.cos, "tanh": tf.tanh},
    **{"logistic": tf.sigmoid, "ceil": tf.math.ceil, "floor": tf.floor},
}
OWN = {
    **{"sub": subtract, "exp": exp, "log": log, "rsqrt": rsqrt},
    **{"rem": remainder, "pow": power, "integer_pow": integer_pow, "select_n": select_n},
    **{"max": maximum, "min": minimum, "clamp": clamp, "is_finite": is_finite, "round": rounded},
}
PRIMITIVES = {
    **{name: widened(plain(function)) for name, function in PLAIN.items()},
    **{name: widened(function) for name, function in OWN.items()},
    "div": widened(divide, {name: wider for name, wider in WIDER.items() if name != "uint32"}),
    "convert_element_type": convert,
    "reduce_precision": reduce_precision,
}
