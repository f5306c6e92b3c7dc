"""Activations and other elementwise ops: arithmetic, comparisons, bits, selections, conversions
and special functions.

TFLite computes in float32, int32 and int64. Narrower integers are cast to a wider dtype, and the
results back, so that an overflow wraps around as in JAX. For an infinite constant, TensorFlow's
converter writes the largest finite number, so what is compared with one is computed in another way.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tensorflow as tf
from jax import lax

from inference.lowering.approximations import (
    ERF_ABOVE,
    ERF_BELOW,
    ERF_END,
    ERF_INV_ABOVE_5,
    ERF_INV_BELOW_5,
    ERFC_ABOVE_2,
    ERFC_BELOW_2,
)
from inference.lowering.complex_numbers import dft_matrix
from inference.lowering.walk import Lowering

if TYPE_CHECKING:
    from inference.lowering.tf_ops.target import TfTarget

Tensor: TypeAlias = Any  # a tensor, or the array of a constant; TensorFlow has no complete types

WIDER: dict[str, Any] = {
    **dict.fromkeys(("int8", "uint8", "int16", "uint16"), "int32"),
    "uint32": "int64",
}
WIDER_TO_MOVE: dict[str, Any] = {
    "int16": "int32",
    "uint16": "int32",
    "uint32": "int64",
}  # no Slice, no Transpose
NARROW = {"float16", "bfloat16"}  # stored as float32: TFLite ops support nothing narrower
PRECISIONS = {(8, 7): "bfloat16", (5, 10): "float16"}  # (exponent bits, mantissa bits)


def widened(function: Lowering, wider: Mapping[str, Any] = WIDER) -> Lowering:
    """The function for operands cast to the wider dtype; its result is cast back."""

    @functools.wraps(function)
    def call(target: "TfTarget", *operands: Tensor, **params: Any) -> Tensor | list[Tensor]:
        if wider.keys().isdisjoint(x.dtype.name for x in operands):
            return function(target, *operands, **params)
        wide = [tf.cast(x, wider.get(x.dtype.name, x.dtype)) for x in operands]
        results = function(target, *wide, **params)
        if isinstance(results, list | tuple):
            pairs = zip(results, target.out, strict=True)
            return [tf.cast(x, aval.dtype) for x, aval in pairs]
        return tf.cast(results, target.out[0].dtype)

    return call


def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """x or y, which have one dtype; TFLite has no selection of uint8."""
    if (wider := WIDER.get(x.dtype.name)) is None:
        return tf.where(condition, x, y)
    return tf.cast(tf.where(condition, tf.cast(x, wider), tf.cast(y, wider)), x.dtype)


def is_float(x: Tensor) -> bool:
    return x.dtype.name == "float32"


def is_bool(x: Tensor) -> bool:
    return x.dtype.name == "bool"


def plain(function: Callable[..., Tensor]) -> Lowering:
    """A TensorFlow function with the same meaning as a primitive."""
    return lambda target, *operands, **_: function(*operands)


def is_transposed(x: Tensor, depth: int = 8) -> bool:
    """Whether a transposition is among the last ops that compute x."""
    if depth == 0 or not tf.is_tensor(x):
        return False
    return x.op.type == "Transpose" or any(is_transposed(y, depth - 1) for y in x.op.inputs)


def left(constant: Tensor, x: Tensor) -> Tensor:
    """A constant as the left operand of x where their order matters.

    The converter moves transpositions behind elementwise ops and exchanges the operands: 1 / x.T
    becomes (x / 1).T. So the constant is multiplied by computed ones, or by 0 where x is nan.
    """
    if tf.is_tensor(constant) or not is_transposed(x):
        return constant
    return tf.cast(tf.logical_or(x > 0, x <= 0), x.dtype) * constant


def subtract(target: "TfTarget", x: Tensor, y: Tensor) -> Tensor:
    return left(x, y) - y


def divide(target: "TfTarget", x: Tensor, y: Tensor) -> Tensor:
    """Division; it truncates integers, as in TFLite, which only divides signed 32-bit ones."""
    if is_float(x):
        if isinstance(y, np.ndarray):
            if not y.all():
                target.refuse(
                    "div", "by a constant 0, for which the converter puts a finite number"
                )
        elif y.op.type == "Sqrt":  # the converter makes it an RSQRT
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


def is_near_root(y: Tensor) -> bool:
    """Whether y is a square root that is limited, or to which something is added."""
    if not tf.is_tensor(y) or y.op.type not in ("AddV2", "Maximum", "Reshape"):
        return False
    return any(x.op.type == "Sqrt" or is_near_root(x) for x in y.op.inputs)


def is_safe_divisor(y: Tensor) -> bool:
    return is_float(y) or (isinstance(y, np.ndarray) and not np.isin(y, [0, -1]).any())


def one_instead(y: Tensor) -> Tensor:
    """y with 1 in place of 0 and -1."""
    one = np.ones((), y.dtype.name)
    y = tf.where(tf.equal(y, np.zeros((), y.dtype.name)), one, y)
    return y if y.dtype.name == "uint32" else tf.where(tf.equal(y, -one), one, y)


def divide_unsigned(x: Tensor, y: Tensor) -> Tensor:
    """x // y from x // 2, which fits a signed number; 2 * (x // 2 // y) may be 1 too small."""
    half = tf.cast(tf.bitwise.right_shift(x, np.ones((), np.uint32)), tf.int32)
    x, y = tf.cast(x, tf.int64), tf.cast(y, tf.int64)
    fits = y < 2**31
    divisor = tf.cast(tf.where(fits, y, 1), tf.int32)
    quotient = 2 * tf.cast(tf.truncatediv(half, divisor), tf.int64)
    quotient += tf.cast(x - quotient * y >= y, tf.int64)
    return tf.cast(tf.where(fits, quotient, tf.cast(x >= y, tf.int64)), tf.uint32)


