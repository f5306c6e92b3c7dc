"""Convolutions. ONNX has the channels before the space, our layers have them last."""

import numpy as np

from inference.lowering.onnx_ops.elementwise import never_in_float64
from inference.lowering.onnx_ops.shapes import pad
from inference.lowering.trimming import trimmed
from inference.lowering.value import Value, constant
from model.layers.conv import pair, resolve_padding


def conv2d(t, params, x, *, stride, padding, dilation):
    dtype = t.out[0].dtype
    x, params = t.cast(x, dtype), {name: t.cast(value, dtype) for name, value in params.items()}
    weight, stride, dilation = params["weight"], pair(stride), pair(dilation)
    groups = x.shape[-1] // weight.shape[2]
    pads = resolve_padding(padding, x.shape[1:3], weight.shape[:2], stride, dilation)
    if weight.constant:
        taps, pads = trimmed(weight.data, x.shape[1:3], stride, pads, dilation)
        weight = constant(taps, weight.name)
    product = as_product(t, x, weight, stride, pads, groups)
    if product:
        return t.Add(product, params["bias"]) if "bias" in params else product
    first, kernels = t.transpose(x, (0, 3, 1, 2)), t.transpose(weight, (3, 2, 0, 1))
    about = {
        "strides": stride,
        "dilations": dilation,
        "group": groups,
        "kernel_shape": weight.shape[:2],
    }
    return t.transpose(
        t.Conv(first, kernels, params.get("bias"), pads=onnx_pads(pads), **about), (0, 2, 3, 1)
    )


def as_product(t, x, weight, stride, pads, groups):
    """A convolution that looks at one pixel, as what leaves the channels last; None where it is more."""
    if weight.shape[:2] != (1, 1) or stride != (1, 1) or np.any(pads):
        return None
    if groups == x.shape[-1] == weight.shape[-1]:
        return t.Mul(x, t.reshape(weight, weight.shape[3:]))
    if groups > 1 or t.tensor(x) in t.turned:  # among convolutions it is one of them
        return None
    return t.MatMul(x, t.reshape(weight, weight.shape[2:]))


def conv_general_dilated(
    t,
    x,
    weight,
    *,
    dimension_numbers,
    padding,
    lhs_dilation,
    window_strides,
    rhs_dilation,
    **params,
):
    numbers, dtype, groups = dimension_numbers, t.out[0].dtype, params["feature_group_count"]
    x, weight = t.cast(x, dtype), t.cast(weight, dtype)
    kernels = channels_first(t, weight, numbers.rhs_spec)
    spreads = any(s > 1 for s in lhs_dilation)
    if spreads and set(window_strides) == {1} and params["batch_group_count"] == 1:
        y = transposed(
            t,
            t.transpose(x, numbers.lhs_spec),
            kernels,
            groups,
            lhs_dilation,
            padding,
            rhs_dilation,
        )
        return t.transpose(y, np.argsort(numbers.out_spec))
    if spreads or np.min(padding, initial=0) < 0:
        x = prepared(t, x, numbers.lhs_spec, lhs_dilation, padding)
    first = t.transpose(x, numbers.lhs_spec)
    if params["batch_group_count"] > 1:
        groups = params["batch_group_count"]
        first = batch_to_channels(t, first, groups, [x.shape[axis] for axis in numbers.lhs_spec])
    pads = onnx_pads(np.maximum(padding, 0).reshape(-1, 2))
    y = t.Conv(
        first, kernels, strides=window_strides, dilations=rhs_dilation, group=groups, pads=pads
    )
    return t.transpose(y, np.argsort(numbers.out_spec))


def channels_first(t, weight, spec):
    """The weight as (out, in, kernel...)."""
    return t.walk.value(
        t.transpose(weight, spec), Value("", [weight.shape[axis] for axis in spec], weight.dtype)
    )


def prepared(t, x, spec, spread, padding):
    """x with zeros between its numbers, and without what a negative padding cuts off."""
    config = [(0, 0, 0)] * len(x.shape)
    for axis, size, (low, high) in zip(spec[2:], spread, padding, strict=True):
        config[axis] = (int(min(low, 0)), int(min(high, 0)), size - 1)
    sizes = list(x.shape)
    for axis, (low, high, between) in enumerate(config):
        sizes[axis] += (sizes[axis] - 1) * between + low + high if any(config[axis]) else 0
    return Value(t.tensor(pad(t, x, np.zeros((), x.dtype), padding_config=config)), sizes, x.dtype)


def transposed(t, x, kernels, groups, stride, padding, dilation):
    """A convolution of spread numbers, which ONNX has as ConvTranspose, of kernels with flipped axes."""
    out, channels, *sizes = kernels.shape
    spatial = range(3, 3 + len(sizes))
    flipped = reversed_axes(t, kernels, range(2, 2 + len(sizes)))
    grouped = t.reshape(flipped, (groups, out // groups, channels, *sizes))
    about = Value("", (groups, out // groups, channels, *sizes), kernels.dtype)
    turned = t.transpose(t.walk.value(grouped, about), (0, 2, 1, *spatial))
    weight = t.reshape(turned, (groups * channels, out // groups, *sizes))
    reach = [(size - 1) * d for size, d in zip(sizes, dilation, strict=True)]
    pads = np.array([(r - low, r - high) for r, (low, high) in zip(reach, padding, strict=True)])
    cut, beyond = np.maximum(pads, 0), np.maximum(-pads, 0)
    y = t.ConvTranspose(
        x, weight, strides=stride, dilations=dilation, group=groups, pads=onnx_pads(cut)
    )
    if not beyond.any():
        return y
    return t.Pad(
        y, np.array([0, 0, *beyond[:, 0], 0, 0, *beyond[:, 1]], np.int64)
    )  # nothing reaches there


def reversed_axes(t, x, axes):
    if x.constant:
        return constant(np.flip(x.data, tuple(axes)), x.name)
    reverse = t.table["rev"](t, x, dimensions=tuple(axes))
    return Value(reverse, x.shape, x.dtype)


def batch_to_channels(t, x, groups, shape):
    """Groups of examples as groups of channels."""
    batch, channels, *sizes = shape
    apart = t.reshape(x, (groups, batch // groups, channels, *sizes))
    together = t.transpose(apart, (1, 0, *range(2, 3 + len(sizes))))
    return t.reshape(together, (batch // groups, groups * channels, *sizes))


def onnx_pads(pads):
    """((low, high), ...) as lows, then highs."""
    return [int(low) for low, _ in pads] + [int(high) for _, high in pads]


LAYERS = {"conv2d": never_in_float64(conv2d)}
PRIMITIVES = {"conv_general_dilated": never_in_float64(conv_general_dilated)}
