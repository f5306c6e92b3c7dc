"""Layers with all of their forms, for `python -m benchmarks.forms`: those at fixed shapes, and
random ones for `--sweep`."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from model.layers import activations, attention, conv, conv_forms, forms, linear, norm, pool

NUMBERS = 2**22  # in an input, at most
PRODUCTS = 2**31  # multiplications in a form, at most: slower ones are not measured
SLOW = 2**25  # the same for XLA's depthwise and grouped convolutions, which are 100 times slower
XLAS_CHOICE = "XLA's choice"  # the form that is compiled without the options of training


class Layer(NamedTuple):
    """A layer of some shape, and its forms."""

    kind: str
    title: str  # its shape in words
    shapes: list  # of its arguments
    functions: dict  # {form: function}, the plain one first
    chosen: str  # the form that model/layers/forms.py chooses
    loops: int = 5  # calls in one compiled loop; 1 with a dense convolution, which is slow in one


def geometry_of(shape, kernel, stride, dilation):
    """(strides, padding, dilations) of a convolution with SAME padding."""
    kernel, stride, dilation = (kernel,) * 2, (stride,) * 2, (dilation,) * 2
    return stride, conv.resolve_padding("SAME", shape[1:3], kernel, stride, dilation), dilation


# One function for each kind of layer, of its shapes.


def depthwise(shape, kernel, stride=1, dilation=1, all_forms=False):
    """Without `all_forms`, those that would take too long are left out."""
    geometry = geometry_of(shape, kernel, stride, dilation)
    functions = {
        "XLA": lambda x, w: conv.plain(x, w, *geometry),
        "shifted": lambda x, w: conv_forms.shifted(x, w, *geometry),
        "banded": lambda x, w: conv_forms.banded(x, w, *geometry),
        "banded_rows": lambda x, w: conv_forms.banded_rows(x, w, *geometry),
    }
    matrices = shape[-1] * np.prod(shape[1:3]) * (np.prod(shape[1:3]) // stride**2)
    if np.prod(shape) * kernel**2 > SLOW and not all_forms:
        del functions["XLA"]
    if matrices > 2**24 or matrices * shape[0] > PRODUCTS:
        del functions["banded"]
    chosen = forms.depthwise_form(shape, (kernel,) * 2, *geometry)
    title = f"{named(shape)}, kernel {kernel}{in_words(stride, dilation)}"
    weight = (kernel, kernel, 1, shape[-1])
    return Layer("depthwise convolution", title, [shape, weight], functions, chosen)


def grouped(shape, out, kernel, groups, stride=1, dilation=1):
    inner = shape[-1] // groups
    geometry = geometry_of(shape, kernel, stride, dilation)

    def whole(x, weight):
        return conv.plain(x, weight, *geometry)

    chosen = forms.joined_groups(groups, inner, out // groups)
    wide = [n for n in range(1, groups + 1) if groups % n == 0 and 8 <= n * inner <= 256]
    is_slow = np.prod(shape) * out // groups * 9 > SLOW
    functions = {} if is_slow else {"XLA": whole}
    for joined in sorted({chosen, *wide}):
        form = partial(conv_forms.in_blocks, dense=whole, groups=groups, joined=joined)
        functions[f"{joined} joined"] = form
    title = f"{named(shape)} -> {out}, kernel {kernel}, {groups} groups{in_words(stride, dilation)}"
    shapes = [shape, (kernel, kernel, inner, out)]
    return Layer("grouped convolution", title, shapes, functions, f"{chosen} joined", 1)


def patches(shape, out, kernel):
    xla = partial(conv.plain, stride=(kernel,) * 2, pads=((0, 0), (0, 0)), dilation=(1, 1))
    functions = {"XLA": xla, "patches": conv_forms.patches}
    shapes = [shape, (kernel, kernel, shape[-1], out)]
    return Layer(
        "patches", f"{named(shape)} -> {out}, kernel {kernel}", shapes, functions, "patches"
    )


def dense(shape, out, kernel, stride=1, dilation=1):
    geometry = geometry_of(shape, kernel, stride, dilation)

    def plain(x, weight):
        return conv.plain(x, weight, *geometry)

    title = f"{named(shape)} -> {out}, kernel {kernel}{in_words(stride, dilation)}"
    shapes = [shape, (kernel, kernel, shape[-1], out)]
    functions = {XLAS_CHOICE: plain, "Eigen": plain}
    return Layer("dense convolution", title, shapes, functions, "Eigen", 1)


def transposed(shape, out, kernel, stride):
    weight, strides = (kernel, kernel, shape[-1], out), (stride,) * 2
    pads = conv.transposed_padding("SAME", (kernel,) * 2, strides)
    options = {"stride": strides, "pads": pads}
    functions = {
        "XLA": partial(
            lax.conv_transpose, strides=strides, padding=pads, dimension_numbers=conv.LAYOUT
        ),
        "together": partial(conv_forms.in_phases, conv_forms.phases_together, **options),
    }
    if kernel >= stride:
        functions["apart"] = partial(conv_forms.in_phases, conv_forms.phases_apart, **options)
    chosen = "apart" if forms.phases_apart(weight, strides) else "together"
    title = f"{named(shape)} -> {out}, kernel {kernel}, stride {stride}"
    chosen = "XLA" if stride == 1 else chosen
    return Layer("transposed convolution", title, [shape, weight], functions, chosen, 1)


POOLS = {
    "max pool": (pool.max_of_views, -jnp.inf, lax.max),
    "average pool": (pool.sum_of_views, 0.0, lax.add),
}


def pooled(kind, shape, window, stride, padding="SAME"):
    form, start, combine = POOLS[kind]
    sizes = (window,) * 2, (stride,) * 2
    windows = *sizes, conv.resolve_padding(padding, shape[1:3], *sizes)
    functions = {
        "XLA": partial(pool.slide, start, combine, windows),
        "views": partial(form, windows, shape[1:3]),
        "two passes": partial(pool.in_two_passes, form, windows, shape[1:3]),
    }
    title = f"{named(shape)}, window {window}, stride {stride}"
    chosen = "two passes" if forms.pool_in_two_passes(windows[0]) else "views"
    return Layer(kind, title, [shape], functions, chosen)


def layer_norm(shape):
    functions = {
        "sums": lambda x: norm.standardize(x, -1, 1e-6),
        "products": partial(norm.standardize_narrow, 1e-6),
    }
    chosen = "products" if forms.norm_by_products(shape) else "sums"
    return Layer("layer norm", named(shape), [shape], functions, chosen)


def batch_norm(shape):
    def written_out(x, scale, bias):
        state = {"mean": jnp.zeros(x.shape[-1]), "var": jnp.ones(x.shape[-1])}
        return norm.batch_norm({"scale": scale, "bias": bias}, state, x, train=True)[0]

    def derived(x, scale, bias):
        statistics = {"mean": x.mean((0, 1, 2)), "var": x.var((0, 1, 2))}
        return norm.by_statistics({"scale": scale, "bias": bias}, statistics, x, eps=1e-5)

    functions = {"derived by JAX": derived, "written out": written_out}
    shapes = [shape, shape[-1:], shape[-1:]]
    return Layer("batch norm", named(shape), shapes, functions, "written out", 1)


def softmax(shape):
    def derived(x):
        exp = jnp.exp(x - lax.stop_gradient(x.max(-1, keepdims=True)))
        return exp / exp.sum(-1, keepdims=True)

    functions = {"derived by JAX": derived, "written out": activations.softmax}
    return Layer("softmax", named(shape), [shape], functions, "written out")


def causal_attention(shape, ends=None):
    """`ends` are the lengths of the texts, if they differ."""
    length, mask = shape[1], None
    if ends is not None:
        mask = jnp.asarray(np.arange(length) < ends[:, None])[:, None, None]
    blocks = forms.query_blocks(length, length)
    functions = {"whole": lambda q, k, v: attention.whole(True, q, k, v, mask)}
    for n in sorted({blocks, 2, 4, 8} - {1}):
        if n <= length:
            functions[f"{n} blocks"] = lambda q, k, v, n=n: attention.in_blocks(n, q, k, v, mask)
    title = f"{named(shape)}{'' if mask is None else ', mask'}"
    chosen = f"{blocks} blocks" if blocks > 1 else "whole"
    return Layer("causal attention", title, [shape] * 3, functions, chosen)


def linear_layer(shape, out):
    rows, width = int(np.prod(shape[:-1])), shape[-1]
    functions = {
        "batched": jnp.matmul,
        "flat": partial(linear.flat, jnp.matmul),
        "gradient transposed": partial(linear.flat, linear.product_with_transposed_gradient),
    }
    chosen = "gradient transposed" if forms.gradient_transposed(rows, width, out) else "flat"
    return Layer("linear", f"{named(shape)} -> {out}", [shape, (width, out)], functions, chosen)


def named(shape):
    return "x".join(map(str, shape))


def in_words(stride, dilation):
    words = {"stride": stride, "dilation": dilation}
    return "".join(f", {name} {value}" for name, value in words.items() if value > 1)


def fixed_layers():
    """The layers of the benchmarks' models, and a few more."""
    for shape in ((512, 7, 7, 8), (512, 3, 3, 16), (512, 7, 7, 32), (128, 49, 64)):
        yield layer_norm(shape)
    for batch, size, channels, kernel in (
        (512, 7, 8, 7),
        (256, 7, 32, 3),
        (256, 14, 16, 3),
        (256, 14, 16, 7),
        (2, 14, 384, 7),
        (32, 32, 16, 7),
        (2, 128, 16, 3),
        (2, 128, 16, 7),
    ):
        yield depthwise((batch, size, size, channels), kernel, all_forms=True)
    yield grouped((64, 16, 16, 32), 32, 3, 4)
    yield grouped((64, 8, 8, 128), 128, 3, 32)
    yield patches((512, 28, 28, 1), 8, 4)
    for size, channels in ((32, 16), (16, 32), (8, 64)):
        yield dense((128, size, size, channels), channels, 3)
    for window in (2, 3):
        yield pooled("max pool", (128, 32, 32, 16), window, 2, "VALID")
    yield softmax((128, 4, 49, 49))
    for shape in ((128, 32, 32, 16), (128, 8, 8, 64)):
        yield batch_norm(shape)


