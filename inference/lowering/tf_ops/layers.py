"""The layers with weights, and pooling."""

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.convolution import convolution, padded
from inference.lowering.tf_ops.elementwise import limited
from inference.lowering.tf_ops.indexing import size_of
from inference.lowering.tf_ops.pending import (
    UNIT,
    Linear,
    Scaled,
    folds,
    is_known,
    linear_of,
    solid,
)
from inference.lowering.trimming import trimmed
from model.layers.conv import explicit_padding, pair, resolve_padding
from model.layers.pool import geometry


@folds
def linear(target, params, x):
    """(..., in) -> (..., out)."""
    if is_known(*params.values()):
        image = UNIT if len(x.shape) == 4 else None
        weight = params["weight"]
        return linear_of(x, weight[None, None] if image else weight, params.get("bias"), image)
    y = tf.matmul(solid(x), params["weight"])
    return y + params["bias"] if "bias" in params else y


@folds
def conv2d(target, params, x, *, stride, padding, dilation):
    weight, stride, dilation = params["weight"], pair(stride), pair(dilation)
    pads = resolve_padding(padding, tuple(x.shape[1:3]), tuple(weight.shape[:2]), stride, dilation)
    weight, pads = trimmed(weight, tuple(x.shape[1:3]), stride, pads, dilation)
    dilation = tuple(1 if k == 1 else d for k, d in zip(weight.shape[:2], dilation, strict=True))
    where = {"stride": stride, "pads": pads, "dilation": dilation}
    if is_known(*params.values()):
        return linear_of(x, weight, params.get("bias"), where)
    y = convolution(solid(x), weight, **where)
    return y + params["bias"] if "bias" in params else y


def conv_transpose2d(target, params, x, *, stride, padding):
    """TFLite's transposed convolution scatters the kernel over the output; its whole reach is cut to what JAX's padding asks."""
    weight, stride = params["weight"], pair(stride)
    kernel, out = weight.shape[:2], target.out[0].shape
    reach = [(n - 1) * s + k for n, s, k in zip(x.shape[1:3], stride, kernel, strict=True)]
    flipped = np.transpose(weight[::-1, ::-1], (0, 1, 3, 2))
    y = tf.nn.conv2d_transpose(
        x, flipped, [size_of(x, 0), *reach, weight.shape[-1]], stride, "VALID"
    )
    y = padded(y, cut(padding, kernel, stride, reach, out[1:3]))
    return y + params["bias"] if "bias" in params else y


def cut(padding, kernel, stride, reach, out):
    """What to take away of the whole reach, as negative padding."""
    if isinstance(padding, str):
        before = [
            k - 1 - same_start(k, s) if padding == "SAME" else 0
            for k, s in zip(kernel, stride, strict=True)
        ]
    else:
        before = [
            k - 1 - first for (first, _), k in zip(explicit_padding(padding), kernel, strict=True)
        ]
    return [(-b, o - r + b) for b, r, o in zip(before, reach, out, strict=True)]


def same_start(kernel, stride):
    """What JAX pads in front of a dilated input for SAME."""
    return kernel - 1 if stride > kernel - 1 else -(-(kernel + stride - 2) // 2)


def embedding(target, params, ids):
    """(...) integers -> (..., dim); an id past the end gives nan, one below 0 counts from it."""
    weight = params["weight"]
    count = weight.shape[0]
    ids = tf.where(ids < 0, ids + count, ids)
    found = tf.gather(weight, limited(ids, 0, count - 1))
    inside = tf.logical_and(ids >= 0, ids < count)
    return tf.where(inside[..., None], found, np.float32(np.nan))


def max_pool(target, x, window, *, stride, padding):
    window, stride, pads = geometry(x, window, stride, padding)
    return pool(x, window, stride, pads, "MAX", -np.inf)


def avg_pool(target, x, window, *, stride, padding):
    """TFLite's mean over SAME counts pixels alone; around other padding, what counts is divided out."""
    window, stride, pads = geometry(x, window, stride, padding)
    y = pool(x, window, stride, pads, "AVG", 0)
    if pads == resolve_padding("SAME", x.shape[1:3], window, stride) or not np.any(pads):
        return y
    inside = np.pad(np.ones(x.shape[1:3]), pads)
    shares = np.lib.stride_tricks.sliding_window_view(inside, window)[
        :: stride[0], :: stride[1]
    ].mean((2, 3))
    return y * (1 / shares)[:, :, None].astype(np.float32)


def pool(x, window, stride, pads, kind, rim):
    if pads == resolve_padding("SAME", x.shape[1:3], window, stride):
        return tf.nn.pool(x, window, kind, stride, "SAME")
    if np.any(pads):
        x = tf.pad(x, [(0, 0), *pads, (0, 0)], constant_values=rim)
    return tf.nn.pool(x, window, kind, stride, "VALID")


def global_max_pool(target, x):
    return tf.reduce_max(x, (1, 2))


@folds
def global_avg_pool(target, x):
    """(B, H, W, C) -> (B, C). A mean of one pixel is no mean, and what scales channels may follow it."""
    if isinstance(x, Scaled):
        return Scaled(global_avg_pool(target, x.x), x.scale, x.shift, x.at_once)
    if x.shape[1:3] == (1, 1):
        return tf.reshape(solid(x), (-1, x.shape[-1]))
    if isinstance(x, Linear) and x.dense and x.weight.shape[:2] == (1, 1) and x.geometry == UNIT:
        return Linear(tf.reduce_mean(x.x, (1, 2)), x.weight[0, 0], x.bias)
    return tf.reduce_mean(solid(x), (1, 2))


LAYERS = {
    f.__name__: f
    for f in (
        *(linear, conv2d, conv_transpose2d, embedding),
        *(max_pool, avg_pool, global_max_pool, global_avg_pool),
    )
}
