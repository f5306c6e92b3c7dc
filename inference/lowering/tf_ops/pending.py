"""Linear maps that are not computed yet, so that what surrounds them can be folded into their weights.

A layer's result may be one of these instead of a tensor. The next layer folds it, or takes its tensor. Weights are
multiplied in float64 and rounded once.
"""

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.convolution import convolution, out_size

UNIT = {"stride": (1, 1), "pads": ((0, 0), (0, 0)), "dilation": (1, 1)}


class Pending:
    """What has a `shape`, and a tensor as soon as one is asked for. `shared`: folds into each of several layers that follow."""

    cached, shared = None, False

    def tensor(self):
        if self.cached is None:
            self.cached = self.emit()
        return self.cached


class Linear(Pending):
    """A product of the channels, or a convolution, with constant weights: (in, out) or (kh, kw, in / groups, out)."""

    def __init__(self, x, weight, bias=None, geometry=None):
        self.x, self.geometry = x, geometry
        self.weight = np.asarray(weight, np.float64)
        self.bias = np.zeros(weight.shape[-1]) if bias is None else np.asarray(bias, np.float64)

    @property
    def dense(self):
        """Whether each output reads all channels, so that a product with a matrix can follow within the same weights."""
        return self.weight.shape[-2] == self.x.shape[-1]

    @property
    def shape(self):
        if not self.geometry:
            return (*self.x.shape[:-1], self.weight.shape[-1])
        size = out_size(self.x.shape[1:3], self.weight.shape[:2], **self.geometry)
        return (self.x.shape[0], *size, self.weight.shape[-1])

    def mixed(self, matrix):
        """This, then a product with a matrix."""
        return Linear(self.x, self.weight @ matrix, self.bias @ matrix, self.geometry)

    def affine(self, scale, shift):
        """This, then a scale and a shift of each channel."""
        return Linear(self.x, self.weight * scale, self.bias * scale + shift, self.geometry)

    def emit(self):
        weight, bias = self.weight.astype(np.float32), self.bias.astype(np.float32)
        y = (
            convolution(self.x, weight, **self.geometry)
            if self.geometry
            else tf.matmul(self.x, weight)
        )
        return tf.nn.bias_add(y, bias) if bias.any() else y


class Scaled(Pending):
    """A scale and a shift of each channel: the end of a normalization. `at_once`: as one product, where there is one."""

    shared = True

    def __init__(self, x, scale, shift, at_once):
        self.x, self.scale, self.shift, self.at_once = (
            x,
            np.float32(scale),
            np.float32(shift),
            at_once,
        )

    @property
    def shape(self):
        return self.x.shape

    def emit(self):
        if (
            self.at_once and len(self.x.shape) == 4 and self.shift.any()
        ):  # XNNPACK runs this as one multiply-add
            return tf.nn.bias_add(
                convolution(self.x, self.scale.reshape(1, 1, 1, -1), **UNIT), self.shift
            )
        scaled = self.x if np.all(self.scale == 1) else self.x * self.scale
        return scaled + self.shift if np.any(self.shift) else scaled


def folds(function):
    """Marks a function of the table whose operands may be pending; the others receive tensors."""
    function.folds = True
    return function


def solid(x):
    """The tensor of what may be pending."""
    return x.tensor() if isinstance(x, Pending) else x


def is_known(*arrays):
    return all(isinstance(array, np.ndarray) for array in arrays)


def linear_of(x, weight, bias=None, geometry=None):
    """A product or a convolution with constant weights, what is pending in front of it folded in where that is possible."""
    is_padded = geometry and np.any(geometry["pads"])
    if isinstance(x, Scaled) and not (
        is_padded and x.shift.any()
    ):  # padding is 0 after the shift, not before
        shift = (weight * by_input(x.shift, weight, x.shape[-1])).sum(tuple(range(weight.ndim - 1)))
        return Linear(
            x.x,
            weight * by_input(x.scale, weight, x.shape[-1]),
            shift if bias is None else shift + bias,
            geometry,
        )
    if isinstance(x, Linear) and weight.shape[:-2] in [(), (1, 1)] and (geometry or UNIT) == UNIT:
        bias = 0 if bias is None else bias
        if weight.shape[-2:] == (1, x.shape[-1]):  # a number for each channel
            return x.affine(weight.ravel(), bias)
        if x.dense and is_smaller(x, weight):
            return x.mixed(weight.reshape(weight.shape[-2:])).affine(1, bias)
    return Linear(solid(x), weight, bias, geometry)


def by_input(numbers, weight, channels):
    """One number for each input channel, for each input and output of a weight, whose outputs may be in groups."""
    groups = channels // weight.shape[-2]
    per_output = np.repeat(
        numbers.astype(np.float64).reshape(groups, -1), weight.shape[-1] // groups, axis=0
    )
    return per_output.T


def is_smaller(first, weight):
    """Whether one map in place of two, the second a product with this weight of all channels, has no more numbers."""
    if weight.shape[-2] != first.weight.shape[-1]:
        return False
    return (
        first.weight.size // first.weight.shape[-1] * weight.shape[-1]
        <= first.weight.size + weight.size
    )
