"""Normalizations.

Numbers that are one for a row of few channels are slow: XNNPACK spreads them row by row. So where channels are few, the mean
of a row is a product with a constant matrix, which gives it to every channel at once, or is part of the map in front.
Measured on the sample: 9 us instead of 18 at batch 1, 470 instead of 970 at batch 64.
"""

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.pending import UNIT, Linear, Scaled, folds, is_known, solid

FEW = 24  # channels; at 16 products take 0.8 of the time of means, at 32 1.4


@folds
def layer_norm(target, params, x, *, eps):
    return scaled(target, standardized(target, x, eps), params["scale"], params["bias"])


def rms_norm(target, params, x, *, eps):
    return scaled(
        target, x * tf.math.rsqrt(mean_square(target, x, eps)), params["scale"], 0 * params["scale"]
    )


def standardized(target, x, eps):
    """Mean 0 and variance 1 over the last axis."""
    centred = solid(centre(target, x))
    return centred * tf.math.rsqrt(mean_square(target, centred, eps))


def centre(target, x):
    channels = x.shape[-1]
    matrix = np.eye(channels) - 1 / channels
    if isinstance(x, Linear) and x.dense:
        return x.mixed(matrix)
    x = solid(x)
    return (
        mixed(x, matrix)
        if target.products and channels <= FEW
        else x - tf.reduce_mean(x, -1, keepdims=True)
    )


def mean_square(target, x, eps):
    """The mean of the squares over the last axis, plus eps; for each channel again where they are few."""
    channels = x.shape[-1]
    if target.products and channels <= FEW:
        return mixed(x * x, np.full((channels, channels), 1 / channels), np.full(channels, eps))
    return tf.reduce_mean(tf.square(x), -1, keepdims=True) + np.float32(eps)


def mixed(x, matrix, bias=None):
    """A product with a constant matrix over the last axis."""
    image = UNIT if len(x.shape) == 4 else None
    return Linear(x, matrix[None, None] if image else matrix, bias, image).tensor()


def scaled(target, x, scale, shift):
    if is_known(scale, shift):
        return Scaled(x, scale, shift, target.products)
    return x * scale + shift


@folds
def by_statistics(target, params, statistics, x, *, eps):
    if not is_known(*params.values(), *statistics.values()):
        return (solid(x) - statistics["mean"]) * (
            tf.math.rsqrt(statistics["var"] + eps) * params["scale"]
        ) + params["bias"]
    scale = params["scale"] / np.sqrt(statistics["var"].astype(np.float64) + eps)
    shift = params["bias"] - statistics["mean"] * scale
    return (
        x.affine(scale, shift)
        if isinstance(x, Linear)
        else Scaled(solid(x), scale, shift, target.products)
    )


def group_norm(target, params, x, *, groups, eps):
    """Each group of channels of an example is one row."""
    size, channels = x.shape[1:-1], x.shape[-1]
    x = tf.reshape(x, (-1, int(np.prod(size)), groups, channels // groups))
    centred = x - tf.reduce_mean(x, (1, 3), keepdims=True)
    y = centred * tf.math.rsqrt(
        tf.reduce_mean(tf.square(centred), (1, 3), keepdims=True) + np.float32(eps)
    )
    return scaled(target, tf.reshape(y, (-1, *size, channels)), params["scale"], params["bias"])


LAYERS = {f.__name__: f for f in (layer_norm, rms_norm, by_statistics, group_norm)}
