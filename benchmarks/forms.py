"""The speed of the forms that layers can take on the CPU, relative to the plain form.

Measures value and gradient of each form, taking turns in one process. model/layers/forms.py chooses
by these results. Every form must agree with the plain one.

python -m benchmarks.forms [--rounds 7]
python -m benchmarks.forms --sweep [--count 200] [--seed 0] [--only KIND] [--half a|b] [--file FILE]
the second judges the rules on layers of random shapes (benchmarks/regret.py)
"""

import argparse
import statistics
import time
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.results import record, short, spread
from model.layers import activations, conv_forms, forms, norm, pool
from model.layers.conv import LAYOUT
from training.engine import CPU_OPTIONS

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
LOOPS = 5  # calls in one compiled loop, as in training
TOLERANCE = 1e-5  # relative to the largest number of each result


class Case(NamedTuple):
    """A layer at one size, and its forms, the plain one first."""

    layer: str
    shapes: list  # of its arguments
    functions: dict  # {form: function}
    chosen: str  # the form that model/layers/forms.py chooses
    loops: int = LOOPS  # 1 with a dense convolution, which is slow inside a compiled loop


def main(rounds=7):
    rows = ["| layer | shape | form | ms | x plain | chosen |", "|---|---|---|---|---|---|"]
    for case in (*norm_cases(), *convolution_cases(), *other_cases()):
        times = compare(case, rounds)
        plain = next(iter(times.values()))
        size = " ".join("x".join(map(str, shape)) for shape in case.shapes[:2])
        for name, seconds in times.items():
            ratio = spread([a / b for a, b in zip(seconds, plain, strict=True)])
            median = short(1e3 * statistics.median(seconds))
            chosen = "yes" if name == case.chosen else ""
            rows.append(f"| {case.layer} | {size} | {name} | {median} | {ratio} | {chosen} |")
    record("Forms of layers", "python -m benchmarks.forms", "\n".join(rows))


def norm_cases():
    for shape in ((512, 7, 7, 8), (512, 3, 3, 16), (512, 7, 7, 32), (128, 49, 64)):
        functions = {
            "sums": lambda x: norm.standardize(x, -1, 1e-6),
            "products": partial(norm.standardize_narrow, 1e-6),
        }
        chosen = "products" if forms.norm_by_products(shape) else "sums"
        yield Case("layer norm", [shape], functions, chosen)


