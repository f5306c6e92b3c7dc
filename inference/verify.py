"""Verify that an exported file computes what JAX computes.

First the comparison of a file with JAX and the table of its results; then the inputs on which they
are compared: examples of the data, random inputs like them, and those of the user.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jaxtyping import Array, PyTree

from data_loader.base import fingerprint, has_items
from data_loader.base import loaded as load_datasets
from data_loader.loader import collate, collated
from data_loader.npy_files import claimed
from inference.load import Exportable, prepare
from inference.lowering.equations import open_jaxpr
from inference.lowering.trace import UNBATCHED, Scalar, Traced, describe, named, of_batch
from inference.runtimes import Arrays, FileModel, Specs, latency
from inference.sizes import Tried
from training.checkpoint.probe import host, seeded_inputs
from utils import RunError, UserError, check_memory, echo, first_line, format_bytes

BATCHES = (1, 3, 64)
# The largest error, as a share of the output's scale, by the precision of the file or the model.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2, "dynamic": 0.2, "int8": 0.3}
WRONG = 0.1  # of the output's scale: in float32, such an error does not come from rounding
KINDS = ("random", "real", "own")  # of inputs: "own" are those that the user passes
COLUMNS = "file,route,nodes,size,inputs,batch,absolute,relative,same class,latency"
Reports = dict[str, dict[str, Any]]  # {format: the JSON object that describes its file}
# {kind of inputs: (a batch of them, expected(size): JAX's outputs for the first `size`)}
Cases = dict[str, tuple[Arrays, Callable[[int], Arrays]]]
# Primitives whose results are numbers of their operands, in another form.
SAME_NUMBERS = """
    convert_element_type reshape broadcast_in_dim squeeze slice clamp transpose concatenate rev copy
    select_n max min dynamic_slice
"""
SAME_NUMBERS = set(SAME_NUMBERS.split())


class Reference:
    """The function in JAX on the CPU, {input: array} -> {output: array}."""

    def __init__(self, exportable: Exportable) -> None:
        self.structure = jax.tree.structure(exportable.inputs)
        # Level 1 compiles in a third of the time.
        options = {"xla_backend_optimization_level": 1}
        self.program = jax.jit(exportable.function, compiler_options=options)
        with jax.default_device(host()):
            self.weights = jax.tree.map(jax.numpy.asarray, exportable.weights)

    def __call__(self, inputs: Arrays) -> Arrays:
        arrays = jax.tree.unflatten(self.structure, inputs.values())
        with jax.default_matmul_precision("highest"), jax.default_device(host()):
            outputs = self.program(self.weights, arrays)
        return named(jax.tree.map(np.asarray, outputs), "output", inputs)

    def outputs(self, inputs: Arrays) -> Callable[[int], Arrays]:
        """A function expected(size) that returns the outputs for the first `size` inputs, from a
        run with a batch of that size: a model may treat some sizes in another way."""
        return cache(lambda size: self(take(inputs, 0, size)))


def run_in_batches(model: Callable[[Arrays], Arrays], inputs: Arrays, size: int) -> Arrays:
    """A model's outputs for any number of inputs, in padded batches of one size."""
    count = rows_of(inputs)
    batches = [model(repeated(take(inputs, start, size), size)) for start in range(0, count, size)]
    return {name: np.concatenate([batch[name] for batch in batches])[:count] for name in batches[0]}


def take(arrays: Arrays, start: int, size: int) -> Arrays:
    """Rows from `start` on; scalars have no rows and are returned unchanged."""
    if size == UNBATCHED:
        return arrays
    return {
        name: array[start : start + size] if np.ndim(array) else array
        for name, array in arrays.items()
    }


def repeated(inputs: Arrays, size: int) -> Arrays:
    """The inputs, repeated until there are `size`."""
    if size == UNBATCHED:
        return inputs
    return {
        name: np.take(array, np.arange(size) % len(array), axis=0) if np.ndim(array) else array
        for name, array in inputs.items()
    }


def rows_of(inputs: Arrays) -> int:
    """The number of examples in a batch of inputs, of which some may be scalars."""
    return next(len(array) for array in inputs.values() if np.ndim(array))


