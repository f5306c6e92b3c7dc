"""The regret of the rules in model/layers/forms.py on layers of random shapes: the time of the form
that they choose over the time of the best one, forward and backward.

Each layer is drawn from the seed and its number. The times of its forms are appended to a file at
once, so a sweep that was interrupted continues, and rules that were changed are judged by the times
that were measured before. Fit rules to half `a`, the even numbers, and judge them on half `b`.
"""

import json
import statistics
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import jax
import numpy as np

from benchmarks.form_shapes import KINDS, XLAS_CHOICE, layer_of
from benchmarks.forms import TOLERANCE, check, normal, value_and_gradients
from benchmarks.results import markdown, record
from training.engine import CPU_OPTIONS

ROUNDS, SECONDS = 15, 0.25  # the most rounds of each form; they end after this many seconds
GOALS = {"median": 1.05, "95th percentile": 1.5}
WORST = 8  # layers named in the report
HALVES = {"a": (0,), "b": (1,)}


def sweep(count, seed, only, half, file):
    """Measure the requested layers that the file does not have yet, and report all of them."""
    numbers = [i for i in range(count) if i % 2 in HALVES.get(half, (0, 1))]
    layers = {i: layer_of(seed, i) for i in numbers}
    layers = {i: layer for i, layer in layers.items() if only in (None, layer.kind)}
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = measured(path, seed)
    for i, layer in layers.items():
        if layer.chosen not in done.get(i, ()):  # not measured, or before it had this form
            done[i] = {name: min(seconds) for name, seconds in times(layer).items()}
            row = {"seed": seed, "number": i, "layer": layer.kind, "shape": layer.title}
            with path.open("a", encoding="utf-8") as stream:
                # A newline before it: the line before may have been cut by a kill.
                stream.write("\n" + json.dumps(row | {"seconds": done[i]}))
            print(i, layer.kind, layer.title, ratios(layer, done[i]), flush=True)
    return {i: (layer, done[i]) for i, layer in layers.items()}


def measured(path, seed):
    """{number: {form: seconds}} of the layers in the file; a line that was cut is left out."""
    rows = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.endswith("}}"):
            row = json.loads(line)
            if row["seed"] == seed:
                rows[row["number"]] = row["seconds"]
    return rows


def times(layer):
    """{form: seconds of each round}; the forms take turns."""
    arguments = [normal(i, shape) for i, shape in enumerate(layer.shapes)]
    functions = {name: after_activation(form) for name, form in layer.functions.items()}
    first = next(iter(functions.values()))
    cotangent = normal(99, jax.eval_shape(first, *arguments).shape)
    programs, expected = {}, None
    for name, function in functions.items():
        call = jax.jit(partial(value_and_gradients, function)).lower(cotangent, *arguments)
        programs[name] = call.compile(None if name == XLAS_CHOICE else CPU_OPTIONS)
        results = programs[name](cotangent, *arguments)
        expected = expected or results
        check(name, results, expected, 10 * TOLERANCE)
    seconds, start = defaultdict(list), time.perf_counter()
    while len(seconds[next(iter(programs))]) < ROUNDS:
        for name, program in programs.items():
            before = time.perf_counter()
            jax.block_until_ready(program(cotangent, *arguments))
            seconds[name].append(time.perf_counter() - before)
        if time.perf_counter() - start > SECONDS * len(programs):
            break
    return seconds


def after_activation(function):
    """As a model uses it: XLA computes the gradients of both in one loop, which may be slow."""
    return lambda x, *others: function(jax.nn.relu(x), *others)


def ratios(layer, seconds):
    """The time of each form over the best one, for the log; the chosen form has a star."""
    best = min(seconds.values())
    star = {layer.chosen: "*"}
    return ", ".join(f"{name}{star.get(name, '')} {s / best:.2f}" for name, s in seconds.items())


def report(results):
    """Two tables: the regret of each kind of layer and of all, and the layers with the most."""
    regrets = defaultdict(list)
    for layer, seconds in results.values():
        regret = seconds[layer.chosen] / min(seconds.values())
        regrets[layer.kind].append(regret)
        regrets["all"].append(regret)
    rows = []
    for kind in [*(kind for kind in KINDS if kind in regrets), "all"]:
        values = regrets[kind]
        numbers = statistics.median(values), np.percentile(values, 95), max(values)
        rows.append([kind, str(len(values)), *(f"{n:.2f}" for n in numbers)])
    head = ["layer", "shapes", f"median (goal {GOALS['median']})"]
    head += [f"95th percentile (goal {GOALS['95th percentile']})", "worst"]
    return "\n\n".join([markdown(head, rows), "The worst of them:", worst(results)])


def worst(results):
    def regret(result):
        layer, seconds = result
        return seconds[layer.chosen] / min(seconds.values())

    rows = []
    for layer, seconds in sorted(results.values(), key=regret, reverse=True)[:WORST]:
        best = min(seconds, key=seconds.get)
        times = [f"{1e3 * seconds[name]:.3g}" for name in (layer.chosen, best)]
        cells = [layer.kind, layer.title, layer.chosen, times[0], best, times[1]]
        rows.append([*cells, f"{regret((layer, seconds)):.2f}"])
    return markdown(["layer", "shape", "chosen", "ms", "best", "ms", "regret"], rows)


def main(args):
    results = sweep(args.count, args.seed, args.only, args.half, args.file)
    flags = "".join(
        f" --{name} {value}"
        for name, value in (("seed", args.seed), ("only", args.only), ("half", args.half))
        if value
    )
    command = f"python -m benchmarks.forms --sweep{flags}"
    text = f"{len(results)} layers. Rules are fitted to the half `a` of seed 0 alone.\n\n"
    title = "Regret of the forms" + (f", half {args.half}" if args.half else "")
    if args.only or len(results) < 2:
        print(text + report(results))
    else:
        record(title, command, text + report(results))