# Random shapes.


def layer_of(seed, number):
    """The random Layer of this number."""
    rng = np.random.default_rng((seed, number))
    weights = np.array([weight for weight, _ in DRAWS.values()], float)
    kind = str(rng.choice(list(DRAWS), p=weights / weights.sum()))
    return DRAWS[kind][1](rng)._replace(loops=1)


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


def draw_geometry(rng):
    """(stride, dilation)"""
    stride = one_of(rng, 1, 1, 2)
    return stride, 2 if stride == 1 and rng.random() < 0.15 else 1


def draw_depthwise(rng):
    shape, kernel = image(rng), one_of(rng, 2, 3, 3, 3, 4, 5, 5, 6, 7, 7, 8, 9)
    return depthwise(shape, kernel, *draw_geometry(rng))


def draw_grouped(rng):
    while True:
        groups, inner = size(rng, 2, 32), size(rng, 2, 64)
        shape = *image(rng, (1, 1), 48)[:3], groups * inner
        out = groups * size(rng, 2, 64)
        if np.prod(shape) <= NUMBERS and np.prod(shape) * out // groups * 9 <= 2**28:
            return grouped(shape, out, one_of(rng, 1, 3, 3, 5), groups, *draw_geometry(rng))


def draw_patches(rng):
    shape, kernel = image(rng, (1, 64)), one_of(rng, 2, 3, 4, 5, 7, 8)
    sides = [kernel * max(1, side // kernel) for side in shape[1:3]]
    return patches((shape[0], *sides, shape[3]), size(rng, 8, 256), kernel)


def draw_dense(rng, make, strides=None):
    while True:
        shape, kernel = image(rng, (3, 128), 48), one_of(rng, 2, 3, 3, 4, 5, 7)
        out = size(rng, 8, 128)
        if np.prod(shape) * out * kernel**2 <= 2**30:
            return make(
                shape, out, kernel, *([one_of(rng, *strides)] if strides else draw_geometry(rng))
            )


def draw_pool(kind, rng):
    shape, window = image(rng), one_of(rng, 2, 2, 3, 3, 4, 5, 7, 9)
    return pooled(kind, shape, window, min(one_of(rng, 1, 2, window), window))


def draw_layer_norm(rng):
    width = size(rng, 2, 24) if rng.random() < 0.6 else size(rng, 24, 1024)
    return layer_norm((size(rng, 64, min(2**16, NUMBERS // width)), width))


def draw_softmax(rng):
    width = size(rng, 2, 4096)
    return softmax((size(rng, 16, NUMBERS // width), width))


def draw_attention(rng):
    while True:
        batch, length, heads = size(rng, 1, 128), size(rng, 8, 512), one_of(rng, 1, 2, 4, 8)
        dim = one_of(rng, 16, 32, 64)
        if batch * heads * length * max(length, dim) <= NUMBERS:
            ends = rng.integers(1, length + 1, batch) if rng.random() < 0.4 else None
            return causal_attention((batch, length, heads, dim), ends)


def draw_linear(rng):
    while True:
        lead = (size(rng, 1, 512), *((size(rng, 2, 256),) if rng.random() < 0.6 else ()))
        width, out = size(rng, 3, 1024), size(rng, 3, 1024)
        if np.prod(lead) * max(width, out) <= NUMBERS and np.prod(lead) * width * out <= 2**30:
            return linear_layer((*lead, width), out)


# {kind: (how often it is drawn, its function)}
DRAWS = {
    "depthwise convolution": (70, draw_depthwise),
    "grouped convolution": (20, draw_grouped),
    "patches": (14, draw_patches),
    "dense convolution": (14, partial(draw_dense, make=dense)),
    "transposed convolution": (10, partial(draw_dense, make=transposed, strides=(1, 2, 2, 3))),
    "max pool": (16, partial(draw_pool, "max pool")),
    "average pool": (10, partial(draw_pool, "average pool")),
    "layer norm": (18, draw_layer_norm),
    "batch norm": (10, lambda rng: batch_norm(image(rng))),
    "softmax": (10, draw_softmax),
    "causal attention": (14, draw_attention),
    "linear": (14, draw_linear),
}
