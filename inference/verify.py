"""Whether an exported file computes what JAX does: on random and on real inputs, at several sizes of the batch."""

import jax
import numpy as np

from inference.lowering.trace import named
from inference.runtimes import latency, open_model
from training.checkpoint.probe import ask, host
from utils import RunError, format_bytes

BATCHES = (1, 3, 64)
# How far an output may be from JAX's, as a share of the largest one.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "dynamic": 0.2, "int8": 0.3}


class Reference:
    """The function in JAX, compiled for one size of the batch, on the CPU: {input: array} -> {output: array}."""

    def __init__(self, shipped, size):
        batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype), shipped.inputs)
        self.structure = jax.tree.structure(batch)
        with jax.default_matmul_precision("highest"), jax.default_device(host()):
            self.weights = jax.tree.map(jax.numpy.asarray, shipped.weights)
            lowered = jax.jit(shipped.function).lower(self.weights, batch)
            self.compiled = lowered.compile({"xla_backend_optimization_level": 1})  # in a third of the time

    def __call__(self, inputs):
        outputs = self.compiled(self.weights, jax.tree.unflatten(self.structure, inputs.values()))
        return named(jax.tree.map(np.asarray, outputs), "output")


def in_batches(model, inputs, size):
    """A model's answers to any number of inputs, in batches of one size; the last one is filled up."""
    count = len(next(iter(inputs.values())))
    found = [model(repeated(part(inputs, start, size), size)) for start in range(0, count, size)]
    return {name: np.concatenate([outputs[name] for outputs in found])[:count] for name in found[0]}


def part(inputs, start, size):
    return {name: array[start : start + size] for name, array in inputs.items()}


def repeated(inputs, size):
    """The inputs again and again, until there are so many."""
    return {name: np.take(array, np.arange(size) % len(array), axis=0) for name, array in inputs.items()}


def random_inputs(shipped, size):
    """Numbers of the shapes that the function takes, the same for ever."""
    return named(ask(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype), shipped.inputs)), "input")


def verify(path, questions, precision, batches=BATCHES):
    """What there is to tell of a file, once it is known to answer `questions`, {kind: (inputs, JAX's outputs)}, as JAX does."""
    model = open_model(path)
    checks = [compare(model, kind, size, *asked) for kind, asked in questions.items() for size in batches]
    judged = [check for check in checks if precision != "int8" or check["data"] == "real"]  # its ranges are those of real inputs
    worst = max(judged, key=lambda check: check["relative_error"])
    if not worst["relative_error"] <= TOLERANCE[precision]:
        raise RunError(
            f"{path.name}: does not compute what JAX does: on {worst['data']} inputs, batch {worst['batch']}, it is off by "
            f"{worst['relative_error']:.2g} of the output's scale; {precision} may be off by {TOLERANCE[precision]:g}"
        )
    inputs, _ = next(iter(questions.values()))
    times = {size: latency(model, part(inputs, 0, size)) for size in batches}
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "nodes": model.nodes(),
        "inputs": {name: [str(np.dtype(dtype)), list(shape)] for name, (shape, dtype) in model.inputs.items()},
        "outputs": {name: [str(np.dtype(dtype)), list(shape)] for name, (shape, dtype) in model.outputs.items()},
        "latency_ms": {str(size): round(1e3 * seconds, 4) for size, seconds in times.items()},
        "tolerance": TOLERANCE[precision],
        "checks": checks,
    }


def compare(model, kind, size, inputs, expected):
    """How a file's answer to the first `size` inputs differs from JAX's."""
    try:
        found = model(part(inputs, 0, size))
    except Exception as error:  # the runtimes' own, of many kinds
        raise RunError(f"{model.path.name}: fails on {kind} inputs, batch {size}: {error}") from error
    absolute = relative = 0.0
    agreement = 1.0
    for name, whole in expected.items():
        wanted, got = np.asarray(whole[:size], np.float64), np.asarray(found[name], np.float64)
        if got.shape != wanted.shape:
            raise RunError(f"{model.path.name}: {name} has the shape {got.shape}, in JAX {wanted.shape}")
        gap = distance(got, wanted)
        absolute = max(absolute, gap)
        relative = max(relative, gap / max(np.abs(wanted[np.isfinite(wanted)]).max(initial=0), 1e-7))
        if wanted.ndim > 1:
            agreement = min(agreement, float((got.argmax(-1) == wanted.argmax(-1)).mean()))
    return {"data": kind, "batch": size, "absolute_error": absolute, "relative_error": relative, "same_argmax": agreement}


def distance(found, wanted):
    """The largest difference; infinite where one is nan, or infinite, and the other is not."""
    with np.errstate(invalid="ignore"):
        gap = np.where((found == wanted) | (np.isnan(found) & np.isnan(wanted)), 0, np.abs(found - wanted))
    return float(np.nan_to_num(gap, nan=np.inf).max(initial=0))


def table(reports):
    """The reports as lines for people: {format: report}."""
    rows = [("file", "route", "nodes", "size", "batch", "latency", "random: off by", "same", "real: off by", "same")]
    for report in reports.values():
        about = (report["file"], report["route"], str(report["nodes"]), format_bytes(report["bytes"]))
        for i, (size, milliseconds) in enumerate(report["latency_ms"].items()):
            row = [*(about if i == 0 else [""] * 4), size, f"{milliseconds:.3f} ms"]
            for kind in ("random", "real"):
                check = next((c for c in report["checks"] if (c["data"], str(c["batch"])) == (kind, size)), None)
                row += [f"{check['relative_error']:.1e}", f"{check['same_argmax']:.1%}"] if check else ["-", "-"]
            rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def scores(shipped, inputs, targets, answers):
    """{metric: its mean} of a model's answers, by the config's loss and metrics."""
    from training.objective import finish_means, measure, summed

    parts = shipped.parts
    metrics = {label: metric.function for label, metric in parts.metrics.items() if metric.mode == "MEAN"}

    @jax.jit
    def means(output):
        logits = jax.numpy.log(jax.numpy.maximum(output, 1e-30)) if shipped.form.softmax else output  # a softmax undoes it
        losses, terms = summed(jax.vmap(parts.loss)(logits, targets))
        return jax.tree.map(lambda a: a.mean(0), (losses, measure(metrics, logits, targets, terms)))

    loss, measured = means(answers(inputs)["output"])
    return {"loss": float(loss)} | {name: float(value) for name, value in finish_means(metrics)(measured).items()}
