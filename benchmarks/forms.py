"""What the forms that layers take on the CPU gain: value and gradient of each, and of the plain one, taking turns in one process.

python -m benchmarks.forms [rounds]   (model/layers/forms.py makes its choices by this; every form must agree with the plain one)
"""

import statistics
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.results import record, short, spread
from model.layers import activations, conv_forms, forms, norm, pool
from model.layers.conv import LAYOUT
from training.programs import CONVOLUTIONS

DEPTHWISE = (  # batch, height and width, channels, kernel
    (512, 7, 8, 7),
    (256, 7, 32, 3),
    (256, 14, 16, 3),
    (256, 14, 16, 7),
    (2, 14, 384, 7),
    (32, 32, 16, 7),
    (2, 128, 16, 3),
    (2, 128, 16, 7),
)
LOOPS = 5  # calls in one compiled loop, as in training; a dense convolution leaves its fast path there, so it is called by itself
AGREEMENT = 1e-5  # of the largest number of each result


def main(rounds=7):
    rows = ["| layer | shape | form | ms | x plain | chosen |", "|---|---|---|---|---|---|"]
    for layer, shapes, others, chosen, *options in cases():
        times = compare(
            others, [normal(i, shape) for i, shape in enumerate(shapes)], rounds, *options
        )
        plain = next(iter(times.values()))
        for name, seconds in times.items():
            ratio = spread([a / b for a, b in zip(seconds, plain, strict=True)])
            size = " ".join("x".join(map(str, shape)) for shape in shapes[:2])
            mark = "yes" if name == chosen else ""
            rows.append(
                f"| {layer} | {size} | {name} | {short(1e3 * statistics.median(seconds))} | {ratio} | {mark} |"
            )
    record("Forms of layers", "python -m benchmarks.forms", "\n".join(rows))


def cases():
    """(layer, shapes of its arguments, {form: function}, the form that is chosen, options), the plain form first."""
    for shape in ((512, 7, 7, 8), (512, 3, 3, 16), (512, 7, 7, 32), (128, 49, 64)):
        others = {
            "sums": lambda x: norm.standardize(x, -1, 1e-6),
            "products": partial(norm.standardize_narrow, 1e-6),
        }
        yield "layer norm", [shape], others, "products" if shape[-1] <= forms.NARROW else "sums"
    for batch, size, channels, kernel in DEPTHWISE:
        how = ((1, 1), ((kernel // 2,) * 2,) * 2, (1, 1))
        others = {"XLA": convolution(channels, how[1])}
        for form in (conv_forms.shifted, conv_forms.banded, conv_forms.banded_rows):
            if form is not conv_forms.banded or size <= 32:
                others[form.__name__] = lambda x, w, form=form, how=how: form(x, w, *how)
        chosen = forms.depthwise_form(size, size, channels, kernel**2)
        yield (
            "depthwise convolution",
            [(batch, size, size, channels), (kernel, kernel, 1, channels)],
            others,
            chosen,
        )
    for size, channels, groups in ((16, 32, 4), (8, 128, 32)):
        dense, pads = convolution(1, ((1, 1), (1, 1))), ((1, 1), (1, 1))
        others = {"XLA": convolution(groups, pads), "blocks": partial(in_blocks, dense, groups)}
        yield (
            "grouped convolution",
            [(64, size, size, channels), (3, 3, channels // groups, channels)],
            others,
            "blocks",
            1,
        )
    patches = {"XLA": convolution(1, ((0, 0), (0, 0)), 4), "patches": conv_forms.patches}
    yield "patches", [(512, 28, 28, 1), (4, 4, 1, 8)], patches, "patches"
    for size, channels in ((32, 16), (16, 32), (8, 64)):
        shapes = [(128, size, size, channels), (3, 3, channels, channels)]
        dense = convolution(1, ((1, 1), (1, 1)))
        yield (
            "dense convolution",
            shapes,
            {"XLA's choice": dense, "Eigen": dense},
            "Eigen",
            1,
            {"Eigen": CONVOLUTIONS},
        )
    for window, stride in ((2, 2), (3, 2)):
        geometry = {"window": (window,) * 2, "stride": (stride,) * 2, "pads": ((0, 0),) * 2}
        plain = partial(pool.slide, start=-jnp.inf, combine=lax.max, **geometry)
        moved = partial(pool.max_of_views, **geometry)
        yield (
            f"max pool {window}/{stride}",
            [(128, 32, 32, 16)],
            {"XLA": plain, "moved": moved},
            "moved",
        )
    softmaxes = {"derived by JAX": derived_softmax, "written out": activations.softmax}
    yield "softmax", [(128, 4, 49, 49)], softmaxes, "written out"
    for shape in ((128, 32, 32, 16), (128, 8, 8, 64)):
        others = {"derived by JAX": derived_batch_norm, "written out": batch_norm}
        yield "batch norm", [shape, shape[-1:], shape[-1:]], others, "written out", 1


def convolution(groups, pads, stride=1):
    return lambda x, w: lax.conv_general_dilated(
        x, w, (stride,) * 2, pads, None, None, LAYOUT, groups
    )


def in_blocks(dense, groups, x, weight):
    return conv_forms.in_blocks(x, weight, dense, groups)


def derived_softmax(x):
    exp = jnp.exp(x - lax.stop_gradient(x.max(-1, keepdims=True)))
    return exp / exp.sum(-1, keepdims=True)


def batch_norm(x, scale, bias):
    state = {"mean": jnp.zeros(x.shape[-1]), "var": jnp.ones(x.shape[-1])}
    return norm.batch_norm({"scale": scale, "bias": bias}, state, x, train=True)[0]


def derived_batch_norm(x, scale, bias):
    statistics = {"mean": x.mean((0, 1, 2)), "var": x.var((0, 1, 2))}
    return norm.by_statistics({"scale": scale, "bias": bias}, statistics, x, eps=1e-5)


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def compare(others, arguments, rounds, loops=LOOPS, options=None):
    """{form: seconds of a call in each round}."""
    cotangent = normal(99, jax.eval_shape(next(iter(others.values())), *arguments).shape)
    runs, expected = {}, None
    for name, form in others.items():
        both = jax.jit(partial(value_and_gradients, form))
        results = both(cotangent, *arguments)
        expected = results if expected is None else expected
        agree(name, results, expected)
        looped = jax.jit(partial(repeated, both, loops)) if loops > 1 else both
        runs[name] = looped.lower(cotangent, *arguments).compile((options or {}).get(name))
    seconds = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(cotangent, *arguments))
            if i > 0:  # the first one warms up
                seconds[name].append((time.perf_counter() - start) / loops)
    return seconds


def value_and_gradients(form, cotangent, *arguments):
    value, back = jax.vjp(form, *arguments)
    return value, *back(cotangent)


def repeated(both, loops, cotangent, first, *others):
    """Several calls in one compiled loop, each of them fed by the one before, so that none can be left out."""
    start = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(both, cotangent, first, *others)
    )

    def again(_, before):
        return both(cotangent, first + 1e-30 * sum(a.ravel()[-1] for a in before), *others)

    return lax.fori_loop(0, loops, again, start)


def agree(name, results, expected):
    for a, b in zip(results, expected, strict=True):
        off = float(jnp.abs(a - b).max() / jnp.abs(b).max())
        assert off < AGREEMENT, f"{name} is off by {off} of the largest number"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
