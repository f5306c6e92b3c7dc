"""Whether an exported file computes what JAX does: on random and on real inputs, at several sizes of the batch."""

import jax
import numpy as np

from inference.lowering.trace import named, of_batch
from inference.runtimes import latency, open_model
from training.checkpoint.probe import host, seeded_inputs
from utils import RunError, format_bytes

BATCHES = (1, 3, 64)
# How far an output may be from JAX's, as a share of the largest one, by the precision that the file, or the model, computes in.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2, "dynamic": 0.2, "int8": 0.3}


class Reference:
    """The function in JAX on the CPU: {input: array} -> {output: array}, compiled once for each size of the batch."""

    def __init__(self, shipped):
        self.shipped, self.programs = shipped, {}
        with jax.default_device(host()):
            self.weights = jax.tree.map(jax.numpy.asarray, shipped.weights)

    def __call__(self, inputs):
        size = len(next(iter(inputs.values())))
        if size not in self.programs:
            self.programs[size] = self.program(size)
        structure = jax.tree.structure(self.shipped.inputs)
        outputs = self.programs[size](self.weights, jax.tree.unflatten(structure, inputs.values()))
        return named(jax.tree.map(np.asarray, outputs), "output", inputs)

    def program(self, size):
        batch = of_batch(self.shipped.inputs, size)
        with jax.default_matmul_precision("highest"), jax.default_device(host()):
            lowered = jax.jit(self.shipped.function).lower(self.weights, batch)
            return lowered.compile({"xla_backend_optimization_level": 1})  # in a third of the time

    def answers(self, inputs):
        """answers(size): those to the first inputs, from one run over all of them; or `exactly` from a run over these."""
        whole = self(inputs)

        def answers(size, exactly=False):
            return self(part(inputs, 0, size)) if exactly else part(whole, 0, size)

        return answers


def in_batches(model, inputs, size):
    """A model's answers to any number of inputs, in batches of one size; the last one is filled up."""
    count = len(next(iter(inputs.values())))
    found = [model(repeated(part(inputs, start, size), size)) for start in range(0, count, size)]
    return {name: np.concatenate([outputs[name] for outputs in found])[:count] for name in found[0]}


def part(arrays, start, size):
    return {
        name: array[start : start + size] if np.ndim(array) else array
        for name, array in arrays.items()
    }


def repeated(inputs, size):
    """The inputs again and again, until there are so many."""
    return {
        name: np.take(array, np.arange(size) % len(array), axis=0) for name, array in inputs.items()
    }


def random_inputs(shipped, size):
    """Numbers of the shapes that the function takes, the same for ever; of a vocabulary any token."""
    inputs, words = (
        named(seeded_inputs(of_batch(shipped.inputs, size)), "input"),
        shipped.parts.facts.get("vocab_size"),
    )
    tokens = {
        name: array
        for name, array in inputs.items()
        if words and np.issubdtype(array.dtype, np.integer)
    }
    draw = np.random.default_rng(0).integers
    return inputs | {
        name: draw(words, size=array.shape).astype(array.dtype) for name, array in tokens.items()
    }


def verify(path, questions, tolerance, batches, judged=("random", "real")):
    """What there is to tell of a file, once it is known to answer as JAX does. `questions` are {kind: (inputs, answers)}, where
    answers(size) are JAX's to the first ones; of the kinds that are not judged the difference is told alone.
    """
    model = open_model(path)
    checks = [
        compare(model, kind, size, *asked, tolerance)
        for kind, asked in questions.items()
        for size in batches
    ]
    wrong = [
        check
        for check in checks
        if check["data"] in judged and not check["relative_error"] <= tolerance
    ]
    if wrong:
        worst = max(wrong, key=lambda check: check["relative_error"])
        raise RunError(
            f"{path.name}: does not compute what JAX does: on {worst['data']} inputs, batch {worst['batch']}, it is off by "
            f"{worst['relative_error']:.2g} of the output's scale; allowed is {tolerance:g}"
        )
    inputs, _ = next(iter(questions.values()))
    times = {size: latency(model, part(inputs, 0, size)) for size in batches}
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "nodes": model.nodes(),
        "inputs": {
            name: f"{np.dtype(dtype)}{list(shape)}" for name, (shape, dtype) in model.inputs.items()
        },
        "outputs": {
            name: f"{np.dtype(dtype)}{list(shape)}"
            for name, (shape, dtype) in model.outputs.items()
        },
        "latency_ms": {str(size): round(1e3 * seconds, 4) for size, seconds in times.items()},
        "tolerance": tolerance,
        "judged": list(judged),
        "checks": checks,
    }