def sizes_at(kind: str, batches: Sequence[int]) -> Sequence[int]:
    """The batch sizes at which inputs of a kind are verified: at other free sizes, the two
    smallest, since JAX compiles a program for each."""
    return sorted(batches)[:2] if "," in kind else batches


def verify(
    model: FileModel,
    cases: Cases,
    tolerance: float,
    batches: Sequence[int],
    judged: Collection[str] = KINDS,
    classes: bool = True,
    compared: dict[int, str] | None = None,
) -> dict[str, Any]:
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


def files_of(path: Path) -> list[Path]:
    """A file, and that of its weights if they are beside it."""
    return [path, *path.parent.glob(f"{escape(path.name)}.data")]


def is_judged(check: dict[str, Any], judged: Collection[str]) -> bool:
    """Whether a check must pass: the kind of its inputs, at any free sizes, is judged."""
    return check["data"].split(",")[0] in judged


def advice(
    worst: dict[str, Any],
    failed: list[dict[str, Any]],
    judged: list[dict[str, Any]],
    tolerance: float,
    compared: dict[int, str],
) -> str:
    """What a user can do about the failed ones of the judged checks."""

    def some(value: Callable[[dict[str, Any]], object]) -> bool:
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


def as_text(specs: Specs) -> dict[str, str]:
    return {name: f"{dtype}{list(shape)}" for name, (shape, dtype) in specs.items()}


def compare(
    model: FileModel,
    kind: str,
    size: int,
    inputs: Arrays,
    expected: Callable[[int], Arrays],
    classes: bool = True,
) -> dict[str, Any]:
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


def difference(outputs: Arrays, expected: Arrays) -> dict[str, float]:
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


def check_finite(expected: Arrays) -> None:
    """Raise if an output of JAX has no finite number."""
    for name, array in expected.items():
        if array.size and not np.isfinite(np.asarray(array, np.float64)).any():
            raise RunError(f"{name}: JAX returns no finite number, so nothing can be compared")


