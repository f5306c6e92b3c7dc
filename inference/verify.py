"""Verify that an exported file computes what JAX computes, on random and real inputs."""

from functools import cache
from glob import escape

import jax
import numpy as np

from inference.lowering.trace import UNBATCHED, named
from inference.runtimes import latency
from training.checkpoint.probe import host
from utils import RunError, UserError, format_bytes

BATCHES = (1, 3, 64)
# The largest error, as a share of the output's scale, by the precision of the file or the model.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2, "dynamic": 0.2, "int8": 0.3}
WRONG = 0.1  # of the output's scale: in float32, such an error does not come from rounding
KINDS = ("random", "real", "own")  # of inputs: "own" are those that the user passes
COLUMNS = "file,route,nodes,size,inputs,batch,absolute,relative,same class,latency"


class Reference:
    """The function in JAX on the CPU, {input: array} -> {output: array}."""

    def __init__(self, exportable):
        self.exportable, self.programs = exportable, {}  # one program for each shape of the inputs
        with jax.default_device(host()):
            self.weights = jax.tree.map(jax.numpy.asarray, exportable.weights)

    def __call__(self, inputs):
        structure = jax.tree.structure(self.exportable.inputs)
        arrays = jax.tree.unflatten(structure, inputs.values())
        shapes = tuple(array.shape for array in inputs.values())
        if shapes not in self.programs:
            self.programs[shapes] = self.program(arrays)
        outputs = self.programs[shapes](self.weights, arrays)
        return named(jax.tree.map(np.asarray, outputs), "output", inputs)

    def program(self, arrays):
        batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)
        with jax.default_matmul_precision("highest"), jax.default_device(host()):
            lowered = jax.jit(self.exportable.function).lower(self.weights, batch)
            # Level 1 compiles in a third of the time.
            return lowered.compile({"xla_backend_optimization_level": 1})

    def outputs(self, inputs):
        """A function expected(size) that returns the outputs for the first `size` inputs, from a
        run with a batch of that size: a model may treat some sizes in another way."""
        return cache(lambda size: self(take(inputs, 0, size)))


def run_in_batches(model, inputs, size):
    """A model's outputs for any number of inputs, in padded batches of one size."""
    count = rows_of(inputs)
    batches = [model(repeated(take(inputs, start, size), size)) for start in range(0, count, size)]
    return {name: np.concatenate([batch[name] for batch in batches])[:count] for name in batches[0]}


def take(arrays, start, size):
    """Rows from `start` on; scalars have no rows and are returned unchanged."""
    if size == UNBATCHED:
        return arrays
    return {
        name: array[start : start + size] if np.ndim(array) else array
        for name, array in arrays.items()
    }


def repeated(inputs, size):
    """The inputs, repeated until there are `size`."""
    if size == UNBATCHED:
        return inputs
    return {
        name: np.take(array, np.arange(size) % len(array), axis=0) if np.ndim(array) else array
        for name, array in inputs.items()
    }


def rows_of(inputs):
    """The number of examples in a batch of inputs, of which some may be scalars."""
    return next(len(array) for array in inputs.values() if np.ndim(array))


def sizes_at(kind, batches):
    """The batch sizes at which inputs of a kind are verified: at other free sizes, the two
    smallest, since JAX compiles a program for each."""
    return sorted(batches)[:2] if "," in kind else batches


