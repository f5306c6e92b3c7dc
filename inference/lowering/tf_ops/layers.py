"""Layers with weights, normalizations, pooling, and attention, for which TFLite has no op.

In a normalization, one number per row is slow where a row has few channels, since XNNPACK
broadcasts it row by row. With few channels, the mean of a row is therefore computed as a product
with a constant matrix, which puts the mean into every channel, or it is folded into the linear map
before it. Measured on the sample model: 9 us instead of 18 at batch 1, 470 us instead of 970 at
batch 64.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.elementwise import Tensor, limited
from inference.lowering.tf_ops.pending import (
    UNIT,
    Linear,
    Result,
    Scaled,
    is_constant,
    is_image,
    linear_of,
    resolved,
)
from inference.lowering.tf_ops.products import convolution, is_same, padded, pads_of
from inference.lowering.tf_ops.shapes import as_index, shape_of, size_of
from inference.lowering.trimming import Padding, Pads, trimmed
from inference.lowering.value import Size
from model.layers.conv import explicit_padding, pair

if TYPE_CHECKING:
    from inference.lowering.tf_ops.target import TfTarget

Params: TypeAlias = dict[str, Tensor]


def linear(target: "TfTarget", params: Params, x: Tensor) -> Result:
    """(..., in) -> (..., out)."""
    if is_constant(*params.values()):
        image = UNIT if is_image(x) else None
        weight = params["weight"]
        return linear_of(x, weight[None, None] if image else weight, params.get("bias"), image)
    y = tf.matmul(resolved(x), params["weight"])
    return y + params["bias"] if "bias" in params else y


def linears(target: "TfTarget", layers: Sequence[Params], x: Tensor) -> list[Result]:
    return [linear(target, params, x) for params in layers]


def unembedding(target: "TfTarget", params: Params, x: Tensor) -> Tensor:
    return tf.matmul(x, params["weight"], transpose_b=True)


def conv2d(
    target: "TfTarget",
    params: Params,
    x: Tensor,
    *,
    stride: int | Sequence[int],
    padding: Padding,
    dilation: int | Sequence[int],
) -> Result:
    weight, stride, dilation = params["weight"], pair(stride), pair(dilation)
    geometry = tuple(x.shape[1:3]), tuple(weight.shape[:2]), stride, dilation
    pads = pads_of(target, padding, *geometry)
    weight, pads = trimmed(weight, tuple(x.shape[1:3]), stride, pads, dilation)
    dilation = tuple(1 if k == 1 else d for k, d in zip(weight.shape[:2], dilation, strict=True))
    geometry = {"stride": stride, "pads": pads, "dilation": dilation}
    if is_constant(*params.values()):
        return linear_of(x, weight, params.get("bias"), geometry)
    y = convolution(resolved(x), weight, **geometry)
    return y + params["bias"] if "bias" in params else y


def conv_transpose2d(
    target: "TfTarget", params: Params, x: Tensor, *, stride: int | Sequence[int], padding: Padding
) -> Tensor:
    """TFLite's op without padding; its full result is cut to what JAX's padding gives."""
    weight, stride = params["weight"], pair(stride)
    kernel, out = weight.shape[:2], target.out[0].shape
    sizes = zip(target.operand_shapes[-1][1:3], stride, kernel, strict=True)
    full = [(n - 1) * s + k for n, s, k in sizes]
    flipped = np.transpose(weight[::-1, ::-1], (0, 1, 3, 2))
    shape = [size_of(x, 0), *map(target.size, full), weight.shape[-1]]
    y = tf.nn.conv2d_transpose(x, flipped, shape, stride, "VALID")  # pyright: ignore[reportArgumentType]  # takes a list
    y.set_shape([None, None, None, weight.shape[-1]])
    y = padded(y, cut(padding, kernel, stride, full, out[1:3]))
    return y + params["bias"] if "bias" in params else y


def cut(
    padding: Padding,
    kernel: Sequence[int],
    stride: Sequence[int],
    full: Sequence[Size],
    out: Sequence[Size],
) -> list[tuple[int, int]]:
    """The negative padding that cuts the full result to JAX's size."""
    if padding == "VALID":
        before = [0, 0]
    elif padding == "SAME":
        before = [k - 1 - same_start(k, s) for k, s in zip(kernel, stride, strict=True)]
    else:
        pads = explicit_padding(padding)
        before = [k - 1 - first for (first, _), k in zip(pads, kernel, strict=True)]
    return [(-b, o - f + b) for b, f, o in zip(before, full, out, strict=True)]


