"""Matrix products, convolutions and pooling.

ONNX puts the channels of an image before its spatial axes, our layers put them last.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax import lax
from numpy.typing import DTypeLike

from inference.lowering.onnx_ops.elementwise import PRIMITIVES as ELEMENTWISE
from inference.lowering.onnx_ops.elementwise import in_result_type, never_in_float64
from inference.lowering.onnx_ops.reductions import highest, lowest
from inference.lowering.onnx_ops.shapes import cut, pad
from inference.lowering.onnx_ops.target import OnnxTarget, Params, Tensor
from inference.lowering.trimming import Padding, Pads, trimmed
from inference.lowering.value import Size, Value, constant, is_number, product
from inference.lowering.walk import Lowering
from model.layers.conv import pair, resolve_padding
from model.layers.pool import geometry


def dot_general(
    t: OnnxTarget,
    x: Value,
    y: Value,
    *,
    dimension_numbers: lax.DotDimensionNumbers,
    preferred_element_type: DTypeLike | None = None,
    **_: object,
) -> Tensor:
    """One matrix product per index of the axes that both operands share."""
    (x_sums, y_sums), (x_shared, y_shared) = dimension_numbers
    dtype = t.out[0].dtype
    x, y = t.cast(x, computed(dtype)), t.cast(y, computed(dtype))
    x_free = [axis for axis in range(len(x.shape)) if axis not in (*x_sums, *x_shared)]
    y_free = [axis for axis in range(len(y.shape)) if axis not in (*y_sums, *y_shared)]
    if is_plain(x, y, dimension_numbers):
        result = t.MatMul(x, y)  # (..., K) times (K, N)
    else:
        left = matrices(t, x, x_shared, x_free, x_sums)  # (shared..., M, K)
        right = matrices(t, y, y_shared, y_sums, y_free)  # (shared..., K, N)
        result = t.MatMul(left, right)
        if len(x_free) != 1 or len(y_free) != 1:
            result = t.reshape(result, t.out[0].shape)
    return result if computed(dtype) == dtype else t.to(result, dtype)


def computed(dtype: np.dtype) -> np.dtype:
    """The dtype of a product in ONNX Runtime, which has none for small integers."""
    return np.dtype(np.int32) if dtype.kind in "biu" and dtype.itemsize < 4 else dtype


def is_plain(x: Value, y: Value, dimension_numbers: lax.DotDimensionNumbers) -> bool:
    """Whether the product is over the last axis of x and the first axis of a matrix y."""
    (x_sums, y_sums), (shared, _) = dimension_numbers
    last = (len(x.shape) - 1,)
    return (
        not shared
        and tuple(x_sums) == last
        and tuple(y_sums) == (0,)
        and len(y.shape) == 2
        and len(x.shape) > 1
    )


def matrices(
    t: OnnxTarget, x: Value, shared: Sequence[int], rows: Sequence[int], columns: Sequence[int]
) -> Tensor:
    """x as one matrix per index of the shared axes."""
    matrix = t.transpose(x, (*shared, *rows, *columns))
    if len(rows) == len(columns) == 1:
        return matrix
    shape = [x.shape[axis] for axis in shared]
    shape += [product(x.shape[axis] for axis in axes) for axes in (rows, columns)]
    return t.reshape(matrix, shape)


def conv2d(
    t: OnnxTarget,
    params: Params,
    x: Value,
    *,
    stride: int | Sequence[int],
    padding: Padding,
    dilation: int | Sequence[int],
) -> Tensor:
    weight, stride, dilation = params["weight"], pair(stride), pair(dilation)
    groups = x.shape[-1] // weight.shape[2]
    pads = resolve_padding(padding, x.shape[1:3], weight.shape[:2], stride, dilation)
    if weight.constant:
        taps, pads = trimmed(weight.data, x.shape[1:3], stride, pads, dilation)
        weight = constant(taps, weight.name)
    x, attributes = padded(t, x, pads, (1, 2), weight.shape[:2], stride, dilation)
    product = as_product(t, x, weight, stride, attributes, groups)
    if product:
        return t.Add(product, params["bias"]) if "bias" in params else product
    y = t.Conv(
        t.transpose(x, (0, 3, 1, 2)),
        t.transpose(weight, (3, 2, 0, 1)),
        params.get("bias"),
        **attributes,
        strides=stride,
        dilations=dilation,
        group=groups,
        kernel_shape=weight.shape[:2],
    )
    return t.transpose(y, (0, 2, 3, 1))


def as_product(
    t: OnnxTarget,
    x: Value,
    weight: Value,
    stride: Sequence[int],
    padding: dict[str, Any],
    groups: int,
) -> str | None:
    """A 1x1 convolution as a product, which leaves the channels last; None where it is larger."""
    if weight.shape[:2] != (1, 1) or stride != (1, 1) or any(padding.get("pads", [1])):
        return None
    if groups == x.shape[-1] == weight.shape[-1]:
        return t.Mul(x, t.reshape(weight, weight.shape[3:]))
    # between convolutions a Conv is better: it needs no transposition of its input
    if groups > 1 or t.tensor(x) in t.transposed:
        return None
    return t.MatMul(x, t.reshape(weight, weight.shape[2:]))


def conv_general_dilated(
    t: OnnxTarget,
    x: Value,
    weight: Value,
    *,
    dimension_numbers: lax.ConvDimensionNumbers,
    padding: Pads,
    window_strides: Sequence[int],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    **params: Any,
) -> Tensor:
    numbers, dtype, groups = dimension_numbers, t.out[0].dtype, params["feature_group_count"]
    if not is_number(params["batch_group_count"]):
        t.refuse("conv_general_dilated", "in groups of a free batch")
    x, weight = t.cast(x, dtype), t.cast(weight, dtype)
    kernels = channels_first(t, weight, numbers.rhs_spec)
    is_dilated = any(s > 1 for s in lhs_dilation)
    if is_dilated and set(window_strides) == {1} and params["batch_group_count"] == 1:
        images = t.transpose(x, numbers.lhs_spec)
        y = transposed_convolution(t, images, kernels, groups, lhs_dilation, padding, rhs_dilation)
        return t.transpose(y, np.argsort(numbers.out_spec))
    if is_dilated or min(map(least, padding), default=0) < 0:
        x = dilated_and_cut(t, x, numbers.lhs_spec, lhs_dilation, padding)
        padding = [(max(low, 0), max(high, 0)) for low, high in padding]
    window = [weight.shape[axis] for axis in numbers.rhs_spec[2:]]
    axes = numbers.lhs_spec[2:]
    x, pads = padded(t, x, padding, axes, window, window_strides, rhs_dilation)
    shape = [x.shape[axis] for axis in numbers.lhs_spec]
    images = t.transpose(x, numbers.lhs_spec)
    if params["batch_group_count"] > 1:
        groups = params["batch_group_count"]
        images = batch_to_channels(t, images, groups, shape)
    geometry = {"strides": window_strides, "dilations": rhs_dilation, **pads}
    y = t.Conv(images, kernels, group=groups, **geometry)
    return t.transpose(y, np.argsort(numbers.out_spec))


def padded(
    t: OnnxTarget,
    x: Value,
    pads: Pads,
    axes: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Value, dict[str, Any]]:
    """(x, the attributes for its padding along these axes); x is padded where no attribute can.

    The padding of a free size is computed while the model runs: by the node itself where it is
    that of SAME.
    """
    pads = tuple(map(tuple, pads))
    if all(isinstance(p, int | np.integer) for pair in pads for p in pair):
        return x, {"pads": onnx_pads(pads)}
    sizes = [x.shape[axis] for axis in axes]
    reach = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    is_same = pads == tuple(lax.padtype_to_pads(sizes, reach, stride, "SAME"))
    if is_same and set(dilation) == {1}:
        return x, {"auto_pad": "SAME_UPPER"}
    config = [(0, 0, 0)] * len(x.shape)
    for axis, (low, high) in zip(axes, pads, strict=True):
        config[axis] = (low, high, 0)
    shape = [n + low + high for n, (low, high, _) in zip(x.shape, config, strict=True)]
    x = Value(
        t.tensor(pad(t, x, constant(np.zeros((), x.dtype)), padding_config=config)), shape, x.dtype
    )
    return x, {"pads": [0] * (2 * len(axes))}


def least(pads: Sequence[Size]) -> int:
    """The smallest number of a pair of pads; a padding of a free size is at least 0."""
    return min((int(p) for p in pads if isinstance(p, int | np.integer)), default=0)


def channels_first(t: OnnxTarget, weight: Value, spec: Sequence[int]) -> Value:
    """The weight as (out, in, kernel...)."""
    aval = Value("", [weight.shape[axis] for axis in spec], weight.dtype)
    return t.walk.value(t.transpose(weight, spec), aval)


def dilated_and_cut(
    t: OnnxTarget,
    x: Value,
    spec: Sequence[int],
    dilation: Sequence[int],
    padding: Pads,
) -> Value:
    """x with zeros between its numbers, and without what a negative padding cuts off."""
    config = [(0, 0, 0)] * len(x.shape)
    for axis, step, (low, high) in zip(spec[2:], dilation, padding, strict=True):
        config[axis] = (least((low, 0)), least((high, 0)), step - 1)
    sizes = list(x.shape)
    for axis, (low, high, between) in enumerate(config):
        sizes[axis] += (sizes[axis] - 1) * between + low + high if any(config[axis]) else 0
    padded = pad(t, x, constant(np.zeros((), x.dtype)), padding_config=config)
    return Value(t.tensor(padded), sizes, x.dtype)


def transposed_convolution(
    t: OnnxTarget,
    x: Tensor,
    kernels: Value,
    groups: int,
    stride: Sequence[int],
    padding: Pads,
    dilation: Sequence[int],
) -> Tensor:
    """A convolution of a dilated input: a ConvTranspose with flipped kernels."""
    out, channels, *sizes = kernels.shape
    spatial = range(3, 3 + len(sizes))
    flipped = reversed_axes(t, kernels, range(2, 2 + len(sizes)))
    grouped = t.reshape(flipped, (groups, out // groups, channels, *sizes))
    aval = Value("", (groups, out // groups, channels, *sizes), kernels.dtype)
    grouped = t.transpose(t.walk.value(grouped, aval), (0, 2, 1, *spatial))
    weight = t.reshape(grouped, (groups * channels, out // groups, *sizes))
    reach = [(size - 1) * d for size, d in zip(sizes, dilation, strict=True)]
    pads = np.array([(r - low, r - high) for r, (low, high) in zip(reach, padding, strict=True)])
    cut, empty = np.maximum(pads, 0), np.maximum(-pads, 0)  # no input reaches the empty rim
    y = t.ConvTranspose(
        x, weight, strides=stride, dilations=dilation, group=groups, pads=onnx_pads(cut)
    )
    if not empty.any():
        return y
    return t.Pad(y, np.array([0, 0, *empty[:, 0], 0, 0, *empty[:, 1]], np.int64))


def reversed_axes(t: OnnxTarget, x: Value, axes: Sequence[int]) -> Value:
    if x.constant:
        return constant(np.flip(x.data, tuple(axes)), x.name)
    return Value(t.table["rev"](t, x, dimensions=tuple(axes)), x.shape, x.dtype)


def batch_to_channels(t: OnnxTarget, x: Tensor, groups: int, shape: Sequence[Size]) -> Tensor:
    """Groups of examples as groups of channels."""
    batch, channels, *sizes = shape
    x = t.reshape(x, (groups, batch // groups, channels, *sizes))
    x = t.transpose(x, (1, 0, *range(2, 3 + len(sizes))))
    return t.reshape(x, (batch // groups, groups * channels, *sizes))


def onnx_pads(pads: Iterable[Sequence[int]]) -> list[int]:
    """((low, high), ...) as [low, ..., high, ...]."""
    return [int(low) for low, _ in pads] + [int(high) for _, high in pads]


def max_pool(
    t: OnnxTarget,
    x: Value,
    window: int | Sequence[int],
    *,
    stride: int | Sequence[int] | None,
    padding: Padding,
) -> Tensor:
    window, stride, pads = geometry(x, window, stride, padding)
    return pooled(t, "MaxPool", x, (1, 2), window, stride, pads)


def avg_pool(
    t: OnnxTarget,
    x: Value,
    window: int | Sequence[int],
    *,
    stride: int | Sequence[int] | None,
    padding: Padding,
) -> Tensor:
    """The mean of the pixels in each window, without the padding."""
    window, stride, pads = geometry(x, window, stride, padding)
    return pooled(t, "AveragePool", x, (1, 2), window, stride, pads)


def pooled(
    t: OnnxTarget,
    op: str,
    x: Value,
    axes: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    pads: Pads,
    **attributes: Any,
) -> Tensor:
    """A pooling node over these axes, which ONNX puts last, after exactly two others."""
    if any(pad >= size for size, pair in zip(window, pads, strict=True) for pad in pair):
        t.refuse(op, "with a padding as large as its window")
    others = [axis for axis in range(len(x.shape)) if axis not in axes]
    order = (*others, *axes)
    x, padding = padded(t, x, pads, axes, window, stride, (1,) * len(axes))
    attributes |= {"kernel_shape": window, "strides": stride, **padding}
    y = t.add(op, t.transpose(x, order), **attributes)
    return t.transpose(y, np.argsort(order))


def window_op(op: str | None, combine: str, start: Callable[[np.dtype], np.ndarray]) -> Lowering:
    """A reduction over windows: one node where ONNX has it, else one slice per offset."""

    def function(
        t: OnnxTarget,
        x: Value,
        *,
        window_dimensions: Sequence[int],
        window_strides: Sequence[int],
        padding: Pads,
        base_dilation: Sequence[int],
        window_dilation: Sequence[int],
    ) -> Tensor:
        geometry = (window_dimensions, window_strides, padding)
        is_plain = set(base_dilation) == set(window_dilation) == {1} and x.dtype == np.float32
        per_axis = list(zip(*geometry, strict=True))
        axes = [axis for axis, values in enumerate(per_axis) if values != (1, 1, (0, 0))]
        has_node = is_plain and 0 < len(axes) == len(x.shape) - 2
        if op and has_node and is_allowed(window_dimensions, padding, x.shape, window_strides):
            window, stride, pads = zip(*(per_axis[axis] for axis in axes), strict=True)
            if op == "MaxPool":
                return pooled(t, op, x, axes, window, stride, pads)
            mean = pooled(t, op, x, axes, window, stride, pads, count_include_pad=1)
            return t.Mul(mean, np.asarray(np.prod(window), x.dtype))
        return by_slices(t, combine, start(x.dtype), x, *geometry, base_dilation, window_dilation)

    return function


def is_allowed(
    window: Sequence[int],
    padding: Pads,
    sizes: Sequence[Size],
    strides: Sequence[int],
) -> bool:
    """Whether every padding is smaller than its window, which ONNX Runtime requires.

    The padding of a free size must be that of SAME, which a node can compute.
    """
    if not all(isinstance(p, int | np.integer) for pads in padding for p in pads):
        return tuple(map(tuple, padding)) == tuple(
            lax.padtype_to_pads(sizes, window, strides, "SAME")
        )
    return all(0 <= p < size for size, pads in zip(window, padding, strict=True) for p in pads)


def by_slices(
    t: OnnxTarget,
    combine: str,
    start: np.ndarray,
    x: Value,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Pads,
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
) -> Tensor:
    """A combination of strided slices, one for each offset in the window."""
    dilated = zip(padding, base_dilation, strict=True)
    config = [(low, high, base - 1) for (low, high), base in dilated]
    sizes = [
        size + (size - 1) * between + low + high
        for size, (low, high, between) in zip(x.shape, config, strict=True)
    ]
    padded = pad(t, x, constant(start), padding_config=config)
    padded = Value(t.tensor(padded), sizes, x.dtype)
    reach = [(size - 1) * dilation for size, dilation in zip(window, window_dilation, strict=True)]

    def part(offset: tuple[int, ...]) -> Value:
        low = [o * dilation for o, dilation in zip(offset, window_dilation, strict=True)]
        high = [size - r + o for size, r, o in zip(sizes, reach, low, strict=True)]
        result = cut(t, padded, start_indices=low, limit_indices=high, strides=strides)
        return Value(t.tensor(result), t.out[0].shape, x.dtype)

    def combined(total: Value, part: Value) -> Value:
        return Value(ELEMENTWISE[combine](t, total, part), t.out[0].shape, x.dtype)

    return functools.reduce(combined, map(part, itertools.product(*map(range, window))))


LAYERS = {
    "conv2d": never_in_float64(in_result_type(conv2d)),
    "max_pool": max_pool,
    "avg_pool": never_in_float64(in_result_type(avg_pool)),
}
PRIMITIVES = {
    "dot_general": dot_general,
    "conv_general_dilated": never_in_float64(conv_general_dilated),
    "reduce_window_max": window_op("MaxPool", "max", lowest),
    "reduce_window_min": window_op(None, "min", highest),
    "reduce_window_sum": window_op("AveragePool", "add", lambda dtype: np.zeros((), dtype)),
}