def largest_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest absolute difference; infinite where only one of the two is nan or infinite."""
    with np.errstate(invalid="ignore"):
        error = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0, np.abs(got - want))
    return float(np.nan_to_num(error, nan=np.inf, posinf=np.inf).max(initial=0))


def table(reports: Reports, signatures: bool = True) -> str:
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


def title(report: dict[str, Any]) -> str:
    """A file, and which of its signatures if it has several."""
    return " ".join(filter(None, [report["file"], report.get("signature")]))


def error_cells(check: dict[str, Any], judged: Collection[str]) -> list[str]:
    """The errors and the agreement, in brackets if they are not judged."""
    cells = [
        f"{check['absolute_error']:.1e}",
        f"{check['relative_error']:.1e}",
    ]
    if "same_argmax" in check:  # the outputs are classes
        cells.append(f"{check['same_argmax']:.1%}")
    return cells if is_judged(check, judged) else [f"({cell})" for cell in cells]


def signature(report: dict[str, Any]) -> str:
    """The names and types of the inputs and outputs, in one line, with the names of free sizes."""
    sizes = report.get("sizes", {})

    def text(name: str, spec: str) -> str:
        dtype = spec.split("[")[0]
        known = f"{dtype}[{', '.join(sizes[name])}]" if name in sizes else spec
        return f"{name} {known}"

    inputs, outputs = (
        ", ".join(text(name, spec) for name, spec in report[side].items())
        for side in ("inputs", "outputs")
    )
    return f"{inputs} -> {outputs}".replace("None", "batch")


def scores(exportable: Exportable, outputs: np.ndarray, targets: PyTree) -> dict[str, float]:
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
    def means(output: Array, target: PyTree) -> tuple[PyTree, PyTree]:
        # The loss takes logits; the logarithm of probabilities has the same softmax.
        logits = output
        if exportable.form.softmax:
            logits = jax.numpy.log(jax.numpy.maximum(output, 1e-30))
        return means_of(scored(parts.loss, metrics, logits, target))

    loss, measured = means(outputs, targets)
    return {"loss": float(sum(jax.tree.leaves(loss)))} | {
        name: float(value) for name, value in finish_means(metrics)(measured).items()
    }


class Examples:
    """Batches of ({input: array}, targets); raises UserError if there is no usable data."""

    def __init__(self, exportable: Exportable) -> None:
        if exportable.parts.data is None:
            raise UserError(exportable.data_error)
        if getattr(exportable.parts.model, "inputs", None):
            raise UserError("the model takes other inputs than those of the data")
        self.exportable = exportable
        sets = load_datasets(exportable.parts.data, exportable.parts.loader)
        self.datasets = {name: dataset for name, dataset in sets.items() if has_items(dataset)}
        if len(self.datasets) < len(sets):
            raise UserError("data: comes in batches, so no single example can be read")
        self.check_shapes()

    def check_shapes(self) -> None:
        """Raise if the data's inputs do not have the shape that the model takes."""
        inputs, _ = self.batch(self.datasets["train"], [0])
        for name, leaf in named(self.exportable.inputs, "input").items():
            shape = inputs[name].shape[1:]
            if shape != leaf.shape:
                raise UserError(
                    f"the data's inputs have shape {shape}, the model takes {leaf.shape}"
                )

    @property
    def source(self) -> str:
        """Where the data comes from: its own description, or its name in the config."""
        return getattr(self.datasets["train"], "source", self.exportable.config["data"]["name"])

    def differs_from_training_data(self) -> bool:
        """Whether the checkpoint was trained on other data than this."""
        trained_on = self.exportable.record.get("data", {}).get("train")
        return trained_on is not None and trained_on != fingerprint(self.datasets["train"])

    def first(self, count: int) -> Arrays:
        """The first inputs of the test set, or of the training set if there is no test set."""
        dataset = self.datasets.get("test", self.datasets["train"])
        return self.batch(dataset, range(min(count, len(dataset))))[0]

    def spread(self, count: int) -> Arrays:
        """Inputs of the training set at equal distances."""
        dataset = self.datasets["train"]
        count = min(count, len(dataset))
        return self.batch(dataset, [i * len(dataset) // count for i in range(count)])[0]

    def test_batches(self, size: int) -> Iterator[tuple[Arrays, PyTree]]:
        """The test set, batch by batch."""
        dataset = self.datasets["test"]
        for start in range(0, len(dataset), size):
            yield self.batch(dataset, range(start, min(start + size, len(dataset))))

    def batch(self, dataset: Any, indices: Iterable[int]) -> tuple[Arrays, PyTree]:
        collate_fn = self.exportable.parts.loader.of("test").collate_fn or collate
        batch = collated([dataset[i] for i in indices], collate_fn)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UserError("the data's examples are not (input, target) pairs")
        raw, targets = batch
        prepared = jax.tree.leaves(prepare(self.exportable.preprocess, self.exportable.form, raw))
        names = named(self.exportable.inputs, "input")
        if len(prepared) != len(names):
            found = ", ".join(named(raw, "input"))
            raise UserError(f"the data's inputs are {found}, the model takes {', '.join(names)}")
        return dict(zip(names, prepared, strict=True)), targets


class Rows:
    """Given examples, {input: array}, in place of a config's data."""

    source = "the example"

    def __init__(self, inputs: Arrays, batch: int | None) -> None:
        self.inputs = inputs
        self.count = 1 if batch == UNBATCHED else rows_of(inputs)

    def first(self, count: int) -> Arrays:
        """The first rows, or all if there is no batch."""
        return take(self.inputs, 0, count)

    def spread(self, count: int) -> Arrays:
        """Rows at equal distances."""
        if self.count == 1:
            return self.inputs
        count = min(count, self.count)
        rows = np.arange(count) * self.count // count
        return {
            name: array[rows] if np.ndim(array) else array for name, array in self.inputs.items()
        }


def random_inputs(
    exportable: Exportable,
    size: int,
    seen: Arrays | None = None,
    tables: dict[str, int] | None = None,
) -> Arrays:
    """Seeded random inputs: numbers between the smallest and the largest that each feature has in
    the examples `seen`. Integers that index a table are any of its rows, whose number is in
    `tables`, or any token of a vocabulary.

    Without examples, or where all numbers of these are equal, they are standard normal floats.
    """
    drawn = jax.tree.map(np.asarray, seeded_inputs(of_batch(exportable.inputs, size)))
    inputs = named(drawn, "input")
    random, channels_first = np.random.default_rng(0), exportable.form.layout == "nchw"
    for name, array in inputs.items():
        is_integer = np.issubdtype(array.dtype, np.integer)
        known = [(tables or {}).get(name), exportable.parts.facts.get("vocab_size")]
        rows = min([count for count in known if count], default=None) if is_integer else None
        if rows:
            inputs[name] = random.integers(rows, size=array.shape).astype(array.dtype)
        elif seen and array.dtype != bool and (is_integer or not is_constant(seen[name])):
            axis = 1 if channels_first and array.ndim == 4 else array.ndim - 1
            inputs[name] = drawn_like(seen[name], axis, array.shape, random)
    return inputs


def is_constant(array: np.ndarray) -> bool:
    """Whether all numbers are equal; a scalar has no others, so it is constant only if it is 0."""
    return array.dtype != bool and array.min() == array.max() and (array.ndim > 0 or array == 0)


def drawn_like(
    seen: np.ndarray, axis: int, shape: tuple[int, ...], random: np.random.Generator
) -> np.ndarray:
    """Random numbers between the extremes that `seen` has for each feature, along this axis; around
    a single float, between a half of it and one and a half; if all integers are equal, from 0 to
    them."""
    if not np.issubdtype(seen.dtype, np.integer):
        numbers = np.nan_to_num(seen.astype(float), nan=0, posinf=0, neginf=0)
        ends = extremes(numbers, axis, shape) if seen.ndim else (numbers / 2, numbers * 3 / 2)
        return random.uniform(*ends, shape).astype(seen.dtype)
    low, high = extremes(seen, axis, shape)
    if is_constant(seen):
        low, high = min(low, 0), max(high, 1)
    return random.integers(low, high, shape, endpoint=True).astype(seen.dtype)


def extremes(
    numbers: np.ndarray, axis: int, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and largest numbers of each feature, or those of all features together if this
    shape has another number of features, or no feature has two numbers."""
    axes = tuple(i for i in range(numbers.ndim) if i != axis or numbers.ndim == 1)
    low, high = numbers.min(axes, keepdims=True), numbers.max(axes, keepdims=True)
    is_other_count = numbers.ndim > 1 and numbers.shape[axis] != shape[axis]
    is_together = is_other_count or (low == high).all()
    return (numbers.min(), numbers.max()) if is_together else (low, high)


def resized_inputs(inputs: Arrays, shapes: PyTree) -> Arrays:
    """The inputs, repeated or cut along each axis to the sizes of a tree of shapes."""
    results = {}
    for name, spec in named(shapes, "input").items():
        array = inputs[name]
        for axis, size in enumerate(spec.shape):
            array = np.take(array, np.arange(size) % array.shape[axis], axis)
        results[name] = array
    return results


def table_sizes(traced: Traced) -> dict[str, int]:
    """{input: the size of the smallest axis that its integers index}, for inputs of integers."""
    sizes, inputs = {}, dict.fromkeys(traced.weights) | {name: name for name in traced.inputs}

    def walk(jaxpr: Any, names: Iterable[str | None]) -> list[str | None]:
        """The name of the input whose numbers each result holds, or None."""
        jaxpr = open_jaxpr(jaxpr)
        held = dict(zip(jaxpr.invars, names, strict=True))

        def name_of(atom: Any) -> str | None:
            return None if isinstance(atom, Literal) else held.get(atom)

        for eqn in jaxpr.eqns:
            names = list(map(name_of, eqn.invars))
            if eqn.primitive.name == "gather" and names[1]:
                aval: Any = eqn.invars[0].aval
                shape = aval.shape
                indexed = [shape[axis] for axis in eqn.params["dimension_numbers"].start_index_map]
                known = [size for size in (*indexed, sizes.get(names[1])) if isinstance(size, int)]
                sizes.update({names[1]: min(known)} if known else {})
            results = [None] * len(eqn.outvars)
            if eqn.primitive.name in SAME_NUMBERS:
                results = [next(filter(None, names), None)]
            if eqn.primitive.name == "gather":  # a column
                results = names[:1]
            for inner, values in inner_jaxprs(eqn, names):
                results = walk(inner, values)
            held |= dict(zip(eqn.outvars, results, strict=False))
        return list(map(name_of, jaxpr.outvars))

    walk(traced.jaxpr, inputs.values())
    return sizes


def inner_jaxprs(
    eqn: JaxprEqn, names: list[str | None]
) -> Iterator[tuple[Jaxpr | ClosedJaxpr, list[str | None]]]:
    """(jaxpr, the names of its arguments) for each jaxpr that an equation calls, but not loops that
    run until a condition holds."""
    for param in eqn.params.values():
        for inner in param if isinstance(param, tuple | list) else [param]:
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                values = names[1:] if eqn.primitive.name == "cond" else names
                if len(open_jaxpr(inner).invars) == len(values):
                    yield inner, values


def own_inputs(path: str | Path, exportable: Exportable, is_batched: bool = True) -> Arrays:
    """{input: array} of an npz or npy file of inputs as the exported file takes them."""
    specs = named(exportable.inputs, "input")
    try:
        check_memory(f"--inputs: {path}", sum(claimed(path).values()))
        content = np.load(path, allow_pickle=False)
        arrays = {"input": content} if isinstance(content, np.ndarray) else dict(content)
    except UserError:
        raise
    except Exception as error:  # damaged files raise many kinds
        raise UserError(f"--inputs: {path}: cannot be read: {first_line(error)}") from error
    if len(specs) == len(arrays) == 1:  # there is only one that it can be
        arrays = dict(zip(specs, arrays.values(), strict=True))
    if missing := [name for name in specs if name not in arrays]:
        found = ", ".join(arrays) or "nothing"
        raise UserError(f"--inputs: {path}: has no {', '.join(missing)}, only {found}")
    batched = {name: is_batched and not isinstance(spec, Scalar) for name, spec in specs.items()}
    arrays = {
        name: as_spec(path, name, arrays[name], spec, batched[name]) for name, spec in specs.items()
    }
    if not is_batched:
        return arrays
    lengths = {name: len(array) for name, array in arrays.items() if batched[name]}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise UserError(f"--inputs: {path}: needs one row per input in every array, got {lengths}")
    return arrays


def as_spec(
    path: str | Path,
    name: str,
    array: np.ndarray,
    spec: jax.ShapeDtypeStruct,
    is_batched: bool = True,
) -> np.ndarray:
    """The array in the dtype of an input; raises if its shape or its numbers do not fit."""
    shape = array.shape[1:] if is_batched else array.shape
    fits = (array.ndim or not is_batched) and shape == spec.shape
    fits = fits and array.dtype.kind not in "OSUMm"
    is_float = [jax.numpy.issubdtype(dtype, np.floating) for dtype in (array.dtype, spec.dtype)]
    if not fits or not (all(is_float) or np.array_equal(array, array.astype(spec.dtype))):
        takes = f"{spec.dtype}{[*['any'][:is_batched], *spec.shape]}".replace("'", "")
        found = f"{array.dtype}{list(array.shape)}"
        fix = "pass what the file takes, preprocessed unless the file does that"
        raise UserError(f"--inputs: {path}: the file takes {name} {takes}, got {found}; {fix}")
    return array.astype(spec.dtype)


def load_examples(
    exportable: Exportable, arguments: Namespace, own: Arrays | None
) -> tuple[Examples | None, str | None]:
    """(the config's data, None), or (None, why it cannot be loaded).

    `own` are the user's inputs, or None.
    """
    is_int8 = arguments.quantize == "int8"
    int8_needs = "--quantize int8: takes its ranges from training data"
    try:
        examples = Examples(exportable)
    except (UserError, RunError) as error:
        if is_int8 and not own:
            message = f"which cannot be loaded: {error}; or pass some with --inputs FILE.npz"
            raise UserError(f"{int8_needs}, {message}") from error
        kinds = "your inputs" if own else "random inputs only"
        echo(f"Verified on {kinds}, no data can be loaded: {error}", file=sys.stderr)
        return None, str(error)
    if arguments.quantize and examples.differs_from_training_data():
        message = (
            f"{examples.source} is not the data that the checkpoint was trained on; "
            "set it, as in data.args.dir=..."
        )
        if is_int8:
            raise UserError(f"{int8_needs}, but {message}")
        echo(f"Scored on other data: {message}", file=sys.stderr)
    return examples, None


def check_sizes(exportable: Exportable, tried: list[Tried], batch: int | None) -> None:
    """Raise if the model itself fails at one of the `tried_shapes`."""
    for sizes, shapes in tried:
        try:
            jax.eval_shape(exportable.function, exportable.weights, of_batch(shapes, batch or 2))
        except Exception as error:  # the model may be the user's own
            raise UserError(
                f"--free: the model itself fails with {in_words(sizes)}: {describe(error)}; give "
                "the sizes that it takes, as in --free 1:length:8-512, or leave out --free"
            ) from error


def in_words(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name} {size}" for name, size in sizes.items())


def inputs_of(
    exportable: Exportable,
    known: dict[str, Arrays],
    size: int,
    tables: dict[str, int],
    tried: list[Tried],
    is_real_only: bool,
) -> dict[str, Arrays]:
    """{kind: a batch of inputs}; the kinds of other free sizes are such as `random, length 9`."""
    inputs = {kind: repeated(take(x, 0, size), size) for kind, x in known.items()}
    seen = next(iter(known.values()), None)
    if not is_real_only:
        print_constant(seen or {}, tables)
        inputs = {"random": random_inputs(exportable, size, seen, tables)} | inputs
    for sizes, shapes in tried:
        kind = next(iter(inputs))
        if is_real_only:
            other = resized_inputs(inputs[kind], of_batch(shapes, size))
        else:
            other = random_inputs(exportable._replace(inputs=shapes), size, seen, tables)
        inputs[f"{kind}, {in_words(sizes)}"] = other
    return inputs


def print_constant(seen: Arrays, tables: dict[str, int]) -> None:
    """Print which random inputs have another range than the real ones, which are constant."""
    for name, array in seen.items():
        if is_constant(array):
            number = array.reshape(-1)[0]
            drawn = "standard normal" if array.dtype.kind == "f" else "between 0 and it"
            drawn = f"any of the {tables[name]} rows of its table" if name in tables else drawn
            echo(f"{name}: is {number} everywhere, so random inputs are {drawn}", file=sys.stderr)


def check_varied(samples: list[Arrays], tables: dict[str, int], source: str) -> None:
    """Raise if int8 cannot take its ranges from these inputs, since one of them is constant. Counts
    may be, such as the lengths of sequences: integers that are neither pixels nor index a table."""
    for name in samples[0]:
        arrays = [sample[name] for sample in samples]
        is_count = arrays[0].dtype.kind in "iu" and arrays[0].itemsize > 1 and name not in tables
        if np.ndim(arrays[0]) and not is_count and is_constant(np.concatenate(arrays)):
            number = arrays[0].reshape(-1)[0]
            why = f"where all numbers of the input {name} are {number}; pass real inputs"
            raise UserError(f"--quantize int8: takes its ranges from {source}, {why}")


def cases_of(reference: Reference, inputs: dict[str, Arrays], batches: Sequence[int]) -> Cases:
    """{kind: (inputs, expected)}; see `verify`. Random inputs are left out if JAX returns no finite
    number for them, and there are others."""
    cases = {kind: (batch, reference.outputs(batch)) for kind, batch in inputs.items()}
    for kind, (_, expected) in list(cases.items()):
        try:
            for size in sizes_at(kind, batches):
                check_finite(expected(size))
        except RunError as error:
            if not kind.startswith("random") or len(cases) == 1:
                raise RunError(f"on {kind} inputs, {error}") from error
            echo(f"Not verified on {kind} inputs: {error}", file=sys.stderr)
            del cases[kind]
    return cases
