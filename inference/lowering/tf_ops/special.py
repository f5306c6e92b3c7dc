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


def polynomial(x, coefficients):
    y = np.float32(coefficients[0])
    for c in coefficients[1:]:
        y = y * x + np.float32(c)
    return y


def erf(target, x, **_):
    x = tf.clip_by_value(x, -ERF_END, ERF_END)
    return x * polynomial(x * x, ERF_ABOVE) / polynomial(x * x, ERF_BELOW)


def erfc(target, x, **_):
    size = tf.maximum(tf.abs(x), 1.0)
    inverse = 1.0 / (size * size)
    tail = tf.exp(-size * size) / size
    tail = tail * tf.where(
        size < 2, polynomial(inverse, ERFC_BELOW_2), polynomial(inverse, ERFC_ABOVE_2)
    )
    return tf.where(tf.abs(x) < 1, 1 - erf(target, x), tf.where(x < 0, 2 - tail, tail))


def erf_inv(target, x, **_):
    w = -tf.math.log((1 - x) * (1 + x))
    near = polynomial(tf.minimum(w, 5.0) - 2.5, ERF_INV_BELOW_5)
    far = polynomial(tf.sqrt(tf.maximum(w, 5.0)) - 3, ERF_INV_ABOVE_5)
    return tf.where(tf.equal(tf.abs(x), 1), x * np.float32(np.inf), x * tf.where(w < 5, near, far))


def expm1(target, x, **_):
    """tanh(x / 2) (exp(x) + 1) near 0, where exp(x) - 1 would round x away."""
    exp = tf.exp(x)
    return tf.where(tf.abs(x) < 0.5, tf.tanh(x * 0.5) * (exp + 1), exp - 1)


def log1p(target, x, **_):
    """The series of 2 atanh(x / (2 + x)) near 0, where 1 + x would round x away."""
    s = x / (x + 2)
    near = 2 * s * polynomial(s * s, [1 / n for n in range(15, 0, -2)])
    return tf.where(tf.abs(x) < 0.5, near, tf.math.log(1 + x))


def tan(target, x, **_):
    return tf.sin(x) / tf.cos(x)


def asin(target, x, **_):
    return tf.atan2(x, tf.sqrt((1 - x) * (1 + x)))


def acos(target, x, **_):
    return tf.atan2(tf.sqrt((1 - x) * (1 + x)), x)


def atan(target, x, **_):
    return tf.atan2(x, tf.ones_like(x))


def atan2(target, y, x, **_):
    return tf.atan2(y, x)


def sinh(target, x, **_):
    """exp(x) / 2 as exp(x - log 2), which overflows no sooner than the result."""
    m = expm1(target, x)
    large = tf.exp(x - math.log(2)) - tf.exp(-x - math.log(2))
    return tf.where(tf.abs(x) < 1, 0.5 * (m + m / (m + 1)), large)


def cosh(target, x, **_):
    return tf.exp(x - math.log(2)) + tf.exp(-x - math.log(2))


def asinh(target, x, **_):
    size = tf.minimum(tf.abs(x), 1e18)  # its square is finite
    near = log1p(target, size + size * size / (1 + tf.sqrt(size * size + 1)))
    return tf.sign(x) * tf.where(tf.abs(x) < 1e18, near, tf.math.log(tf.abs(x)) + math.log(2))


def acosh(target, x, **_):
    above = tf.minimum(x, 1e18) - 1
    near = log1p(target, above + tf.sqrt(above) * tf.sqrt(above + 2))
    return tf.where(x < 1e18, near, tf.math.log(x) + math.log(2))


def atanh(target, x, **_):
    return 0.5 * (log1p(target, x) - log1p(target, -x))


def cbrt(target, x, **_):
    return tf.sign(x) * tf.pow(tf.abs(x), 1 / 3)


def exp2(target, x, **_):
    return tf.pow(2.0, x)


PRIMITIVES = {
    f.__name__: f
    for f in (
        *(erf, erfc, erf_inv, expm1, log1p, exp2, cbrt),
        *(tan, asin, acos, atan, atan2, sinh, cosh, asinh, acosh, atanh),
    )
}
