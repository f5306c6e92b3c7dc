"""Random layers for `python -m benchmarks.forms --sweep`, each with all of its forms."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import forms as plain_forms
from model.layers import attention, conv, conv_forms, forms, linear, norm, pool
from model.layers.activations import softmax

NUMBERS = 2**22  # in an input, at most
PRODUCTS = 2**31  # multiplications in a form, at most: slower ones are not measured
SLOW = 2**25  # the same for XLA's depthwise and grouped convolutions, which are 100 times slower
XLAS_CHOICE = "XLA's choice"  # the form that is compiled without the options of training
# How often each kind of layer is drawn.
KINDS = {
    "depthwise convolution": 70,
    "grouped convolution": 20,
    "patches": 14,
    "dense convolution": 14,
    "transposed convolution": 10,
    "max pool": 16,
    "average pool": 10,
    "layer norm": 18,
    "batch norm": 10,
    "softmax": 10,
    "causal attention": 14,
    "linear": 14,
}


class Layer(NamedTuple):
    """A layer of some shape, and its forms."""

    title: str  # its shape in words
    shapes: list  # of its arguments
    functions: dict  # {form: function}
    chosen: str  # the form that model/layers/forms.py chooses
    kind: str = ""


def layer_of(seed, number):
    """The Layer of this number."""
    rng = np.random.default_rng((seed, number))
    weights = np.array(list(KINDS.values()), float)
    kind = str(rng.choice(list(KINDS), p=weights / weights.sum()))
    return DRAWS[kind](rng)._replace(kind=kind)


def size(rng, low, high):
    """A whole number, as likely between 1 and 2 as between 100 and 200."""
    return round(2 ** rng.uniform(np.log2(low), np.log2(high)))


def one_of(rng, *values):
    return values[int(rng.integers(len(values)))]


def image(rng, channels=(4, 256), largest=96):
    """(B, H, W, C) of at most NUMBERS numbers."""
    while True:
        height = size(rng, 4, largest)
        width = height if rng.random() < 0.7 else size(rng, 4, largest)
        channel = size(rng, *channels) // 4 * 4 if channels[0] >= 4 else size(rng, *channels)
        shape = size(rng, 1, 512), height, width, channel
        if np.prod(shape) <= NUMBERS:
            return shape


def geometry_of(rng, shape, kernel, dilated=True):
    """(stride, pads, dilation) with SAME padding."""
    stride = (one_of(rng, 1, 1, 2),) * 2
    dilation = (2,) * 2 if dilated and stride == (1, 1) and rng.random() < 0.15 else (1, 1)
    return stride, conv.resolve_padding("SAME", shape[1:3], kernel, stride, dilation), dilation


def depthwise(rng):
    shape, kernel = image(rng), (one_of(rng, 2, 3, 3, 3, 4, 5, 5, 6, 7, 7, 8, 9),) * 2
    geometry = geometry_of(rng, shape, kernel)
    weight = (*kernel, 1, shape[-1])
    candidates = {
        "XLA": lambda x, w: conv.plain(x, w, *geometry),
        "shifted": lambda x, w: conv_forms.shifted(x, w, *geometry),
        "banded": lambda x, w: conv_forms.banded(x, w, *geometry),
        "banded_rows": lambda x, w: conv_forms.banded_rows(x, w, *geometry),
    }
    pixels, outputs = np.prod(shape[1:3]), np.prod(shape[1:3]) // np.prod(geometry[0])
    banded = shape[-1] * pixels * outputs
    if np.prod(shape) * np.prod(kernel) > SLOW:
        del candidates["XLA"]
    if banded > 2**24 or banded * shape[0] > PRODUCTS:
        del candidates["banded"]
    chosen = forms.depthwise_form(shape, kernel, *geometry)
    title = f"{named(shape)}, kernel {kernel[0]}{in_words(*geometry)}"
    return Layer(title, [shape, weight], candidates, chosen)


def grouped(rng):
    while True:
        groups, inner = size(rng, 2, 32), size(rng, 2, 64)
        shape = image(rng, (1, 1), 48)
        shape = (*shape[:3], groups * inner)
        out = groups * size(rng, 2, 64)
        work = np.prod(shape) * out // groups * 9
        if np.prod(shape) <= NUMBERS and work <= 2**28:
            break
    kernel = (one_of(rng, 1, 3, 3, 5),) * 2
    stride, pads, dilation = geometry_of(rng, shape, kernel)
    whole = partial(conv.plain, stride=stride, pads=pads, dilation=dilation)
    chosen = forms.joined_groups(groups, inner, out // groups)
    wide = [n for n in range(1, groups + 1) if groups % n == 0 and 8 <= n * inner <= 256]
    candidates = {"XLA": whole} if work <= SLOW else {}
    for joined in sorted({chosen, *wide}):
        form = partial(conv_forms.in_blocks, dense=whole, groups=groups, joined=joined)
        candidates[f"{joined} joined"] = form
    title = f"{named(shape)} -> {out}, kernel {kernel[0]}, {groups} groups"
    title += in_words(stride, pads, dilation)
    weight = (*kernel, inner, out)
    return Layer(title, [shape, weight], candidates, f"{chosen} joined")


def patches(rng):
    shape, kernel = image(rng, (1, 64)), one_of(rng, 2, 3, 4, 5, 7, 8)
    shape = (
        shape[0],
        kernel * max(1, shape[1] // kernel),
        kernel * max(1, shape[2] // kernel),
        shape[3],
    )
    out = size(rng, 8, 256)
    xla = partial(conv.plain, stride=(kernel,) * 2, pads=((0, 0), (0, 0)), dilation=(1, 1))
    candidates = {"XLA": xla, "patches": conv_forms.patches}
    title = f"{named(shape)} -> {out}, kernel {kernel}"
    weight = (kernel, kernel, shape[-1], out)
    return Layer(title, [shape, weight], candidates, "patches")


def dense(rng, transposed=False):
    while True:
        shape, kernel = image(rng, (3, 128), 48), (one_of(rng, 2, 3, 3, 4, 5, 7),) * 2
        out = size(rng, 8, 128)
        if np.prod(shape) * out * kernel[0] ** 2 <= 2**30:
            break
    weight = (*kernel, shape[-1], out)
    title = f"{named(shape)} -> {out}, kernel {kernel[0]}"
    if transposed:
        stride = (one_of(rng, 1, 2, 2, 3),) * 2
        options = {"stride": stride, "pads": conv.transposed_padding("SAME", kernel, stride)}
        candidates = {
            "XLA": partial(
                lax.conv_transpose,
                strides=stride,
                padding=options["pads"],
                dimension_numbers=conv.LAYOUT,
            ),
            "together": partial(conv_forms.in_phases, conv_forms.phases_together, **options),
        }
        if min(kernel) >= max(stride):
            candidates["apart"] = partial(conv_forms.in_phases, conv_forms.phases_apart, **options)
        chosen = "apart" if forms.phases_apart(weight, stride) else "together"
        chosen = "XLA" if stride == (1, 1) else chosen
        return Layer(f"{title}, stride {stride[0]}", [shape, weight], candidates, chosen)
    geometry = geometry_of(rng, shape, kernel)
    function = partial(
        conv.plain, **dict(zip(("stride", "pads", "dilation"), geometry, strict=True))
    )
    candidates = {XLAS_CHOICE: function, "Eigen": function}
    title += in_words(*geometry)
    return Layer(title, [shape, weight], candidates, "Eigen")


def pooled(form, start, combine, rng):
    shape, window = image(rng), (one_of(rng, 2, 2, 3, 3, 4, 5, 7, 9),) * 2
    stride = (one_of(rng, 1, 2, window[0]),) * 2
    stride = tuple(min(s, w) for s, w in zip(stride, window, strict=True))
    windows = window, stride, conv.resolve_padding("SAME", shape[1:3], window, stride)
    candidates = {
        "XLA": partial(pool.slide, start, combine, windows),
        "views": partial(form, windows, shape[1:3]),
        "two passes": partial(pool.in_two_passes, form, windows, shape[1:3]),
    }
    title = f"{named(shape)}, window {window[0]}, stride {stride[0]}"
    chosen = "two passes" if forms.pool_in_two_passes(window) else "views"
    return Layer(title, [shape], candidates, chosen)


def layer_norm(rng):
    width = size(rng, 2, 24) if rng.random() < 0.6 else size(rng, 24, 1024)
    shape = (size(rng, 64, min(2**16, NUMBERS // width)), width)
    candidates = {
        "sums": lambda x: norm.standardize(x, -1, 1e-6),
        "products": partial(norm.standardize_narrow, 1e-6),
    }
    chosen = "products" if forms.norm_by_products(shape) else "sums"
    return Layer(named(shape), [shape], candidates, chosen)


def batch_norm(rng):
    shape = image(rng)
    candidates = {
        "derived by JAX": plain_forms.derived_batch_norm,
        "written out": plain_forms.batch_norm,
    }
    shapes = [shape, shape[-1:], shape[-1:]]
    return Layer(named(shape), shapes, candidates, "written out")


def softmax_rows(rng):
    width = size(rng, 2, 4096)
    shape = (size(rng, 16, NUMBERS // width), width)
    candidates = {"derived by JAX": plain_forms.derived_softmax, "written out": softmax}
    return Layer(named(shape), [shape], candidates, "written out")


def causal_attention(rng):
    while True:
        batch, length, heads = size(rng, 1, 128), size(rng, 8, 512), one_of(rng, 1, 2, 4, 8)
        dim = one_of(rng, 16, 32, 64)
        if batch * heads * length * max(length, dim) <= NUMBERS:
            break
    masked = rng.random() < 0.4
    ends = rng.integers(1, length + 1, batch)
    mask = jnp.asarray(np.arange(length) < ends[:, None])[:, None, None] if masked else None
    counts = [n for n in (2, 4, 8) if n <= length]
    candidates = {"whole": lambda q, k, v: attention.whole(True, q, k, v, mask)}
    for n in counts:
        candidates[f"{n} blocks"] = lambda q, k, v, n=n: attention.in_blocks(n, q, k, v, mask)
    blocks = forms.query_blocks(length, length)
    chosen = f"{blocks} blocks" if blocks > 1 else "whole"
    shape = (batch, length, heads, dim)
    if blocks > 1 and chosen not in candidates:
        candidates[chosen] = lambda q, k, v: attention.in_blocks(blocks, q, k, v, mask)
    title = f"{named(shape)}{', mask' if masked else ''}"
    return Layer(title, [shape] * 3, candidates, chosen)


def linear_layer(rng):
    while True:
        lead = (size(rng, 1, 512), *((size(rng, 2, 256),) if rng.random() < 0.6 else ()))
        width, out = size(rng, 3, 1024), size(rng, 3, 1024)
        if np.prod(lead) * max(width, out) <= NUMBERS and np.prod(lead) * width * out <= 2**30:
            break
    candidates = {
        "batched": jnp.matmul,
        "flat": partial(linear.flat, jnp.matmul),
        "gradient transposed": partial(linear.flat, linear.product_with_transposed_gradient),
    }
    turned = forms.gradient_transposed(np.prod(lead), width, out)
    chosen = "gradient transposed" if turned else "flat"
    return Layer(
        f"{named((*lead, width))} -> {out}", [(*lead, width), (width, out)], candidates, chosen
    )


def named(shape):
    return "x".join(map(str, shape))


def in_words(stride, _pads, dilation):
    words = {"stride": stride[0], "dilation": dilation[0]}
    return "".join(f", {name} {value}" for name, value in words.items() if value > 1)


DRAWS = dict(
    zip(
        KINDS,
        (
            depthwise,
            grouped,
            patches,
            dense,
            partial(dense, transposed=True),
            partial(pooled, pool.max_of_views, -jnp.inf, lax.max),
            partial(pooled, pool.sum_of_views, 0.0, lax.add),
            layer_norm,
            batch_norm,
            softmax_rows,
            causal_attention,
            linear_layer,
        ),
        strict=True,
    )
)
