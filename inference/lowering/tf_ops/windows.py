"""Convolutions and pools as the primitives say them: any layout, padding and dilation."""

import itertools
import math

import numpy as np
import tensorflow as tf

from inference.lowering.tf_ops.convolution import convolution
from inference.lowering.tf_ops.elementwise import maximum, minimum
from inference.lowering.tf_ops.products import moved
from inference.lowering.tf_ops.reductions import highest, lowest
from inference.lowering.tf_ops.shapes import pad
from inference.lowering.trimming import trimmed

SMALL = 64  # numbers under a window that is computed as so many slices


def conv_general_dilated(
    target,
    x,
    weight,
    *,
    window_strides,
    padding,
    lhs_dilation,
    rhs_dilation,
    dimension_numbers,
    **params,
):
    """Over up to three axes of space; one axis is an image of a single row."""
    space = len(window_strides)
    if (
        params["batch_group_count"] != 1
        or space > 3
        or (space == 3 and params["feature_group_count"] != 1)
    ):
        target.refuse(
            "conv_general_dilated",
            f"over {space} axes, in {params['batch_group_count']} groups of the batch",
        )
    x_order, weight_order, out_order = dimension_numbers
    x = moved(x, (x_order[0], *x_order[2:], x_order[1]))
    weight = moved(weight, (*weight_order[2:], weight_order[1], weight_order[0]))
    between = [(0, 0, 0), *((0, 0, d - 1) for d in lhs_dilation), (0, 0, 0)]
    x = pad(target, x, np.zeros((), x.dtype.name), padding_config=between)
    y = over_space[space](
        target, x, weight, tuple(window_strides), tuple(map(tuple, padding)), tuple(rhs_dilation)
    )
    return moved(y, np.argsort([out_order[0], *out_order[2:], out_order[1]]))


def over_one(target, x, weight, stride, pads, dilation):
    return over_two(
        target, x[:, None], weight[None], (1, *stride), ((0, 0), *pads), (1, *dilation)
    )[:, 0]


def over_two(target, x, weight, stride, pads, dilation):
    weight, pads = trimmed(weight, tuple(x.shape[1:3]), stride, pads, dilation)
    return convolution(x, weight, stride, pads, dilation)


def over_three(target, x, weight, stride, pads, dilation):
    around = [(0, 0, 0), *((low, high, 0) for low, high in pads), (0, 0, 0)]
    x = pad(target, x, np.zeros((), x.dtype.name), padding_config=around)
    return tf.nn.conv3d(x, weight, (1, *stride, 1), "VALID", dilations=(1, *dilation, 1))


over_space = {1: over_one, 2: over_two, 3: over_three}


def sliding(combine, start, kind):
    """A combination of the numbers under a window."""

    def slide(
        target,
        x,
        *,
        window_dimensions,
        window_strides,
        padding,
        base_dilation=None,
        window_dilation=None,
        **_,
    ):
        rank = len(window_dimensions)
        dilation = tuple(window_dilation or (1,) * rank)
        first = np.asarray(start(np.dtype(x.dtype.name)), x.dtype.name)
        config = [
            (low, high, d - 1)
            for (low, high), d in zip(padding, base_dilation or (1,) * rank, strict=True)
        ]
        x = pad(target, x, first, padding_config=config)
        window, strides = tuple(window_dimensions), tuple(window_strides)
        if kind and is_image_pool(x, window, dilation):
            y = tf.nn.pool(x, window[1:3], kind, strides[1:3], "VALID")
            return y * np.float32(math.prod(window)) if kind == "AVG" else y
        if math.prod(window) > SMALL:
            target.refuse("reduce_window", f"of {window} numbers")
        parts = [
            part(x, offset, window, strides, dilation)
            for offset in itertools.product(*map(range, window))
        ]
        result = parts[0]
        for other in parts[1:]:
            result = combine(target, result, other)
        return result

    return slide


def is_image_pool(x, window, dilation):
    return (
        len(window) == 4
        and window[0] == window[3] == 1
        and set(dilation) == {1}
        and x.dtype == tf.float32
    )


def part(x, offset, window, strides, dilation):
    """What the windows have at one place."""
    where = []
    for o, size, w, s, d in zip(offset, x.shape, window, strides, dilation, strict=True):
        end = None if size is None else size - (w - 1 - o) * d
        where.append(slice(None) if w == s == 1 else slice(o * d, end, s))
    return x[tuple(where)]


PRIMITIVES = {
    "conv_general_dilated": conv_general_dilated,
    "reduce_window_sum": sliding(lambda target, x, y: x + y, lambda dtype: 0, "AVG"),
    "reduce_window_max": sliding(maximum, lowest, "MAX"),
    "reduce_window_min": sliding(minimum, highest, None),
}