def verify(model, cases, tolerance, batches, judged=KINDS, classes=True, compared=None):
    """Raise unless the `model` of a file computes what JAX computes; returns a report of the file.

    `cases` are {kind: (inputs, expected)}, where expected(size) returns JAX's outputs for the first
    `size` inputs. Errors of the kinds that are not judged are reported only. `classes` says whether
    the outputs are those of classes, and `compared` {size: where the model compares its batch with
    it}, for the message.
    """
    path, compared = model.path, compared or {}
    checks = [
        compare(model, kind, size, inputs, expected, classes)
        for kind, (inputs, expected) in cases.items()
        for size in sizes_at(kind, batches)
    ]
    judged_checks = [check for check in checks if is_judged(check, judged)]
    failed = [check for check in judged_checks if not check["relative_error"] <= tolerance]
    if failed:
        worst = max(failed, key=lambda check: check["relative_error"])
        fix = advice(worst, failed, judged_checks, tolerance, compared)
        raise RunError(
            f"{path.name}: does not compute what JAX computes: on {worst['data']} inputs, "
            f"batch {worst['batch']}, it is off by {worst['relative_error']:.2g} of the output's "
            f"scale; the tolerance is {tolerance:g}; {fix}"
        )
    inputs, _ = next(iter(cases.values()))
    times = {size: latency(model, take(inputs, 0, size)) for size in batches}
    return {
        "file": path.name,
        "bytes": sum(file.stat().st_size for file in files_of(path)),
        "nodes": model.nodes(),
        "inputs": as_text(model.inputs),
        "outputs": as_text(model.outputs),
        "latency_ms": {
            "-" if size == UNBATCHED else str(size): round(1e3 * seconds, 4)
            for size, seconds in times.items()
        },
        "tolerance": tolerance,
        "judged": list(judged),
        "checks": checks,
    }


def files_of(path):
    """A file, and that of its weights if they are beside it."""
    return [path, *path.parent.glob(f"{escape(path.name)}.data")]


def is_judged(check, judged):
    """Whether a check is of a kind that is judged, at these sizes or others."""
    return check["data"].split(",")[0] in judged


def advice(worst, failed, judged, tolerance, compared):
    """What a user can do about the failed ones of the judged checks."""

    def some(value):
        """Whether a value occurs in all failed checks, and another one in others."""
        return {value(check) for check in failed} < {value(check) for check in judged}

    is_wrong = not worst["relative_error"] <= max(WRONG, 10 * tolerance)
    size, batches = worst["batch"], {check["batch"] for check in failed}
    if some(lambda check: check["data"].partition(",")[2]):  # free sizes
        return "give the range in which it does, as in --free 1:length:8-512, or leave out --free"
    if batches <= {*compared} or (is_wrong and some(lambda check: check["batch"])):
        place = f" ({compared[size]})" if size in compared else ""
        where = f"the model treats a batch of {size} in another way{place}"
        return f"{where}; set the batch with --batch N"
    if all(is_judged(check, ["random"]) for check in failed):
        return "if it never gets such numbers, --real-only leaves them out"
    if is_wrong:
        return "its numbers are wrong, not only imprecise, so please report this model"
    return "--tolerance sets another"


def as_text(specs):
    return {name: f"{np.dtype(dtype)}{list(shape)}" for name, (shape, dtype) in specs.items()}


def compare(model, kind, size, inputs, expected, classes=True):
    """The errors of a file's outputs for the first `size` inputs, compared with JAX's, and, where
    they are classes, the share of those that are the same."""
    try:
        outputs = model(take(inputs, 0, size))
    except Exception as error:  # the runtimes raise many kinds
        raise RunError(
            f"{model.path.name}: fails on {kind} inputs, batch {size}: {error}"
        ) from error
    errors = difference(outputs, expected(size))
    if not classes:
        del errors["same_argmax"]
    rounded = {name: float(f"{value:.3g}") for name, value in errors.items()}
    return {"data": kind, "batch": None if size == UNBATCHED else size, **rounded}


def difference(outputs, expected):
    """The largest error of all outputs, absolute and relative to the scale, and equal argmaxes."""
    check_finite(expected)
    absolute = relative = 0.0
    agreement = 1.0
    for name, array in expected.items():
        want, got = np.asarray(array, np.float64), np.asarray(outputs[name], np.float64)
        if got.shape != want.shape:
            absolute = relative = np.inf
            continue
        error = largest_error(got, want)
        scale = max(np.abs(want[np.isfinite(want)]).max(initial=0), 1e-7)
        absolute, relative = max(absolute, error), max(relative, error / scale)
        if want.ndim > 1 and want.size:
            agreement = min(agreement, float((got.argmax(-1) == want.argmax(-1)).mean()))
    return {"absolute_error": absolute, "relative_error": relative, "same_argmax": agreement}


