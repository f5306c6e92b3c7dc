"""Normalizations.

One number per row is slow where a row has few channels, since XNNPACK broadcasts it row by row.
With few channels, the mean of a row is therefore computed as a product with a constant matrix,
which puts the mean into every channel, or it is folded into the linear map before it. Measured on
the sample model: 9 us instead of 18 at batch 1, 470 us instead of 970 at batch 64.
"""

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.indexing import shape_of, size_of
from inference.lowering.tf_ops.pending import (
    UNIT,
    Linear,
    Scaled,
    folds,
    is_constant,
    is_image,
    resolved,
)

FEW = 24  # channels; with 16, products take 0.8 times as long as means, with 32 1.4 times


@folds
def layer_norm(target, params, x, *, eps):
    return scaled(target, standardized(target, x, eps), **params)


def rms_norm(target, params, x, *, eps):
    y = x * tf.math.rsqrt(mean_square(target, x, eps))
    return scaled(target, y, params["scale"])


def standardized(target, x, eps):
    """x with mean 0 and variance 1 over the last axis."""
    centred = resolved(centre(target, x))
    return centred * tf.math.rsqrt(mean_square(target, centred, eps))


def centre(target, x):
    channels = x.shape[-1]
    matrix = np.eye(channels) - 1 / channels
    if isinstance(x, Linear) and x.dense:
        return x.mixed(matrix)
    x = resolved(x)
    if target.products and channels <= FEW:
        return mixed(x, matrix)
    return x - tf.reduce_mean(x, -1, keepdims=True)


def mean_square(target, x, eps):
    """The mean of the squares over the last axis, plus eps; few channels each hold a copy of it."""
    channels = x.shape[-1]
    if target.products and channels <= FEW:
        return mixed(x * x, np.full((channels, channels), 1 / channels), np.full(channels, eps))
    return tf.reduce_mean(tf.square(x), -1, keepdims=True) + np.float32(eps)


def mixed(x, matrix, bias=None):
    """The product of the last axis with a constant matrix."""
    image = UNIT if is_image(x) else None
    return Linear(x, matrix[None, None] if image else matrix, bias, image).tensor()


def scaled(target, x, scale, bias=None):
    bias = 0 * scale if bias is None else bias
    if is_constant(scale, bias):
        return Scaled(x, scale, bias, target.products)
    return x * scale + bias


@folds
def by_statistics(target, params, statistics, x, *, eps):
    if not is_constant(*params.values(), *statistics.values()):
        scale = tf.math.rsqrt(statistics["var"] + eps) * params["scale"]
        return (resolved(x) - statistics["mean"]) * scale + params["bias"]
    scale = params["scale"] / np.sqrt(statistics["var"].astype(np.float64) + eps)
    shift = params["bias"] - statistics["mean"] * scale
    if isinstance(x, Linear):
        return x.affine(scale, shift)
    x = resolved(x)
    return Scaled(x, scale, shift, target.products and not follows_convolution(x))


def follows_convolution(x):
    """Whether TensorFlow's converter will fold a scale and a shift into the op before them."""
    op = x.op.inputs[0].op if x.op.type in ("AddV2", "BiasAdd") else x.op
    return op.type in ("Conv2D", "DepthwiseConv2dNative")


def group_norm(target, params, x, *, groups, eps):
    """A normalization in which each group of channels of an example is one row."""
    shape, channels = [size_of(x, axis) for axis in range(len(x.shape))], x.shape[-1]
    x = tf.reshape(x, (shape[0], -1, groups, channels // groups))
    centred = x - tf.reduce_mean(x, (1, 3), keepdims=True)
    variance = tf.reduce_mean(tf.square(centred), (1, 3), keepdims=True)
    y = centred * tf.math.rsqrt(variance + np.float32(eps))
    return scaled(target, tf.reshape(y, shape_of(shape)), **params)


LAYERS = {f.__name__: f for f in (layer_norm, rms_norm, by_statistics, group_norm)}
