"""Activations, each as one op where TFLite has it."""

import math

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.elementwise import expm1, log1p


def relu(target, x):
    return tf.nn.relu(x)


def leaky_relu(target, x, slope):
    return tf.nn.leaky_relu(x, slope)


def elu(target, x, alpha):
    if alpha == 1:
        return tf.nn.elu(x)
    return tf.where(x > 0, x, alpha * expm1(target, tf.minimum(x, np.float32(0))))


def gelu(target, x):
    """In the form that the converter recognizes as GELU."""
    # with this shape of the half, the converter does not share x / 2 with other ops, which would
    # break the form
    half = np.full((1,) * len(x.shape), 0.5, np.float32)
    return half * x * (1 + tf.math.erf(x * np.float32(math.sqrt(0.5))))


def gelu_tanh(target, x):
    return tf.nn.gelu(x, approximate=True)


def sigmoid(target, x):
    return tf.sigmoid(x)


def silu(target, x):
    return x * tf.sigmoid(x)


def hard_sigmoid(target, x):
    return tf.nn.relu6(x + np.float32(3)) * np.float32(1 / 6)


def hard_swish(target, x):
    return x * hard_sigmoid(target, x)


def softplus(target, x):
    """log(1 + exp(x)) without the exponential of a large number."""
    return tf.nn.relu(x) + log1p(target, tf.exp(-tf.abs(x)))


def mish(target, x):
    return x * tf.tanh(softplus(target, x))


def softmax(target, x):
    return tf.nn.softmax(x)


def log_softmax(target, x):
    return tf.nn.log_softmax(x)


def softmax_along(target, x, axis):
    return tf.nn.softmax(x, axis)


def log_softmax_along(target, x, axis):
    return tf.nn.log_softmax(x, axis)


def relu6(target, x):
    return tf.nn.relu6(x)


def hard_tanh(target, x):
    return tf.minimum(tf.maximum(x, np.float32(-1)), np.float32(1))


def selu(target, x):
    """TFLite's ELU below 0, where it has a factor of its own."""
    scale, alpha = np.float32(1.0507009873554805), np.float32(1.7580993408473766)
    return scale * tf.nn.relu(x) + alpha * tf.nn.elu(tf.minimum(x, np.float32(0)))


def soft_sign(target, x):
    return x / (tf.abs(x) + np.float32(1))


LAYERS = {
    f.__name__: f
    for f in (
        *(relu, leaky_relu, elu, gelu, gelu_tanh, sigmoid, silu, hard_sigmoid, hard_swish),
        *(softplus, mish, softmax, log_softmax, softmax_along, log_softmax_along),
        *(relu6, hard_tanh, selu, soft_sign),
    )
}
