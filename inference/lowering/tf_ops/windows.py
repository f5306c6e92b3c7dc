"""JAX's own convolutions and pools: any layout, padding and dilation."""

import functools
import itertools
import math

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.convolution import convolution, symbolic_same
from inference.lowering.tf_ops.elementwise import maximum, minimum, widened
from inference.lowering.tf_ops.indexing import size_of
from inference.lowering.tf_ops.products import transposed
from inference.lowering.tf_ops.reductions import highest, lowest
from inference.lowering.tf_ops.shapes import pad
from inference.lowering.trimming import trimmed

SMALL = 64  # numbers per window, up to which it is computed as one slice per offset


def conv_general_dilated(
    target, x, weight, *, window_strides, padding, lhs_dilation, rhs_dilation, **params
):
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


def over_one(target, x, weight, stride, pads, dilation):
    pads = pads if pads == "SAME" else ((0, 0), *pads)
    x = tf.expand_dims(x, 1)
    return over_two(target, x, weight[None], (1, *stride), pads, (1, *dilation))[:, 0]


def over_two(target, x, weight, stride, pads, dilation):
    weight, pads = trimmed(weight, tuple(x.shape[1:3]), stride, pads, dilation)
    return convolution(x, weight, stride, pads, dilation)


def over_three(target, x, weight, stride, pads, dilation):
    around = [(0, 0, 0), *((low, high, 0) for low, high in pads), (0, 0, 0)]
    x = pad(target, x, np.zeros((), x.dtype.name), padding_config=around)
    return tf.nn.conv3d(x, weight, (1, *stride, 1), "VALID", dilations=(1, *dilation, 1))


BY_AXES = {1: over_one, 2: over_two, 3: over_three}


def sliding(combine, start, kind):
    """A reduction over windows."""

    def slide(target, x, *, window_dimensions, window_strides, padding, **params):
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


def is_image_pool(x, window, dilation):
    is_plain = set(dilation) == {1} and x.dtype == tf.float32
    return is_plain and len(window) == 4 and window[0] == window[3] == 1


def part(x, offset, window, strides, dilation):
    """The numbers of all windows at one offset."""
    slices = []
    for axis, (o, w, s, d) in enumerate(zip(offset, window, strides, dilation, strict=True)):
        end = size_of(x, axis) - (w - 1 - o) * d
        slices.append(slice(None) if w == s == 1 else slice(o * d, end, s))
    return x[tuple(slices)]


PRIMITIVES = {
    "conv_general_dilated": conv_general_dilated,
    "reduce_window_sum": sliding(lambda target, x, y: x + y, lambda dtype: 0, "AVG"),
    "reduce_window_max": sliding(maximum, lowest, "MAX"),
    "reduce_window_min": sliding(minimum, highest, None),
}