def convolution_cases():
    for batch, size, channels, kernel in DEPTHWISE:
        geometry = ((1, 1), ((kernel // 2,) * 2,) * 2, (1, 1))
        functions = {"XLA": convolution(channels, geometry[1])}
        for form in (conv_forms.shifted, conv_forms.banded, conv_forms.banded_rows):
            if form is not conv_forms.banded or size <= 32:
                functions[form.__name__] = lambda x, w, f=form, args=geometry: f(x, w, *args)
        shapes = [(batch, size, size, channels), (kernel, kernel, 1, channels)]
        chosen = forms.depthwise_form(shapes[0], (kernel, kernel), *geometry)
        yield Case("depthwise convolution", shapes, functions, chosen)
    dense, pads = convolution(1, ((1, 1), (1, 1))), ((1, 1), (1, 1))
    for size, channels, groups in ((16, 32, 4), (8, 128, 32)):
        functions = {"XLA": convolution(groups, pads), "blocks": partial(in_blocks, dense, groups)}
        shapes = [(64, size, size, channels), (3, 3, channels // groups, channels)]
        yield Case("grouped convolution", shapes, functions, "blocks", 1)
    patches = {"XLA": convolution(1, ((0, 0), (0, 0)), 4), "patches": conv_forms.patches}
    yield Case("patches", [(512, 28, 28, 1), (4, 4, 1, 8)], patches, "patches")
    for size, channels in ((32, 16), (16, 32), (8, 64)):
        shapes = [(128, size, size, channels), (3, 3, channels, channels)]
        functions = {"XLA's choice": dense, "Eigen": dense}
        yield Case("dense convolution", shapes, functions, "Eigen", 1)


def other_cases():
    for window, stride in ((2, 2), (3, 2)):
        windows = (window,) * 2, (stride,) * 2, ((0, 0),) * 2
        plain = partial(pool.slide, -jnp.inf, lax.max, windows)
        views = partial(pool.max_of_views, windows, (32, 32))
        two_passes = partial(pool.in_two_passes, pool.max_of_views, windows, (32, 32))
        functions = {"XLA": plain, "views": views, "two passes": two_passes}
        chosen = "two passes" if forms.pool_in_two_passes(windows[0]) else "views"
        yield Case(f"max pool {window}/{stride}", [(128, 32, 32, 16)], functions, chosen)
    functions = {"derived by JAX": derived_softmax, "written out": activations.softmax}
    yield Case("softmax", [(128, 4, 49, 49)], functions, "written out")
    functions = {"derived by JAX": derived_batch_norm, "written out": batch_norm}
    for shape in ((128, 32, 32, 16), (128, 8, 8, 64)):
        yield Case("batch norm", [shape, shape[-1:], shape[-1:]], functions, "written out", 1)


def convolution(groups, pads, stride=1):
    return lambda x, w: lax.conv_general_dilated(
        x, w, (stride,) * 2, pads, None, None, LAYOUT, groups
    )


def in_blocks(dense, groups, x, weight):
    joined = forms.joined_groups(groups, weight.shape[2], weight.shape[3] // groups)
    return conv_forms.in_blocks(x, weight, dense, groups, joined)


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


def compare(case, rounds):
    """{form: seconds per call in each round}."""
    arguments = [normal(i, shape) for i, shape in enumerate(case.shapes)]
    plain = next(iter(case.functions.values()))
    cotangent = normal(99, jax.eval_shape(plain, *arguments).shape)
    expected = jax.jit(partial(value_and_gradients, plain))(cotangent, *arguments)
    programs = {}
    for name, function in case.functions.items():
        call = jax.jit(partial(value_and_gradients, function))
        check(name, call(cotangent, *arguments), expected)
        looped = jax.jit(partial(repeated, call, case.loops)) if case.loops > 1 else call
        # XLA's convolutions in a loop take minutes with the options of training.
        options = None if name.startswith("XLA") else CPU_OPTIONS
        programs[name] = looped.lower(cotangent, *arguments).compile(options)
    seconds = {name: [] for name in programs}
    for i in range(rounds + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(cotangent, *arguments))
            if i > 0:  # the first round warms up
                seconds[name].append((time.perf_counter() - start) / case.loops)
    return seconds


def value_and_gradients(function, cotangent, *arguments):
    value, gradients = jax.vjp(function, *arguments)
    return value, *gradients(cotangent)


def repeated(call, loops, cotangent, first, *others):
    """Several calls in one compiled loop, each depending on the one before, so that the compiler
    cannot remove any of them."""
    shapes = jax.eval_shape(call, cotangent, first, *others)
    start = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)

    def body(_, results):
        return call(cotangent, first + 1e-30 * sum(a.ravel()[-1] for a in results), *others)

    return lax.fori_loop(0, loops, body, start)


def check(name, results, expected, tolerance=TOLERANCE):
    for a, b in zip(results, expected, strict=True):
        difference = float(jnp.abs(a - b).max() / jnp.abs(b).max())
        assert difference < tolerance, f"{name} is off by {difference} of the largest number"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sweep", action="store_true", help="random shapes")
    parser.add_argument("--count", type=int, default=200, help="of random shapes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=form_shapes.KINDS, help="one kind of layer")
    parser.add_argument("--half", choices=("a", "b"), help="rules are fitted to a, judged on b")
    parser.add_argument("--file", default="saved/forms_sweep.jsonl", help="its measurements")
    return parser.parse_args()


if __name__ == "__main__":
    from benchmarks import form_shapes, regret

    args = arguments()
    regret.main(args) if args.sweep else main(args.rounds)
