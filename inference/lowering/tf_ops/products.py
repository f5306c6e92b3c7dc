"""Matrix products, convolutions, and reductions over windows."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from jax import lax

from inference.lowering.tf_ops.elementwise import Tensor, is_float, maximum, minimum, widened
from inference.lowering.tf_ops.reductions import highest, lowest
from inference.lowering.tf_ops.shapes import pad, size_of
from inference.lowering.trimming import Padding, Pads, trimmed
from inference.lowering.value import Size
from inference.lowering.walk import Lowering
from model.layers.conv import resolve_padding

if TYPE_CHECKING:
    from inference.lowering.tf_ops.target import TfTarget


def dot_general(
    target: "TfTarget",
    x: Tensor,
    y: Tensor,
    *,
    dimension_numbers: lax.DotDimensionNumbers,
    **_: object,
) -> Tensor:
    """A product; the result has the shared axes first, then the free axes of x, then those of y."""
    summed, shared = dimension_numbers
    inner = math.prod(target.operand_shapes[0][axis] for axis in summed[0])
    out = target.out[0]
    x, y = as_dtype(x, out.dtype), as_dtype(y, out.dtype)
    if isinstance(x, np.ndarray) and not shared[0]:
        # TFLite's products have their constant on the right
        free, rank = len(x.shape) - len(summed[0]), len(out.shape)
        shape = [*out.shape[free:], *out.shape[:free]]
        swapped = product(target, y, x, summed[::-1], shared, shape, inner)
        result = transposed(swapped, [*range(rank - free, rank), *range(rank - free)])
    else:
        result = product(target, x, y, summed, shared, out.shape, inner)
    return tf.cast(result, out.dtype)


def as_dtype(x: Tensor, dtype: np.dtype) -> Tensor:
    return x.astype(dtype) if isinstance(x, np.ndarray) else tf.cast(x, dtype)


def product(
    target: "TfTarget",
    x: Tensor,
    y: Tensor,
    summed: Sequence[Sequence[int]],
    shared: Sequence[Sequence[int]],
    shape: Sequence[Size],
    inner: Size,
) -> Tensor:
    """One matrix product per index of the shared axes; each sums `inner` products."""
    x_free = [i for i in range(len(x.shape)) if i not in (*summed[0], *shared[0])]
    y_free = [i for i in range(len(y.shape)) if i not in (*summed[1], *shared[1])]
    x = transposed(x, (*shared[0], *x_free, *summed[0]))
    y = transposed(y, (*shared[1], *summed[1], *y_free))
    first, last = len(shared[0]), len(shared[0]) + len(x_free)  # the free axes of x in the result
    batch = list(shape[:first])
    y = reshaped(target, y, [*batch, inner, math.prod(shape[last:])])
    if batch:
        x = reshaped(target, x, [*batch, math.prod(shape[first:last]), inner])
    elif len(summed[0]) != 1 or not x_free:  # otherwise the free axes need not be merged
        x = reshaped(target, x, [*(shape[:last] or [1]), inner])
    return reshaped(target, tf.matmul(x, y) if is_float(x) else integer_product(x, y), shape)


def integer_product(x: Tensor, y: Tensor) -> Tensor:
    """TFLite only has matrix products of floats."""
    return tf.reduce_sum(tf.expand_dims(x, -1) * tf.expand_dims(y, -3), -2)


def transposed(x: Tensor, order: Sequence[int] | np.ndarray) -> Tensor:
    if list(order) == sorted(order):
        return x
    return np.transpose(x, order) if isinstance(x, np.ndarray) else tf.transpose(x, order)


def reshaped(target: "TfTarget", x: Tensor, shape: Sequence[Size]) -> Tensor:
    if isinstance(x, np.ndarray):
        return x.reshape(shape)
    static = [d if isinstance(d, int) else None for d in shape]
    return x if x.shape.as_list() == static else tf.reshape(x, target.new_sizes(shape))


def convolution(
    x: Tensor, weight: Tensor, stride: Sequence[int], pads: Pads, dilation: Sequence[int]
) -> Tensor:
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


def pads_of(
    target: "TfTarget",
    padding: Padding,
    size: Sequence[int | None],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int] = (1, 1),
) -> Pads:
    """((top, bottom), (left, right)), or "SAME" for free sizes, for which TFLite computes it."""
    known = [n for n in size if n is not None]
    if len(known) == len(size) or not isinstance(padding, str):
        return resolve_padding(padding, known, kernel, stride, dilation)
    if padding == "SAME":
        return padding
    if padding != "VALID":
        target.refuse("a convolution", f"or pooling with the padding {padding} of a free size")
    return ((0, 0), (0, 0))


def is_same(
    pads: Pads,
    size: Sequence[int | None],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int] = (1, 1),
) -> bool:
    """Whether a padding is that of SAME; for a free size, it must be so for every size."""
    if isinstance(pads, str):
        return pads == "SAME"
    if any(n is None and s > 1 for n, s in zip(size, stride, strict=True)):
        return False
    size = [1 if n is None else n for n in size]
    return tuple(pads) == resolve_padding("SAME", size, kernel, stride, dilation)


def symbolic_same(
    pads: Pads,
    size: Sequence[Size],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> bool:
    """Whether a padding that is computed from symbolic sizes is that of SAME."""
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    return tuple(pads) == tuple(lax.padtype_to_pads(size, reach, stride, "SAME"))


def padded(x: Tensor, pads: Pads) -> Tensor:
    """An image with zeros around it; negative pads cut it off, with the zeros of the other side."""
    added = [[max(p, 0) for p in pair] for pair in pads]
    x = tf.pad(x, [(0, 0), *added, (0, 0)]) if any(map(any, added)) else x
    if all(p >= 0 for pair in pads for p in pair):
        return x
    (top, bottom), (left, right) = [[max(-p, 0) for p in pair] for pair in pads]
    return x[:, top : -bottom or None, left : -right or None]


def out_size(
    size: Sequence[Any],
    kernel: Sequence[int],
    stride: Sequence[int],
    pads: Pads,
    dilation: Sequence[int],
) -> list[int | None]:
    """The height and width of a convolution's result; None where they are free."""
    if None in size:
        return [None, None]
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    return [(sum(p) + n - r) // s + 1 for n, r, s, p in zip(size, reach, stride, pads, strict=True)]


SMALL = 64  # numbers per window, up to which it is computed as one slice per offset


def conv_general_dilated(
    target: "TfTarget",
    x: Tensor,
    weight: Tensor,
    *,
    window_strides: Sequence[int],
    padding: Pads,
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    **params: Any,
) -> Tensor:
    """A convolution over up to three axes; a single axis becomes an image of one row."""
    axes, groups = len(window_strides), params["batch_group_count"]
    if groups != 1 or axes > 3 or (axes == 3 and params["feature_group_count"] != 1):
        what = f"over {axes} axes, in {groups} groups of the batch"
        target.refuse("conv_general_dilated", what)
    x_order, weight_order, out_order = params["dimension_numbers"]
    x = transposed(x, (x_order[0], *x_order[2:], x_order[1]))
    weight = transposed(weight, (*weight_order[2:], weight_order[1], weight_order[0]))
    between = [(0, 0, 0), *((0, 0, d - 1) for d in lhs_dilation), (0, 0, 0)]
    x = pad(target, x, np.zeros((), x.dtype.name), padding_config=between)
    window = [weight.shape[axis] for axis in range(axes)]
    sizes = [target.operand_shapes[0][axis] for axis in x_order[2:]]
    sizes = [n + (n - 1) * (d - 1) for n, d in zip(sizes, lhs_dilation, strict=True)]
    pads = tuple(map(tuple, padding))
    if not all(isinstance(p, int) for pair in pads for p in pair):
        if axes < 3 and symbolic_same(pads, sizes, window, window_strides, rhs_dilation):
            pads = "SAME"
        else:
            around = [(0, 0, 0), *((low, high, 0) for low, high in pads), (0, 0, 0)]
            x = pad(target, x, np.zeros((), x.dtype.name), padding_config=around)
            pads = ((0, 0),) * axes
    geometry = (tuple(window_strides), pads, tuple(rhs_dilation))
    y = BY_AXES[axes](target, x, weight, *geometry)
    return transposed(y, np.argsort([out_order[0], *out_order[2:], out_order[1]]))


def over_one(
    target: "TfTarget",
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    pads: Pads,
    dilation: Sequence[int],
) -> Tensor:
    pads = pads if pads == "SAME" else ((0, 0), *pads)
    x = tf.expand_dims(x, 1)
    return over_two(target, x, weight[None], (1, *stride), pads, (1, *dilation))[:, 0]


def over_two(
    target: "TfTarget",
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    pads: Pads,
    dilation: Sequence[int],
) -> Tensor:
    weight, pads = trimmed(weight, tuple(x.shape[1:3]), stride, pads, dilation)
    return convolution(x, weight, stride, pads, dilation)


def over_three(
    target: "TfTarget",
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    pads: Pads,
    dilation: Sequence[int],
) -> Tensor:
    around = [(0, 0, 0), *((low, high, 0) for low, high in pads), (0, 0, 0)]
    x = pad(target, x, np.zeros((), x.dtype.name), padding_config=around)
    return tf.nn.conv3d(x, weight, (1, *stride, 1), "VALID", dilations=(1, *dilation, 1))


BY_AXES = {1: over_one, 2: over_two, 3: over_three}


def sliding(combine: Lowering, start: Callable[[np.dtype], float], kind: str | None) -> Lowering:
    """A reduction over windows."""

    def slide(
        target: "TfTarget",
        x: Tensor,
        *,
        window_dimensions: Sequence[int],
        window_strides: Sequence[int],
        padding: Pads,
        **params: Any,
    ) -> Tensor:
        window, strides = tuple(window_dimensions), tuple(window_strides)
        ones = (1,) * len(window)
        dilation = tuple(params.get("window_dilation") or ones)
        pads = zip(padding, params.get("base_dilation") or ones, strict=True)
        config = [(low, high, d - 1) for (low, high), d in pads]
        first = np.asarray(start(np.dtype(x.dtype.name)), x.dtype.name)
        x = pad(target, x, first, padding_config=config)
        if kind and is_image_pool(x, window, dilation):
            y = tf.nn.pool(x, window[1:3], kind, strides[1:3], "VALID")
            return y * np.float32(math.prod(window)) if kind == "AVG" else y
        if math.prod(window) > SMALL:
            target.refuse("reduce_window", f"of {window} numbers")
        offsets = itertools.product(*map(range, window))
        parts = [part(x, offset, window, strides, dilation) for offset in offsets]
        return functools.reduce(functools.partial(combine, target), parts)

    return widened(slide)


def is_image_pool(x: Tensor, window: Sequence[int], dilation: Sequence[int]) -> bool:
    is_plain = set(dilation) == {1} and x.dtype == tf.float32
    return is_plain and len(window) == 4 and window[0] == window[3] == 1


def part(
    x: Tensor,
    offset: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """The numbers of all windows at one offset."""
    slices = []
    for axis, (o, w, s, d) in enumerate(zip(offset, window, strides, dilation, strict=True)):
        end = size_of(x, axis) - (w - 1 - o) * d
        slices.append(slice(None) if w == s == 1 else slice(o * d, end, s))
    return x[tuple(slices)]


PRIMITIVES = {
    "dot_general": widened(dot_general),
    "conv_general_dilated": conv_general_dilated,
    "reduce_window_sum": sliding(lambda target, x, y: x + y, lambda dtype: 0, "AVG"),
    "reduce_window_max": sliding(maximum, lowest, "MAX"),
    "reduce_window_min": sliding(minimum, highest, None),
}