def compare(model, kind, size, inputs, answers, tolerance):
    """How a file's answer to the first `size` inputs differs from JAX's."""
    try:
        found = model(part(inputs, 0, size))
    except Exception as error:  # the runtimes' own, of many kinds
        raise RunError(
            f"{model.path.name}: fails on {kind} inputs, batch {size}: {error}"
        ) from error
    check = {"data": kind, "batch": size, **difference(found, answers(size))}
    if not check["relative_error"] <= tolerance:  # an output may not be one of each example alone
        check |= difference(found, answers(size, exactly=True))
    for key in ("absolute_error", "relative_error", "same_argmax"):
        check[key] = float(f"{check[key]:.3g}")
    return check


def difference(found, wanted):
    """The largest one over all outputs, as it is and as a share of the output's scale, and how many arg-maxima agree."""
    absolute = relative = 0.0
    agreement = 1.0
    for name, array in wanted.items():
        wanted_one, got = np.asarray(array, np.float64), np.asarray(found[name], np.float64)
        if not np.isfinite(wanted_one).any() and wanted_one.size:
            raise RunError(
                f"{name}: JAX itself answers no finite number, so there is nothing to compare with"
            )
        if got.shape != wanted_one.shape:
            absolute = relative = np.inf
            continue
        gap = distance(got, wanted_one)
        absolute = max(absolute, gap)
        relative = max(
            relative, gap / max(np.abs(wanted_one[np.isfinite(wanted_one)]).max(initial=0), 1e-7)
        )
        if wanted_one.ndim > 1 and wanted_one.size:
            agreement = min(agreement, float((got.argmax(-1) == wanted_one.argmax(-1)).mean()))
    return {"absolute_error": absolute, "relative_error": relative, "same_argmax": agreement}


def distance(found, wanted):
    """The largest difference; infinite where one is nan, or infinite, and the other is not."""
    with np.errstate(invalid="ignore"):
        gap = np.where(
            (found == wanted) | (np.isnan(found) & np.isnan(wanted)), 0, np.abs(found - wanted)
        )
    return float(np.nan_to_num(gap, nan=np.inf, posinf=np.inf).max(initial=0))


def table(reports):
    """The reports as lines for people: {format: report}."""
    rows = [
        (
            "file",
            "route",
            "nodes",
            "size",
            "inputs",
            "batch",
            "absolute",
            "relative",
            "same class",
            "latency",
        )
    ]
    for report in reports.values():
        about = (
            report["file"],
            report["route"],
            str(report["nodes"]),
            format_bytes(report["bytes"]),
        )
        for i, check in enumerate(report["checks"]):
            size = str(check["batch"])
            taken = (
                f"{report['latency_ms'][size]:.3f} ms"
                if check["data"] == report["checks"][0]["data"]
                else ""
            )
            rows.append(
                [
                    *(about if i == 0 else [""] * 4),
                    check["data"],
                    size,
                    *told(check, report["judged"]),
                    taken,
                ]
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(
        [*lines, *(f"{report['file']}: {signature(report)}" for report in reports.values())]
    )


def told(check, judged):
    """The differences and the agreement; in brackets where they are not judged."""
    cells = [
        f"{check['absolute_error']:.1e}",
        f"{check['relative_error']:.1e}",
        f"{check['same_argmax']:.1%}",
    ]
    return cells if check["data"] in judged else [f"({cell})" for cell in cells]


def signature(report):
    """What goes in and comes out, under which names."""
    given, made = (
        ", ".join(f"{name} {form}" for name, form in report[side].items())
        for side in ("inputs", "outputs")
    )
    return f"{given} -> {made}".replace("None", "batch")


def scores(shipped, outputs, targets):
    """{metric: its mean} of outputs, by the config's loss and metrics."""
    from training.objective import finish_means, measure, summed

    parts = shipped.parts
    metrics = {
        label: metric.function for label, metric in parts.metrics.items() if metric.mode == "MEAN"
    }

    @jax.jit
    def means(output, target):
        logits = (
            jax.numpy.log(jax.numpy.maximum(output, 1e-30)) if shipped.form.softmax else output
        )  # a softmax undoes it
        losses, terms = summed(jax.vmap(parts.loss)(logits, target))
        return jax.tree.map(lambda a: a.mean(0), (losses, measure(metrics, logits, target, terms)))

    loss, measured = means(outputs, targets)
    return {"loss": float(loss)} | {
        name: float(value) for name, value in finish_means(metrics)(measured).items()
    }
