"""Convolutions of NHWC images as TFLite has them: SAME or VALID; full, depthwise or grouped."""

import numpy as np
import tensorflow as tf

from model.layers.conv import resolve_padding


def convolution(x, weight, stride, pads, dilation):
    """x, (B, H, W, in), with an HWIO weight, constant or not, whose shape implies the groups."""
    size, channels, outputs = x.shape[1:3], x.shape[-1], weight.shape[-1]
    groups = channels // weight.shape[2]
    # a dilation of a single tap has no effect, but TensorFlow would cut the image for it
    dilation = tuple(1 if k == 1 else d for k, d in zip(weight.shape[:2], dilation, strict=True))
    if tuple(pads) == resolve_padding("SAME", size, weight.shape[:2], stride, dilation):
        padding = "SAME"
    else:
        padding, x = "VALID", padded(x, pads)
    if groups == 1 or groups < channels or stride[0] != stride[1]:
        return tf.nn.conv2d(x, weight, stride, padding, dilations=dilation)
    shape = (*weight.shape[:2], channels, outputs // channels)
    kernel = weight.reshape(shape) if isinstance(weight, np.ndarray) else tf.reshape(weight, shape)
    return tf.nn.depthwise_conv2d(x, kernel, (1, *stride, 1), padding, dilations=dilation)


def padded(x, pads):
    """An image with zeros around it; negative pads cut it off."""
    if any(p < 0 for pair in pads for p in pair):
        (top, bottom), (left, right) = [[max(-p, 0) for p in pair] for pair in pads]
        x = x[:, top : x.shape[1] - bottom, left : x.shape[2] - right]
    added = [[max(p, 0) for p in pair] for pair in pads]
    return tf.pad(x, [(0, 0), *added, (0, 0)]) if any(map(any, added)) else x


def out_size(size, kernel, stride, pads, dilation):
    """The height and width of a convolution's result."""
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    return [(sum(p) + n - r) // s + 1 for n, r, s, p in zip(size, reach, stride, pads, strict=True)]