def remainder(target: "TfTarget", x: Tensor, y: Tensor) -> Tensor:
    """The remainder with the sign of x; for integers, that by 0 is x."""
    divisor = y if is_safe_divisor(y) else one_instead(y)
    if x.dtype.name == "int32":  # of which the lowest number has no magnitude
        result = x - divisor * tf.truncatediv(x, divisor)
    else:
        size = tf.math.floormod(magnitude(x), magnitude(divisor))
        result = tf.where(x < 0, -size, size)
    return result if divisor is y else tf.where(tf.equal(y, np.zeros((), y.dtype.name)), x, result)


def magnitude(x: Tensor) -> Tensor:
    return tf.maximum(x, -x) if x.dtype.name == "int64" else tf.abs(x)


def power(target: "TfTarget", x: Tensor, y: Tensor) -> Tensor:
    if isinstance(y, np.ndarray) and np.all(y == -0.5):  # the converter makes it an RSQRT
        return inverse_root(x, tf.abs)
    y = tf.cast(y, x.dtype)
    return tf.pow(left(x, y), y)


def inverse_root(x: Tensor, before: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """1 / sqrt(x), which TFLite computes as nan where x is 0; there it is 1 / before(x)."""
    result = tf.math.rsqrt(x)
    if is_positive(x):
        return result
    zeros = before(x)
    return tf.where(tf.equal(x, np.float32(0)), left(np.float32(1), zeros) / zeros, result)


def is_positive(x: Tensor) -> bool:
    """Whether x cannot be 0, as a variance to which a number is added; unknown is False."""
    if not tf.is_tensor(x):
        return bool(np.all(x > 0))
    if x.op.type in ("Reshape", "ExpandDims", "Squeeze", "BroadcastTo", "Transpose", "Identity"):
        return is_positive(x.op.inputs[0])
    numbers = map(tf.get_static_value, x.op.inputs)
    has_positive = any(number is not None and np.all(number > 0) for number in numbers)
    return x.op.type in ("Add", "AddV2", "Maximum") and has_positive


def exp(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    """TFLite's op is 0 where x is nan."""
    return tf.where(tf.equal(x, x), tf.exp(x), x)


def integer_pow(target: "TfTarget", x: Tensor, *, y: int) -> Tensor:
    """A power by repeated squaring."""
    result, factor, exponent = None, x, abs(y)
    while exponent:
        if exponent & 1:
            result = factor if result is None else result * factor
        exponent >>= 1
        factor = tf.square(factor) if exponent else factor
    return divide(target, np.ones((), np.float32), result) if y < 0 else result


def maximum(target: "TfTarget", x: Tensor, y: Tensor) -> Tensor:
    """nan if either operand is; TFLite's op passes on nan only from its first operand."""
    if is_bool(x):
        return tf.logical_or(x, y)
    if isinstance(x, np.ndarray):
        x, y = y, x
    if not may_be_nan(y):
        return tf.maximum(x, y)
    return tf.where(tf.logical_or(x > y, tf.not_equal(x, x)), x, y)


def minimum(target: "TfTarget", x: Tensor, y: Tensor) -> Tensor:
    if is_bool(x):
        return tf.logical_and(x, y)
    if isinstance(x, np.ndarray):
        x, y = y, x
    if not may_be_nan(y):
        return tf.minimum(x, y)
    return tf.where(tf.logical_or(x < y, tf.not_equal(x, x)), x, y)


def may_be_nan(x: Tensor) -> bool:
    return is_float(x) and not (isinstance(x, np.ndarray) and not np.isnan(x).any())


def limited(x: Tensor, low: Tensor | int, high: Tensor | int) -> Tensor:
    """x limited to a range; in the other order the converter uses an op that only floats have."""
    return tf.minimum(tf.maximum(x, low), high)


def clamp(target: "TfTarget", low: Tensor, x: Tensor, high: Tensor) -> Tensor:
    return minimum(target, maximum(target, x, low), high)


def select_n(target: "TfTarget", which: Tensor, *cases: Tensor) -> Tensor:
    """The case whose number is in `which`."""
    if is_bool(which):
        return tf.where(which, cases[1], cases[0])
    chosen = cases[-1]
    for i in reversed(range(len(cases) - 1)):
        chosen = tf.where(which <= i, cases[i], chosen)
    return chosen


def convert(target: "TfTarget", x: Tensor, *, new_dtype: np.dtype, **_: object) -> Tensor:
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


def rounded_to(x: Tensor, dtype: str) -> Tensor:
    """Numbers rounded to a narrower dtype, as float32."""
    return tf.cast(tf.cast(x, dtype), tf.float32)


def reduce_precision(
    target: "TfTarget", x: Tensor, *, exponent_bits: int, mantissa_bits: int
) -> Tensor:
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


def log(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    """On some CPUs, LiteRT's op returns 88.4 for inf, and 88.8 for nan."""
    return tf.where(x < np.float32(np.inf), tf.math.log(x), x)


def is_finite(target: "TfTarget", x: Tensor) -> Tensor:
    return tf.abs(x) < np.float32(np.inf)


def rounded(target: "TfTarget", x: Tensor, *, rounding_method: lax.RoundingMethod) -> Tensor:
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


def equal(target: "TfTarget", x: Tensor, y: Tensor) -> Tensor:
    """Equality with infinity is computed as >= or <=."""
    x, y, sign = infinite_last(x, y)
    return tf.equal(x, y) if sign == 0 else x >= y if sign > 0 else x <= y


def not_equal(target: "TfTarget", x: Tensor, y: Tensor) -> Tensor:
    x, y, sign = infinite_last(x, y)
    if sign == 0:
        return tf.not_equal(x, y)
    return tf.logical_or(x < y if sign > 0 else x > y, tf.not_equal(x, x))  # true for nan


ORDERS = {"lt": tf.less, "le": tf.less_equal, "gt": tf.greater, "ge": tf.greater_equal}
SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
NEVER = {("gt", 1), ("lt", -1)}  # (comparison, sign of the infinity on the right)
ALWAYS = {("le", 1), ("ge", -1)}  # except for nan


def ordered(name: str) -> Lowering:
    """A comparison, with a constant on the right; booleans are compared as integers."""

    def function(target: "TfTarget", x: Tensor, y: Tensor) -> Tensor:
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


def less_in_total_order(target: "TfTarget", x: Tensor, y: Tensor) -> Tensor:
    """x < y, where nan is the largest number."""
    if not is_float(x):
        return tf.less(x, y)
    return tf.logical_or(x < y, tf.logical_and(tf.equal(x, x), tf.not_equal(y, y)))


def less_equal_in_total_order(target: "TfTarget", x: Tensor, y: Tensor) -> Tensor:
    return tf.logical_or(x <= y, tf.not_equal(y, y)) if is_float(x) else tf.less_equal(x, y)


def equal_in_total_order(target: "TfTarget", x: Tensor, y: Tensor) -> Tensor:
    both_nan = tf.logical_and(tf.not_equal(x, x), tf.not_equal(y, y)) if is_float(x) else False
    return tf.logical_or(equal(target, x, y), both_nan)


def infinite_last(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, int]:
    """(x, y, sign) with an infinite constant as y, and its sign; the sign is 0 without one."""
    for a, b in ((x, y), (y, x)):
        is_constant = isinstance(b, np.ndarray) and b.size and is_float(b)
        if is_constant and np.isinf(b).all() and len(np.unique(b)) == 1:
            return a, b, int(np.sign(b.flat[0]))
    return x, y, 0


def exclusive_or(target: "TfTarget", x: Tensor, y: Tensor) -> Tensor:
    return tf.not_equal(x, y) if is_bool(x) else tf.bitwise.bitwise_xor(x, y)


def both(target: "TfTarget", x: Tensor, y: Tensor) -> Tensor:
    """x & y, which for integers is (x + y - (x ^ y)) / 2; TFLite has no op for it."""
    if is_bool(x):
        return tf.logical_and(x, y)
    if x.dtype.name == "uint32":
        return tf.cast(both(target, tf.cast(x, tf.int32), tf.cast(y, tf.int32)), tf.uint32)
    # computed on the halves, whose sum does not overflow; the last bits are multiplied
    x_half, y_half = tf.bitwise.right_shift(x, 1), tf.bitwise.right_shift(y, 1)
    above = tf.bitwise.right_shift(x_half + y_half - tf.bitwise.bitwise_xor(x_half, y_half), 1)
    return above * 2 + (x - x_half * 2) * (y - y_half * 2)


def either(target: "TfTarget", x: Tensor, y: Tensor) -> Tensor:
    return tf.logical_or(x, y) if is_bool(x) else x + y - both(target, x, y)


def negation(target: "TfTarget", x: Tensor) -> Tensor:
    return tf.logical_not(x) if is_bool(x) else -x - 1


def shift_left(target: "TfTarget", x: Tensor, count: Tensor) -> Tensor:
    """A product with a power of 2, and 0 where every bit is shifted out."""
    bits = 8 * np.dtype(target.out[0].dtype).itemsize
    if bits == 64:
        target.refuse("shift_left", "of int64")
    power = tf.cast(tf.pow(np.int32(2), tf.cast(limited(count, 0, 30), tf.int32)), x.dtype)
    last = tf.where(tf.equal(count, 31), np.asarray(2, x.dtype.name), np.asarray(1, x.dtype.name))
    inside = tf.logical_and(count >= 0, count < bits)
    return tf.where(inside, x * power * last, tf.zeros_like(x))


def shift_right(target: "TfTarget", x: Tensor, count: Tensor) -> Tensor:
    """An arithmetic shift, which keeps the sign; JAX reads the count as unsigned."""
    last = 8 * np.dtype(target.out[0].dtype).itemsize - 1
    all_but_sign = np.asarray(last, count.dtype.name)
    return tf.bitwise.right_shift(x, tf.where(is_within(count, last), count, all_but_sign))


def shift_right_logical(target: "TfTarget", x: Tensor, count: Tensor) -> Tensor:
    """A shift that fills the highest bits with zeros."""
    last = 8 * np.dtype(x.dtype.name).itemsize - 1
    unsigned, wide = tf.cast(x, f"uint{last + 1}"), tf.uint32 if last == 31 else tf.int32
    count = tf.cast(count, tf.int32)
    by = tf.cast(limited(count, 0, last), wide)
    shifted = tf.cast(tf.bitwise.right_shift(tf.cast(unsigned, wide), by), tf.int32)
    return tf.cast(tf.where(is_within(count, last), shifted, 0), x.dtype)


def is_within(count: Tensor, last: int) -> Tensor:
    return tf.logical_and(count >= 0, count <= last)


def population_count(target: "TfTarget", x: Tensor) -> Tensor:
    """The sum of all bits, each of which is y - 2 * (y >> 1) of a shifted number y."""
    bits, dtype = 8 * np.dtype(x.dtype.name).itemsize, np.dtype(target.out[0].dtype)
    if bits == 64:
        target.refuse("population_count", "of int64")
    x = tf.cast(x, tf.int32)
    shifted = tf.bitwise.right_shift(tf.expand_dims(x, -1), np.arange(bits, dtype=np.int32))
    ones = shifted - 2 * tf.bitwise.right_shift(shifted, np.ones((), np.int32))
    return tf.cast(tf.reduce_sum(ones, -1), dtype)


LARGEST_PRODUCT = 512  # numbers, up to which a Fourier transform is a product


def polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    y = np.float32(coefficients[0])
    for c in coefficients[1:]:
        y = y * x + np.float32(c)
    return y


def minus(number: float, x: Tensor) -> Tensor:
    """number - x."""
    return left(np.float32(number), x) - x


def erf(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    x = tf.clip_by_value(x, -ERF_END, ERF_END)
    return x * polynomial(x * x, ERF_ABOVE) / polynomial(x * x, ERF_BELOW)


def erfc(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    size = tf.maximum(tf.abs(x), 1.0)
    inverse = left(np.float32(1), size) / (size * size)
    tail = tf.exp(-size * size) / size
    tail = tail * tf.where(
        size < 2, polynomial(inverse, ERFC_BELOW_2), polynomial(inverse, ERFC_ABOVE_2)
    )
    return tf.where(tf.abs(x) < 1, minus(1, erf(target, x)), tf.where(x < 0, minus(2, tail), tail))


def erf_inv(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    w = -tf.math.log(minus(1, x) * (x + 1))
    near = polynomial(tf.minimum(w, 5.0) - 2.5, ERF_INV_BELOW_5)
    far = polynomial(tf.sqrt(tf.maximum(w, 5.0)) - 3, ERF_INV_ABOVE_5)
    return tf.where(tf.equal(tf.abs(x), 1), x * np.float32(np.inf), x * tf.where(w < 5, near, far))


def expm1(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    """tanh(x / 2) (exp(x) + 1) near 0, where exp(x) - 1 would round x away."""
    power = tf.exp(x)  # 0 for nan, which tanh is not
    return tf.where(tf.abs(x) >= 0.5, power - 1, tf.tanh(x * 0.5) * (power + 1))


def log1p(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    """The series of 2 atanh(x / (2 + x)) near 0, where 1 + x would round x away."""
    s = x / (x + 2)
    near = 2 * s * polynomial(s * s, [1 / n for n in range(15, 0, -2)])
    return tf.where(tf.abs(x) < 0.5, near, log(target, 1 + x))


def tan(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    return tf.sin(x) / tf.cos(x)


def asin(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    return tf.atan2(x, tf.sqrt(minus(1, x) * (x + 1)))


def acos(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    return tf.atan2(tf.sqrt(minus(1, x) * (x + 1)), x)


def atan(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    return tf.atan2(x, tf.ones_like(x))


def atan2(target: "TfTarget", y: Tensor, x: Tensor, **_: object) -> Tensor:
    """TFLite's op does not broadcast."""
    if tuple(y.shape) != tuple(x.shape):
        ones = tf.ones_like(x + y)
        x, y = x * ones, y * ones  # which keeps -0, as adding 0 does not
    return tf.atan2(y, x)


def sinh(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    """exp(x) / 2 as exp(x - log 2), which overflows no sooner than the result."""
    m = expm1(target, x)
    large = tf.exp(x - math.log(2)) - tf.exp(-x - math.log(2))
    return tf.where(tf.abs(x) >= 1, large, 0.5 * (m + m / (m + 1)))  # which is nan for nan


def cosh(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    return exp(target, x - math.log(2)) + tf.exp(-x - math.log(2))


def asinh(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    size = tf.minimum(tf.abs(x), 1e18)  # its square is finite
    near = log1p(target, size + size * size / (1 + tf.sqrt(size * size + 1)))
    return tf.sign(x) * tf.where(tf.abs(x) < 1e18, near, log(target, tf.abs(x)) + math.log(2))


def acosh(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    above = tf.minimum(x, 1e18) - 1
    near = log1p(target, above + tf.sqrt(above) * tf.sqrt(above + 2))
    return tf.where(x < 1e18, near, log(target, x) + math.log(2))


def atanh(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    return 0.5 * (log1p(target, x) - log1p(target, -x))


def cbrt(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    return tf.sign(x) * tf.pow(tf.abs(x), 1 / 3)


def exp2(target: "TfTarget", x: Tensor, **_: object) -> Tensor:
    return tf.pow(left(np.float32(2), x), x)


def real_dft(target: "TfTarget", x: Tensor) -> Tensor:
    """An RFFT2D, which TFLite has for powers of 2, else a product with cosines and sines."""
    count = x.shape[-1]
    if count is None:
        target.refuse("fft", "over a free axis")
    if count > 1 and count & (count - 1) == 0:
        y = tf.signal.rfft(x)
        return tf.stack([tf.math.real(y), tf.math.imag(y)], -1)
    if count > LARGEST_PRODUCT:
        target.refuse("fft", f"of {count} numbers, which is not a power of 2")
    y = tf.matmul(x if len(x.shape) > 1 else x[None], dft_matrix(count))
    y = tf.reshape(y, target.new_sizes((*target.operand_shapes[0][:-1], 2, count // 2 + 1)))
    rank = len(x.shape)
    return tf.transpose(y, [*range(rank - 1), rank, rank - 1])


def bitcast(target: "TfTarget", x: Tensor, *, new_dtype: np.dtype) -> Tensor:
    if (
        is_bool(x)
        or np.dtype(new_dtype) == bool
        or new_dtype.itemsize != np.dtype(x.dtype.name).itemsize
    ):
        target.refuse("bitcast_convert_type", f"of {x.dtype.name} to {np.dtype(new_dtype)}")
    return tf.bitcast(x, new_dtype)


WIDENED = {
    **{"sub": subtract, "exp": exp, "log": log, "rsqrt": plain(inverse_root)},
    **{"rem": remainder, "pow": power, "integer_pow": integer_pow, "select_n": select_n},
    **{"max": maximum, "min": minimum, "clamp": clamp, "is_finite": is_finite, "round": rounded},
    **{"eq": equal, "ne": not_equal, "eq_to": equal_in_total_order},
    **{"lt_to": less_in_total_order, "le_to": less_equal_in_total_order},
    **{name: ordered(name) for name in ORDERS},
    **{"xor": exclusive_or, "and": both, "or": either, "not": negation},
    **{"shift_left": shift_left, "shift_right_arithmetic": shift_right},
}
AS_THEY_ARE = (
    *(erf, erfc, erf_inv, expm1, log1p, exp2, cbrt, shift_right_logical, population_count),
    *(tan, asin, acos, atan, atan2, sinh, cosh, asinh, acosh, atanh, real_dft, reduce_precision),
)
PRIMITIVES = {
    **{name: widened(plain(function)) for name, function in PLAIN.items()},
    **{name: widened(function) for name, function in WIDENED.items()},
    **{function.__name__: function for function in AS_THEY_ARE},
    "div": widened(divide, {name: wider for name, wider in WIDER.items() if name != "uint32"}),
    "convert_element_type": convert,
    "bitcast_convert_type": bitcast,
}


def elu(target: "TfTarget", x: Tensor, alpha: float) -> Tensor:
    if alpha == 1:
        return tf.nn.elu(x)
    return tf.where(x > 0, x, alpha * expm1(target, tf.minimum(x, np.float32(0))))


def gelu(target: "TfTarget", x: Tensor) -> Tensor:
    """In the form that the converter recognizes as GELU."""
    # with this shape of the half, the converter does not share x / 2 with other ops, which would
    # break the form
    half = np.full((1,) * len(x.shape), 0.5, np.float32)
    return half * x * (1 + tf.math.erf(x * np.float32(math.sqrt(0.5))))


def gelu_tanh(target: "TfTarget", x: Tensor) -> Tensor:
    return tf.nn.gelu(x, approximate=True)


def silu(target: "TfTarget", x: Tensor) -> Tensor:
    return x * tf.sigmoid(x)


def hard_sigmoid(target: "TfTarget", x: Tensor) -> Tensor:
    return tf.nn.relu6(x + np.float32(3)) * np.float32(1 / 6)


def hard_swish(target: "TfTarget", x: Tensor) -> Tensor:
    return x * hard_sigmoid(target, x)


def softplus(target: "TfTarget", x: Tensor) -> Tensor:
    """log(1 + exp(x)) without the exponential of a large number."""
    return tf.nn.relu(x) + log1p(target, tf.exp(-tf.abs(x)))


def mish(target: "TfTarget", x: Tensor) -> Tensor:
    return x * tf.tanh(softplus(target, x))


def softmax_along(target: "TfTarget", x: Tensor, axis: int) -> Tensor:
    return tf.nn.softmax(x, axis)


def log_softmax_along(target: "TfTarget", x: Tensor, axis: int) -> Tensor:
    return tf.nn.log_softmax(x, axis)


def hard_tanh(target: "TfTarget", x: Tensor) -> Tensor:
    return tf.minimum(tf.maximum(x, np.float32(-1)), np.float32(1))


def selu(target: "TfTarget", x: Tensor) -> Tensor:
    """TFLite's ELU below 0, where it has a factor of its own."""
    scale, alpha = np.float32(1.0507009873554805), np.float32(1.7580993408473766)
    return scale * tf.nn.relu(x) + alpha * tf.nn.elu(tf.minimum(x, np.float32(0)))


def soft_sign(target: "TfTarget", x: Tensor) -> Tensor:
    return x / (tf.abs(x) + np.float32(1))


LAYERS = {
    **{"relu": plain(tf.nn.relu), "relu6": plain(tf.nn.relu6), "sigmoid": plain(tf.sigmoid)},
    **{"softmax": plain(tf.nn.softmax), "log_softmax": plain(tf.nn.log_softmax)},
    **{"leaky_relu": plain(tf.nn.leaky_relu), "elu": elu, "gelu": gelu, "gelu_tanh": gelu_tanh},
    **{"silu": silu, "hard_sigmoid": hard_sigmoid, "hard_swish": hard_swish, "mish": mish},
    **{"softplus": softplus, "hard_tanh": hard_tanh, "selu": selu, "soft_sign": soft_sign},
    **{"softmax_along": softmax_along, "log_softmax_along": log_softmax_along},
}
