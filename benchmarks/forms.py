"""The speed of the forms that layers can take on the CPU, relative to the plain form.

Measures value and gradient of each form, taking turns in one process. model/layers/forms.py chooses
by these results. Every form must agree with the plain one.

python -m benchmarks.forms [--rounds 7]
python -m benchmarks.forms --sweep [--count 200] [--seed 0] [--only KIND] [--file FILE]
the second judges the rules on layers of random shapes: the regret is the time of the form that they
choose over the time of the best one

Each random layer is drawn from the seed and its number. The times of its forms are appended to a
file at once, so a sweep that was interrupted continues, and rules that were changed are judged by
the times that were measured before. Fit rules to one seed, and judge them on another.
"""

import json
import statistics
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.form_shapes import DRAWS, fixed_layers, layer_of
from benchmarks.harness import seconds, take_turns
from benchmarks.results import arguments, markdown, ratios, record, short, spread
from training.engine import CPU_OPTIONS

LOOPS = 5  # calls in one compiled loop, as in training
TOLERANCE = 1e-5  # relative to the largest number of each result
ROUNDS, SECONDS = 15, 0.25  # the most rounds of a random layer; they end after this many seconds
GOALS = {"median": 1.05, "95th percentile": 1.5}
WORST = 8  # layers named in the report


def main():
    options = {"count": 200, "seed": 0, "only": (*DRAWS,), "file": "saved/forms_sweep.jsonl"}
    args = arguments("forms", __doc__, rounds=7, sweep=False, **options)
    if not args.sweep:
        return record(args, "Forms of layers", table_of(fixed_layers(), args.rounds))
    results = sweep(args.count, args.seed, args.only, args.file)
    about = f"{len(results)} layers. Rules are fitted to layers of seed 0 alone."
    if args.only:
        return print(report(results))
    return record(args, "Regret of the forms", about, report(results))


def table_of(layers, rounds):
    rows = []
    for layer in layers:
        programs = programs_of(layer, layer.loops)
        times = take_turns({name: partial(seconds, run) for name, run in programs.items()}, rounds)
        plain = next(iter(times.values()))
        for name, values in times.items():
            milliseconds = short(1e3 * statistics.median(values) / layer.loops)
            chosen = "yes" if name == layer.chosen else ""
            ratio = spread(ratios(values, plain))
            rows.append([layer.kind, layer.title, name, milliseconds, ratio, chosen])
    return markdown(["layer", "shape", "form", "ms", "x plain", "chosen"], rows)


def programs_of(layer, loops=1, tolerance=TOLERANCE):
    """{form: a function that computes value and gradients}, compiled, and checked against the
    first form."""
    inputs = [normal(i, shape) for i, shape in enumerate(layer.shapes)]
    plain = next(iter(layer.functions.values()))
    cotangent = normal(99, jax.eval_shape(plain, *inputs).shape)
    programs, expected = {}, None
    for name, function in layer.functions.items():
        call = jax.jit(partial(value_and_gradients, function))
        results = call(cotangent, *inputs)
        expected = expected or results
        check(name, results, expected, tolerance)
        looped = jax.jit(partial(repeated, call, loops)) if loops > 1 else call
        # XLA's convolutions in a loop take minutes with the options of training.
        options = None if name.startswith("XLA") else CPU_OPTIONS
        program = looped.lower(cotangent, *inputs).compile(options)
        programs[name] = partial(run_through, program, cotangent, *inputs)
    return programs


def run_through(program, *inputs):
    return jax.block_until_ready(program(*inputs))


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def value_and_gradients(function, cotangent, *inputs):
    value, gradients = jax.vjp(function, *inputs)
    return value, *gradients(cotangent)


def repeated(call, loops, cotangent, first, *others):
    """Several calls in one compiled loop, each depending on the one before, so that the compiler
    cannot remove any of them."""
    shapes = jax.eval_shape(call, cotangent, first, *others)
    start = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)

    def body(_, results):
        return call(cotangent, first + 1e-30 * sum(a.ravel()[-1] for a in results), *others)

    return jax.lax.fori_loop(0, loops, body, start)


def check(name, results, expected, tolerance):
    for a, b in zip(results, expected, strict=True):
        difference = float(jnp.abs(a - b).max() / jnp.abs(b).max())
        assert difference < tolerance, f"{name} is off by {difference} of the largest number"


# Random shapes.


def sweep(count, seed, only, file):
    """{number: (layer, {form: seconds})}: measure the requested layers that the file does not have
    yet."""
    layers = {i: layer_of(seed, i) for i in range(count)}
    layers = {i: layer for i, layer in layers.items() if only in (None, layer.kind)}
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = measured(path, seed)
    for i, layer in layers.items():
        if layer.chosen not in done.get(i, ()):  # not measured, or before it had this form
            done[i] = times_of(layer)
            row = {"seed": seed, "number": i, "layer": layer.kind, "shape": layer.title}
            with path.open("a", encoding="utf-8") as stream:
                # A newline before it: the line before may have been cut by a kill.
                stream.write("\n" + json.dumps(row | {"seconds": done[i]}))
            print(f"{i} {layer.kind} {layer.title}, regret {regret(layer, done[i]):.2f}")
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


def times_of(layer):
    """{form: the fewest seconds of any round}, after an activation, as a model uses a layer: XLA
    computes the gradients of both in one loop, which may be slow."""
    after_relu = {
        name: partial(lambda form, x, *others: form(jax.nn.relu(x), *others), form)
        for name, form in layer.functions.items()
    }
    programs = programs_of(layer._replace(functions=after_relu), tolerance=10 * TOLERANCE)
    times, start = defaultdict(list), time.perf_counter()
    for _ in range(ROUNDS):
        for name, run in programs.items():
            times[name].append(seconds(run))
        if time.perf_counter() - start > SECONDS * len(programs):
            break
    return {name: min(values) for name, values in times.items()}


def regret(layer, times):
    return times[layer.chosen] / min(times.values())


def report(results):
    """Two tables: the regret of each kind of layer and of all, and the layers with the most."""
    regrets = defaultdict(list)
    for layer, times in results.values():
        for kind in (layer.kind, "all"):
            regrets[kind].append(regret(layer, times))
    rows = []
    for kind in [kind for kind in (*DRAWS, "all") if kind in regrets]:
        values = regrets[kind]
        numbers = statistics.median(values), np.percentile(values, 95), max(values)
        rows.append([kind, len(values), *(f"{number:.2f}" for number in numbers)])
    goals = [f"{name} (goal {goal})" for name, goal in GOALS.items()]
    table = markdown(["layer", "shapes", *goals, "worst"], rows)
    return "\n\n".join([table, "The worst of them:", worst(results)])


def worst(results):
    rows = []
    for layer, times in sorted(results.values(), key=lambda each: regret(*each))[: -WORST - 1 : -1]:
        best = min(times, key=times.get)
        milliseconds = [f"{1e3 * times[name]:.3g}" for name in (layer.chosen, best)]
        cells = [layer.kind, layer.title, layer.chosen, milliseconds[0], best, milliseconds[1]]
        rows.append([*cells, f"{regret(layer, times):.2f}"])
    return markdown(["layer", "shape", "chosen", "ms", "best", "ms", "regret"], rows)


if __name__ == "__main__":
    main()