def check_finite(expected):
    """Raise if an output of JAX has no finite number."""
    for name, array in expected.items():
        if array.size and not np.isfinite(np.asarray(array, np.float64)).any():
            raise RunError(f"{name}: JAX returns no finite number, so nothing can be compared")


def largest_error(got, want):
    """The largest absolute difference; infinite where only one of the two is nan or infinite."""
    with np.errstate(invalid="ignore"):
        error = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0, np.abs(got - want))
    return float(np.nan_to_num(error, nan=np.inf, posinf=np.inf).max(initial=0))


def table(reports, signatures=True):
    """{format: report} as a table for the terminal, with the names and types of what each file
    takes and returns."""
    checks = [check for report in reports.values() for check in report["checks"]]
    has_classes = any("same_argmax" in check for check in checks)
    rows = [[name for name in COLUMNS.split(",") if has_classes or name != "same class"]]
    for report in reports.values():
        for i, check in enumerate(report["checks"]):
            file = [title(report), report["route"], str(report["nodes"])]
            file = [*file, format_bytes(report["bytes"])] if i == 0 else [""] * 4
            size = str(check["batch"] or "-")
            is_first_kind = check["data"] == report["checks"][0]["data"]
            time = f"{report['latency_ms'][size]:.3f} ms" if is_first_kind else ""
            errors = error_cells(check, report["judged"])
            rows.append([*file, check["data"], size, *errors, time])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if signatures:
        lines += [f"{title(report)}: {signature(report)}" for report in reports.values()]
    return "\n".join(lines)


def title(report):
    """A file, and which of its signatures if it has several."""
    return " ".join(filter(None, [report["file"], report.get("signature")]))


def error_cells(check, judged):
    """The errors and the agreement, in brackets if they are not judged."""
    cells = [
        f"{check['absolute_error']:.1e}",
        f"{check['relative_error']:.1e}",
    ]
    if "same_argmax" in check:  # the outputs are classes
        cells.append(f"{check['same_argmax']:.1%}")
    return cells if is_judged(check, judged) else [f"({cell})" for cell in cells]


def signature(report):
    """The names and types of the inputs and outputs, in one line, with the names of free sizes."""
    sizes = report.get("sizes", {})

    def text(name, spec):
        dtype = spec.split("[")[0]
        known = f"{dtype}[{', '.join(sizes[name])}]" if name in sizes else spec
        return f"{name} {known}"

    inputs, outputs = (
        ", ".join(text(name, spec) for name, spec in report[side].items())
        for side in ("inputs", "outputs")
    )
    return f"{inputs} -> {outputs}".replace("None", "batch")


def scores(exportable, outputs, targets):
    """{name: mean} of the config's loss and metrics on these outputs."""
    from training.objective import finish_means, means_of, scored

    parts = exportable.parts
    if parts.loss is None:
        raise UserError("the config names no loss, with which outputs could be compared")
    metrics = {
        label: metric.function
        for label, metric in parts.metrics.items()
        if metric.mode == "MEAN" and metric.function
    }

    @jax.jit
    def means(output, target):
        # The loss takes logits; the logarithm of probabilities has the same softmax.
        logits = output
        if exportable.form.softmax:
            logits = jax.numpy.log(jax.numpy.maximum(output, 1e-30))
        return means_of(scored(parts.loss, metrics, logits, target))

    loss, measured = means(outputs, targets)
    return {"loss": float(sum(jax.tree.leaves(loss)))} | {
        name: float(value) for name, value in finish_means(metrics)(measured).items()
    }