def same_start(kernel: int, stride: int) -> int:
    """JAX's padding before a dilated input for SAME."""
    return kernel - 1 if stride > kernel - 1 else -(-(kernel + stride - 2) // 2)


def embedding(target: "TfTarget", params: Params, ids: Tensor) -> Tensor:
    """The rows of the ids; as in JAX, nan for an id past the end, or below 0."""
    weight = params["weight"]
    count = weight.shape[0]
    ids = as_index(ids)
    rows = tf.gather(weight, limited(ids, 0, count - 1))
    inside = tf.logical_and(ids >= 0, ids < count)
    return tf.where(tf.expand_dims(inside, -1), rows, np.float32(np.nan))


def max_pool(
    target: "TfTarget",
    x: Tensor,
    window: int | Sequence[int],
    *,
    stride: int | Sequence[int] | None,
    padding: Padding,
) -> Tensor:
    window, stride, pads = pool_geometry(target, x, window, stride, padding)
    return pool(x, window, stride, pads, "MAX", -np.inf)


def avg_pool(
    target: "TfTarget",
    x: Tensor,
    window: int | Sequence[int],
    *,
    stride: int | Sequence[int] | None,
    padding: Padding,
) -> Tensor:
    """TFLite counts only pixels for SAME; for other padding the mean is divided by their share."""
    window, stride, pads = pool_geometry(target, x, window, stride, padding)
    y = pool(x, window, stride, pads, "AVG", 0)
    if is_same(pads, x.shape[1:3], window, stride) or not np.any(pads):
        return y
    if None in x.shape[1:3]:
        return y / pool(tf.ones_like(x[:1, :, :, :1]), window, stride, pads, "AVG", 0)
    inside = np.pad(np.ones(x.shape[1:3]), pads)
    windows = np.lib.stride_tricks.sliding_window_view(inside, window)
    shares = windows[:: stride[0], :: stride[1]].mean((2, 3))
    return y * (1 / shares)[:, :, None].astype(np.float32)


def pool_geometry(
    target: "TfTarget",
    x: Tensor,
    window: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: Padding,
) -> tuple[Sequence[int], Sequence[int], Pads]:
    window = pair(window)
    stride = window if stride is None else pair(stride)
    return window, stride, pads_of(target, padding, x.shape[1:3], window, stride)


def pool(
    x: Tensor, window: Sequence[int], stride: Sequence[int], pads: Pads, kind: str, pad_value: float
) -> Tensor:
    if is_same(pads, x.shape[1:3], window, stride):
        return tf.nn.pool(x, window, kind, stride, "SAME")
    if np.any(pads):
        x = tf.pad(x, [(0, 0), *pads, (0, 0)], constant_values=pad_value)
    return tf.nn.pool(x, window, kind, stride, "VALID")


def global_max_pool(target: "TfTarget", x: Tensor) -> Tensor:
    return tf.reduce_max(x, (1, 2))


def global_avg_pool(target: "TfTarget", x: Tensor) -> Result:
    """(B, H, W, C) -> (B, C); a pending map of the channels is moved behind the mean."""
    if isinstance(x, Scaled):
        return Scaled(global_avg_pool(target, x.x), x.scale, x.shift, x.products)
    if x.shape[1:3] == (1, 1):
        return tf.reshape(resolved(x), (-1, x.shape[-1]))
    if isinstance(x, Linear) and x.dense and x.weight.shape[:2] == (1, 1) and x.geometry == UNIT:
        return Linear(tf.reduce_mean(x.x, (1, 2)), x.weight[0, 0], x.bias, kept=x.kept)
    return tf.reduce_mean(resolved(x), (1, 2))


FEW = 24  # channels; with 16, products take 0.8 times as long as means, with 32 1.4 times


def layer_norm(target: "TfTarget", params: Params, x: Tensor, *, eps: float) -> Result:
    return scaled(target, standardized(target, x, eps), **params)


def rms_norm(target: "TfTarget", params: Params, x: Tensor, *, eps: float) -> Result:
    y = x * tf.math.rsqrt(mean_square(target, x, eps))
    return scaled(target, y, params["scale"])


def standardized(target: "TfTarget", x: Tensor, eps: float) -> Tensor:
    """x with mean 0 and variance 1 over the last axis."""
    centred = resolved(centre(target, x))
    return centred * tf.math.rsqrt(mean_square(target, centred, eps))


def centre(target: "TfTarget", x: Tensor) -> Result:
    channels = x.shape[-1]
    matrix = np.eye(channels) - 1 / channels
    if isinstance(x, Linear) and x.dense:
        return x.mixed(matrix)
    x = resolved(x)
    if target.products and channels <= FEW:
        return mixed(x, matrix)
    return x - tf.reduce_mean(x, -1, keepdims=True)


def mean_square(target: "TfTarget", x: Tensor, eps: float) -> Tensor:
    """The mean of the squares over the last axis, plus eps; few channels each hold a copy of it."""
    channels = x.shape[-1]
    if target.products and channels <= FEW:
        return mixed(x * x, np.full((channels, channels), 1 / channels), np.full(channels, eps))
    return tf.reduce_mean(tf.square(x), -1, keepdims=True) + np.float32(eps)


def mixed(x: Tensor, matrix: np.ndarray, bias: np.ndarray | None = None) -> Tensor:
    """The product of the last axis with a constant matrix."""
    image = UNIT if is_image(x) else None
    return Linear(x, matrix[None, None] if image else matrix, bias, image).tensor()


def scaled(target: "TfTarget", x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Result:
    shift: Tensor = 0 * scale if bias is None else bias
    if is_constant(scale, shift):
        return Scaled(x, scale, shift, target.products)
    return x * scale + shift


def by_statistics(
    target: "TfTarget", params: Params, statistics: Params, x: Tensor, *, eps: float
) -> Result:
    if not is_constant(*params.values(), *statistics.values()):
        scale = tf.math.rsqrt(statistics["var"] + eps) * params["scale"]
        return (resolved(x) - statistics["mean"]) * scale + params["bias"]
    scale = params["scale"] / np.sqrt(statistics["var"].astype(np.float64) + eps)
    shift = params["bias"] - statistics["mean"] * scale
    if isinstance(x, Linear):
        return x.affine(scale, shift)
    x = resolved(x)
    return Scaled(x, scale, shift, target.products and not follows_convolution(x))


def follows_convolution(x: Tensor) -> bool:
    """Whether TensorFlow's converter will fold a scale and a shift into the op before them."""
    op = x.op.inputs[0].op if x.op.type in ("AddV2", "BiasAdd") else x.op
    return op.type in ("Conv2D", "DepthwiseConv2dNative")


def group_norm(target: "TfTarget", params: Params, x: Tensor, *, groups: int, eps: float) -> Result:
    """A normalization in which each group of channels of an example is one row."""
    shape, channels = [size_of(x, axis) for axis in range(len(x.shape))], x.shape[-1]
    x = tf.reshape(x, (shape[0], -1, groups, channels // groups))
    centred = x - tf.reduce_mean(x, (1, 3), keepdims=True)
    variance = tf.reduce_mean(tf.square(centred), (1, 3), keepdims=True)
    y = centred * tf.math.rsqrt(variance + np.float32(eps))
    return scaled(target, tf.reshape(y, shape_of(shape)), **params)


LOWEST = float(np.finfo(np.float32).min)


def attention(
    target: "TfTarget",
    params: dict[str, Params],
    x: Tensor,
    context: Tensor | None = None,
    *,
    heads: int,
    causal: bool,
    mask: Tensor | None,
) -> Result:
    """x, (B, T, D), attends to the context, (B, S, D)."""
    context = x if context is None else context
    dim = params["query"]["weight"].shape[-1]
    scale = np.float32(1 / math.sqrt(dim // heads))
    query = {name: array * scale for name, array in params["query"].items()}
    q, k, v = (
        split_heads(resolved(linear(target, layer, source)), heads)
        for layer, source in ((query, x), (params["key"], context), (params["value"], context))
    )
    scores = masked(tf.matmul(q, k, transpose_b=True), causal, mask)  # (B, H, T, S)
    y = tf.transpose(tf.matmul(tf.nn.softmax(scores), v), (0, 2, 1, 3))
    return linear(target, params["out"], tf.reshape(y, sizes_of(x)))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, D) -> (B, H, T, D / H)."""
    *sizes, dim = sizes_of(x)
    return tf.transpose(tf.reshape(x, (*sizes, heads, dim // heads)), (0, 2, 1, 3))


def sizes_of(x: Tensor) -> list[Tensor]:
    """The shape of x for tf.reshape, in which the size of the batch need not be computed."""
    return [-1, *(size_of(x, axis) for axis in range(1, len(x.shape)))]


def earlier(queries: Tensor, keys: Tensor) -> Tensor:
    """Whether a key is not after a query: (T, S), of these sizes."""
    if not any(map(tf.is_tensor, (queries, keys))):
        return np.tril(np.ones((queries, keys), bool))
    return tf.reshape(tf.range(queries), (-1, 1)) >= tf.reshape(tf.range(keys), (1, -1))


def masked(
    scores: Tensor,
    causal: bool,
    mask: Tensor | None,
    lowest: float | None = None,
    sizes: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The scores with the lowest number at masked positions; `sizes` are their last two."""
    if causal:
        past = earlier(*(sizes or (size_of(scores, 2), size_of(scores, 3))))
        combine = np.logical_and if is_constant(mask, past) else tf.logical_and
        mask = past if mask is None else combine(past, mask)
    return (
        scores
        if mask is None
        else tf.where(mask, scores, np.float32(LOWEST if lowest is None else lowest))
    )


def weighted_mean(
    target: "TfTarget",
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    *,
    causal: bool,
    scale: float,
    lowest: float | None,
) -> Tensor:
    """Attention without its projections, of (batch, position, head, feature)."""
    sizes = free_sizes(target)
    q, k, v = (tf.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))
    scores = tf.matmul(q * np.float32(scale), k, transpose_b=True)  # (B, H, T, S)
    scores = scores if bias is None else scores + bias
    y = tf.matmul(tf.nn.softmax(masked(scores, causal, mask, lowest, sizes)), v)
    return tf.transpose(y, (0, 2, 1, 3))


def free_sizes(target: "TfTarget") -> tuple[Tensor, Tensor]:
    """The numbers of queries and keys. Free ones are computed from the file's inputs, so that all
    layers share that."""
    queries, keys, *_ = target.operand_shapes
    return target.size(queries[1]), target.size(keys[1])


def attend(
    target: "TfTarget", q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool
) -> Tensor:
    """`weighted_mean`, in which several heads of queries may share one head of keys."""
    (batch, length, heads, dim), (_, context, groups, _), *_ = target.operand_shapes
    scale = 1 / math.sqrt(dim)
    if heads == groups:
        return weighted_mean(target, q, k, v, mask, None, causal=causal, scale=scale, lowest=None)
    shared = heads // groups

    def reshape(x: Tensor, *shape: Size) -> Tensor:
        return tf.reshape(x, target.new_sizes(shape))

    # The queries of one group are the rows of one matrix.
    q = tf.transpose(
        reshape(q * np.float32(scale), batch, length, groups, shared, dim), (0, 2, 3, 1, 4)
    )
    q = reshape(q, batch, groups, shared * length, dim)
    scores = tf.matmul(q, tf.transpose(k, (0, 2, 1, 3)), transpose_b=True)
    if causal or mask is not None:
        scores = reshape(scores, batch, heads, length, context)
        scores = masked(scores, causal, mask, sizes=free_sizes(target))
        scores = reshape(scores, batch, groups, shared * length, context)
    y = tf.matmul(tf.nn.softmax(scores), tf.transpose(v, (0, 2, 1, 3)))
    y = tf.transpose(reshape(y, batch, groups, shared, length, dim), (0, 3, 1, 2, 4))
    return reshape(y, batch, length, heads, dim)


def write(target: "TfTarget", cache: Tensor, new: Tensor, where: Tensor) -> Tensor:
    """The cache, (B, K, S, D), with one token of each text, (B, 1, K, D), at a place, (B, 1)."""
    here = tf.equal(tf.range(target.operand_shapes[0][2]), where)  # (B, S)
    new = tf.transpose(tf.cast(new, cache.dtype), (0, 2, 1, 3))
    return tf.where(here[:, None, :, None], new, cache)


LAYERS = {
    f.__name__: f
    for f in (
        *(linear, linears, conv2d, conv_transpose2d, embedding, unembedding),
        *(layer_norm, rms_norm, by_statistics, group_norm),
        *(max_pool, avg_pool, global_max_pool, global_avg_pool),
        *(attention, attend, weighted_mean, write),
    )
}
# These take pending operands; all others receive tensors.
FOLDS = {linear, linears, conv2d, global_avg_pool, layer_norm, by_statistics, attention}
