"""Convolutions of NHWC images as TFLite has them: SAME or VALID; full, depthwise or grouped."""

import numpy as np
import tensorflow as tf
from jax import lax

from model.layers.conv import resolve_padding


def convolution(x, weight, stride, pads, dilation):
    """x, (B, H, W, in), with an HWIO weight, constant or not, whose shape implies the groups."""
    channels, outputs = x.shape[-1], weight.shape[-1]
    groups = channels // weight.shape[2]
    # a dilation of a single tap has no effect, but TensorFlow would cut the image for it
    dilation = tuple(1 if k == 1 else d for k, d in zip(weight.shape[:2], dilation, strict=True))
    if is_same(pads, x.shape[1:3], weight.shape[:2], stride, dilation):
        padding = "SAME"
    else:
        padding, x = "VALID", padded(x, pads)
    if groups == 1 or groups < channels or stride[0] != stride[1]:
        return tf.nn.conv2d(x, weight, stride, padding, dilations=dilation)
    shape = (*weight.shape[:2], channels, outputs // channels)
    kernel = weight.reshape(shape) if isinstance(weight, np.ndarray) else tf.reshape(weight, shape)
    return tf.nn.depthwise_conv2d(x, kernel, (1, *stride, 1), padding, dilations=dilation)


def pads_of(target, padding, size, kernel, stride, dilation=(1, 1)):
    """((top, bottom), (left, right)), or "SAME" for free sizes, for which TFLite computes it."""
    if None not in size or not isinstance(padding, str):
        return resolve_padding(padding, size, kernel, stride, dilation)
    if padding == "SAME":
        return padding
    if padding != "VALID":
        target.refuse("a convolution", f"or pooling with the padding {padding} of a free size")
    return ((0, 0), (0, 0))


def is_same(pads, size, kernel, stride, dilation=(1, 1)):
    """Whether a padding is that of SAME; for a free size, it must be so for every size."""
    if isinstance(pads, str):
        return pads == "SAME"
    if any(n is None and s > 1 for n, s in zip(size, stride, strict=True)):
        return False
    size = [1 if n is None else n for n in size]
    return tuple(pads) == resolve_padding("SAME", size, kernel, stride, dilation)


def symbolic_same(pads, size, kernel, stride, dilation):
    """Whether a padding that is computed from symbolic sizes is that of SAME."""
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    return tuple(pads) == tuple(lax.padtype_to_pads(size, reach, stride, "SAME"))


def padded(x, pads):
    """An image with zeros around it; negative pads cut it off, with the zeros of the other side."""
    added = [[max(p, 0) for p in pair] for pair in pads]
    x = tf.pad(x, [(0, 0), *added, (0, 0)]) if any(map(any, added)) else x
    if all(p >= 0 for pair in pads for p in pair):
        return x
    (top, bottom), (left, right) = [[max(-p, 0) for p in pair] for pair in pads]
    return x[:, top : -bottom or None, left : -right or None]


def out_size(size, kernel, stride, pads, dilation):
    """The height and width of a convolution's result; None where they are free."""
    if None in size:
        return [None, None]
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    return [(sum(p) + n - r) // s + 1 for n, r, s, p in zip(size, reach, stride, pads, strict=True)]
