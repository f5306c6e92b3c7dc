"""Functions without a TFLite op, computed from others at float32 precision."""

import math

import numpy as np
import tensorflow as tf

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
from inference.lowering.tf_ops.elementwise import exp, is_bool, left, log

LARGEST_PRODUCT = 512  # numbers, up to which a Fourier transform is a product


def polynomial(x, coefficients):
    y = np.float32(coefficients[0])
    for c in coefficients[1:]:
        y = y * x + np.float32(c)
    return y


def minus(number, x):
    """number - x."""
    return left(np.float32(number), x) - x


def erf(target, x, **_):
    x = tf.clip_by_value(x, -ERF_END, ERF_END)
    return x * polynomial(x * x, ERF_ABOVE) / polynomial(x * x, ERF_BELOW)


def erfc(target, x, **_):
    size = tf.maximum(tf.abs(x), 1.0)
    inverse = left(np.float32(1), size) / (size * size)
    tail = tf.exp(-size * size) / size
    tail = tail * tf.where(
        size < 2, polynomial(inverse, ERFC_BELOW_2), polynomial(inverse, ERFC_ABOVE_2)
    )
    return tf.where(tf.abs(x) < 1, minus(1, erf(target, x)), tf.where(x < 0, minus(2, tail), tail))


def erf_inv(target, x, **_):
    w = -tf.math.log(minus(1, x) * (x + 1))
    near = polynomial(tf.minimum(w, 5.0) - 2.5, ERF_INV_BELOW_5)
    far = polynomial(tf.sqrt(tf.maximum(w, 5.0)) - 3, ERF_INV_ABOVE_5)
    return tf.where(tf.equal(tf.abs(x), 1), x * np.float32(np.inf), x * tf.where(w < 5, near, far))


def expm1(target, x, **_):
    """tanh(x / 2) (exp(x) + 1) near 0, where exp(x) - 1 would round x away."""
    power = tf.exp(x)  # 0 for nan, which tanh is not
    return tf.where(tf.abs(x) >= 0.5, power - 1, tf.tanh(x * 0.5) * (power + 1))


def log1p(target, x, **_):
    """The series of 2 atanh(x / (2 + x)) near 0, where 1 + x would round x away."""
    s = x / (x + 2)
    near = 2 * s * polynomial(s * s, [1 / n for n in range(15, 0, -2)])
    return tf.where(tf.abs(x) < 0.5, near, log(target, 1 + x))


def tan(target, x, **_):
    return tf.sin(x) / tf.cos(x)


def asin(target, x, **_):
    return tf.atan2(x, tf.sqrt(minus(1, x) * (x + 1)))


def acos(target, x, **_):
    return tf.atan2(tf.sqrt(minus(1, x) * (x + 1)), x)


def atan(target, x, **_):
    return tf.atan2(x, tf.ones_like(x))


def atan2(target, y, x, **_):
    """TFLite's op does not broadcast."""
    if tuple(y.shape) != tuple(x.shape):
        ones = tf.ones_like(x + y)
        x, y = x * ones, y * ones  # which keeps -0, as adding 0 does not
    return tf.atan2(y, x)


def sinh(target, x, **_):
    """exp(x) / 2 as exp(x - log 2), which overflows no sooner than the result."""
    m = expm1(target, x)
    large = tf.exp(x - math.log(2)) - tf.exp(-x - math.log(2))
    return tf.where(tf.abs(x) >= 1, large, 0.5 * (m + m / (m + 1)))  # which is nan for nan


def cosh(target, x, **_):
    return exp(target, x - math.log(2)) + tf.exp(-x - math.log(2))


def asinh(target, x, **_):
    size = tf.minimum(tf.abs(x), 1e18)  # its square is finite
    near = log1p(target, size + size * size / (1 + tf.sqrt(size * size + 1)))
    return tf.sign(x) * tf.where(tf.abs(x) < 1e18, near, log(target, tf.abs(x)) + math.log(2))


def acosh(target, x, **_):
    above = tf.minimum(x, 1e18) - 1
    near = log1p(target, above + tf.sqrt(above) * tf.sqrt(above + 2))
    return tf.where(x < 1e18, near, log(target, x) + math.log(2))


def atanh(target, x, **_):
    return 0.5 * (log1p(target, x) - log1p(target, -x))


def cbrt(target, x, **_):
    return tf.sign(x) * tf.pow(tf.abs(x), 1 / 3)


def exp2(target, x, **_):
    return tf.pow(left(np.float32(2), x), x)


def real_dft(target, x):
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


def bitcast(target, x, *, new_dtype):
    if is_bool(x) or np.dtype(new_dtype) == bool or new_dtype.itemsize != target_size(x):
        target.refuse("bitcast_convert_type", f"of {x.dtype.name} to {np.dtype(new_dtype)}")
    return tf.bitcast(x, new_dtype)


def target_size(x):
    return np.dtype(x.dtype.name).itemsize


PRIMITIVES = {
    "real_dft": real_dft,
    "bitcast_convert_type": bitcast,
} | {
    f.__name__: f
    for f in (
        *(erf, erfc, erf_inv, expm1, log1p, exp2, cbrt),
        *(tan, asin, acos, atan, atan2, sinh, cosh, asinh, acosh, atanh),
    )
}
