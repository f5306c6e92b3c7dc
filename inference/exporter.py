"""Write the files of one checkpoint, each by a route that supports it, and verify them."""

import re
import sys
import tempfile
import time
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, partial
from glob import escape
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from inference import quantize_onnx, quantize_tflite
from inference.child import Child
from inference.demo.page import write_demo
from inference.load import Exportable
from inference.lowering.trace import UNBATCHED, describe, equal_sizes, named, of_batch, trace
from inference.lowering.walk import Missing
from inference.metadata import add_metadata, commit_of, facts_of, size_names
from inference.packages import needed
from inference.quantize_onnx import excluded_names
from inference.runtimes import Arrays, FileModel, IsolatedModel, open_model
from inference.sizes import Tried, free_axes, free_shapes, parse_free, tried_shapes
from inference.to_stablehlo import write_stablehlo
from inference.verify import (
    BATCHES,
    KINDS,
    TOLERANCE,
    Examples,
    Reference,
    Reports,
    Rows,
    cases_of,
    check_sizes,
    check_varied,
    inputs_of,
    load_examples,
    own_inputs,
    repeated,
    rows_of,
    run_in_batches,
    scores,
    table_sizes,
    take,
    verify,
)
from utils import RunError, UserError, echo

NEEDED = {"tflite": ("tensorflow", "ai_edge_litert"), "onnx": ("onnx", "onnxruntime")}
MOST_OUTPUTS = 2**30  # bytes that are scored; those of a language model may be unlimited
SMALLEST_SHARE = 0.01  # of a file; less that stays in float32 is not worth a warning
MOST_NAMES = 5  # in a warning
MAX_LOSS = 0.005  # the accuracy that quantization may lose without a warning


class Exporter:
    """Exports one model, an `Exportable`; `arguments` are those of the command line.

    `examples` take the place of the config's data. TensorFlow and the runtimes work in the process
    of `child`; `check` raises the KeyboardInterrupt of a Ctrl-C that a package has caught; `words`
    turns a message of the command line into one for the caller.
    """

    def __init__(
        self,
        arguments: Namespace,
        exportable: Exportable,
        child: Child,
        check: Callable[[], None] = lambda: None,
        progress: Callable[[str], None] | None = None,
        examples: Rows | None = None,
        words: Callable[[str], str] = str,
    ) -> None:
        exportable = renamed(
            exportable, arguments.input_names, arguments.output_names, arguments.batch
        )
        self.arguments, self.exportable = arguments, exportable
        self.child, self.check, self.words = child, check, words
        self.progress = progress or (lambda step: None)
        is_batched = arguments.batch != UNBATCHED
        self.free = free_axes(exportable.inputs, parse_free(arguments.free), int(is_batched))
        self.own = (
            own_inputs(arguments.inputs, exportable, is_batched) if arguments.inputs else None
        )
        self.classes = exportable.output_kind != "numbers"
        self.examples, self.no_examples = (
            (examples, None) if examples else load_examples(exportable, arguments, self.own)
        )
        tried = tried_shapes(exportable.inputs, self.free)
        check_sizes(exportable, tried, arguments.batch)
        self.progress("tracing the model")
        self.traced = trace(*self.trace_arguments)
        if arguments.route != "jax2tf":  # whose files have other names
            excluded_names(self.traced.weights, arguments.exclude)
        self.compared = equal_sizes(self.traced.compared)
        own_sizes = tuple(arguments.batches or BATCHES)
        self.batches = (arguments.batch,) if arguments.batch else own_sizes
        self.batches += tuple(size for size in self.compared if size not in self.batches)
        self.size = max(self.batches)
        self.progress("computing what the files must return, in JAX")
        self.reference = Reference(exportable)
        tables = table_sizes(self.traced)
        self.cases = cases_of(self.reference, self.inputs(tried, tables), self.batches)
        if self.samples:
            source = self.examples.source if self.examples else "--inputs"
            check_varied(self.samples, tables, source)
        self.before = self.scores(self.reference) if arguments.quantize else None

    def inputs(self, tried: list[Tried], tables: dict[str, int]) -> dict[str, Arrays]:
        """{kind: a batch of inputs to verify on}"""
        known = {}
        if self.examples:  # more than one, since random inputs get the range of these
            count = self.size if self.size == UNBATCHED else max(self.size, *BATCHES)
            known["real"] = self.examples.first(count)
        if self.own:
            known["own"] = self.own
        if self.arguments.real_only and not known:
            fix = "pass your own with --inputs FILE.npz"
            raise UserError(f"--real-only: no data can be loaded: {self.no_examples}; {fix}")
        return inputs_of(self.exportable, known, self.size, tables, tried, self.arguments.real_only)

    def reports(self, stem: Path) -> tuple[Reports, dict[str, str]]:
        """Write <stem>.<format> for each format; returns ({format: report}, {format: error})."""
        reports, failures = {}, {}
        for name in self.arguments.formats:
            path = stem.with_name(f"{stem.name}.{name}")
            try:
                reports[name] = self.report(name, path)
            except Exception as error:  # converters raise many kinds
                remove(path)
                failures[name] = f"{name}: {described(error)}"
            self.check()
        return reports, failures

    def report(self, format: str, path: Path) -> dict[str, Any]:
        """Write and verify one file; returns its report. If no route is chosen and the native one
        fails in any way, even in the verification, jax2tf is tried, unless weights are excluded:
        its files have none of their names."""
        if format == "stablehlo":
            return self.report_by("jax", format, path)
        if self.arguments.route != "auto" or self.arguments.exclude:
            route = self.arguments.route.replace("auto", "native")
            return self.report_by(route, format, path)
        needed(*NEEDED[format])  # by both routes
        try:
            return self.report_by("native", format, path)
        except Exception as error:
            self.check()
            message = self.words(described(error))
            echo(f"{format}: {message}; trying jax2tf instead", file=sys.stderr)
        remove(path)
        try:
            return self.report_by("jax2tf", format, path) | {"native_fails": message}
        except Exception as error:
            if (second := self.words(described(error))) == message:
                raise RunError(message) from error
            raise RunError(f"{message}; by jax2tf: {second}") from error

    def report_by(self, route: str, format: str, path: Path) -> dict[str, Any]:
        """Write and verify one file by a route."""
        start, precision = time.perf_counter(), self.arguments.quantize
        self.write_in_precision(route, format, path)
        sizes = size_names(self.traced)
        add_metadata(path, self.facts(path.stem) | {"sizes": sizes})
        report = {"precision": precision or "float32", "route": route}
        if self.free:
            report["sizes"] = sizes
        # The ranges of int8 come from real inputs; random inputs would be clipped to them.
        judged = ("real", "own") if precision == "int8" else KINDS
        report |= self.verified(path, precision or self.traced.precision, judged)
        if precision:
            tools = {"onnx": quantize_onnx, "tflite": quantize_tflite}[format]
            weights = self.call(format, "reading what is float32", tools.float32_weights, path)
            largest_first = sorted(weights, key=weights.get, reverse=True)
            shares = {name: round(weights[name] / report["bytes"], 4) for name in largest_first}
            report["float32_weights"] = shares
        if self.before:
            report["test_set"] = {"before": self.before, "after": self.scores(self.opened(path))}
        return report | {"seconds": round(time.perf_counter() - start, 2)}

    def write_page(self, path: Path, page: Path) -> None:
        """Write a web page that runs the ONNX file."""
        write_demo(path, page, self.exportable, self.exportable.classes)

    def facts(self, title: str) -> dict[str, Any]:
        """The metadata of a file."""
        checkpoint = self.arguments.weights
        source = Path(checkpoint).name if checkpoint else None
        title = self.exportable.config.get("title") or title
        return facts_of(self.exportable, title, source, checkpoint and commit_of(checkpoint))

    def verified(self, path: Path, precision: str, judged: Sequence[str] = KINDS) -> dict[str, Any]:
        """Compare a file with JAX; returns the report of `verify`."""
        self.progress(f"{path.name}: verifying")
        tolerance = self.arguments.tolerance or TOLERANCE[precision]
        given = self.cases, tolerance, self.batches, judged, self.classes, self.compared
        return verify(self.opened(path), *given)

    def opened(self, path: Path) -> FileModel:
        """The model in a file: StableHLO runs in this process, by JAX, and others in the child."""
        is_stablehlo = path.suffix.lower() == ".stablehlo"
        return open_model(path) if is_stablehlo else IsolatedModel(self.child, path)

    def call(self, format: str, step: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the child process."""
        self.progress(f"{format}: {step}")
        result = self.child.call(step, function, *args)
        self.check()
        return result

    @property
    def trace_arguments(self) -> tuple[Callable[..., PyTree], PyTree, PyTree, int | None]:
        exportable = self.exportable
        inputs = free_shapes(exportable.inputs, self.free)
        return exportable.function, exportable.weights, inputs, self.arguments.batch

    def write_in_precision(self, route: str, format: str, path: Path) -> None:
        """Write a file; a quantized one only after its float32 version has been verified."""
        self.progress(f"{path.name}: writing by the route {route}")
        if route == "jax":
            return write_stablehlo(*self.trace_arguments, path)
        write = partial({"native": self.native, "jax2tf": self.by_jax2tf}[route], format)
        precision = self.arguments.quantize
        if not precision:
            return write(path)
        with tempfile.TemporaryDirectory() as folder:
            float32_path = Path(folder) / path.name
            write(float32_path)
            self.verified(float32_path, self.traced.precision)
            if format == "tflite":
                exclude = self.arguments.exclude
                return write(path, quantize=precision, samples=self.samples, exclude=exclude)
            weights = list(self.traced.weights) if route == "native" else []
            given = float32_path, path, precision, self.samples, self.arguments.exclude, weights
            self.call(format, f"quantizing to {precision}", quantize_onnx.quantize_onnx, *given)

    def native(self, format: str, path: Path, **quantization: Any) -> None:
        """Write a file with this project's own tables of ops."""
        try:
            needed(*NEEDED[format])
            if format == "tflite":
                from inference.to_tflite import write_tflite

                write_tflite(self.traced, path, call=partial(self.call, format), **quantization)
            else:
                from inference.to_onnx import write_onnx

                write_onnx(self.traced, path, self.arguments.opset)
        except Missing as error:
            message = f"the native route has no op for {error}"
            options = ["--route native"] if self.arguments.route == "native" else []
            options += ["--exclude"] if self.arguments.exclude else []
            fix = f"; add one, or remove {' and '.join(options)}" if options else ""
            raise UserError(message + fix) from error

    def by_jax2tf(self, format: str, path: Path, **quantization: Any) -> None:
        """Write a file by the jax2tf route, which has other primitives and makes larger graphs."""
        needed("tensorflow", "tf2onnx", "onnx", "onnxruntime", "ai_edge_litert")
        from inference.fallback.convert import onnx_by_jax2tf, tflite_by_jax2tf

        options = {"call": partial(self.call, format)}
        if format == "tflite":
            tflite_by_jax2tf(*self.trace_arguments, path, **options, **quantization)
        else:
            onnx_by_jax2tf(*self.trace_arguments, path, opset=self.arguments.opset, **options)

    @cached_property
    def samples(self) -> list[Arrays] | None:
        """Training inputs that calibrate int8, in batches; None for other precisions."""
        if self.arguments.quantize != "int8":
            return None
        examples, size = self.examples, self.arguments.batch or 1
        inputs = examples.spread(self.arguments.samples) if examples else self.own
        assert inputs is not None  # `load_examples` raises without any
        if size == UNBATCHED:
            return [inputs]
        count = rows_of(inputs)
        return [repeated(take(inputs, start, size), size) for start in range(0, count, size)]

    def scores(self, model: Callable[[Arrays], Arrays]) -> dict[str, float] | None:
        """{metric: value} on the test set; None without a test set or a metric of such outputs."""
        if not isinstance(self.examples, Examples) or "test" not in self.examples.datasets:
            return None
        outputs, targets = [], []
        for inputs, target in self.examples.test_batches(self.size):
            results = list(run_in_batches(model, inputs, self.size).values())
            if len(results) != 1:
                return None
            outputs += results
            targets.append(target)
            if sum(array.nbytes for array in outputs) > MOST_OUTPUTS:
                break
        try:
            return scores(self.exportable, np.concatenate(outputs), np.concatenate(targets))
        except (UserError, ValueError, TypeError) as error:
            echo(f"No score on the test set: {error}", file=sys.stderr)
            return None

    def warnings(self, reports: Reports) -> Iterator[str]:
        """One line per format whose quantization loses much accuracy, or leaves large weights in
        float32."""
        for name, report in reports.items():
            shares = report.get("float32_weights", {})
            if left := float32_warning(shares, self.arguments.exclude):
                yield f"Warning: {name} in {report['precision']}: {left}"
            before, after = (report.get("test_set", {}).get(key, {}) for key in ("before", "after"))
            loss = before.get("accuracy", 0) - after.get("accuracy", 0)
            if loss > MAX_LOSS:
                precision = report["precision"]
                yield f"Warning: {name} in {precision} loses {100 * loss:.1f} points of accuracy"


def float32_warning(shares: dict[str, float], excluded: Sequence[str]) -> str | None:
    """What a warning says about the float32 weights, {name: share of the file}, that no regex has
    `excluded`; None if they are a small part of the file."""

    def is_excluded(name: str) -> bool:
        names = (name, quantize_onnx.without_number(name))
        is_named = any(re.fullmatch(regex, each) for regex in excluded for each in names)
        return is_named or quantize_tflite.KEPT in name

    left = {name: share for name, share in shares.items() if not is_excluded(name)}
    if sum(left.values()) < SMALLEST_SHARE:
        return None
    named = [f"{name} ({share:.1%} of the file)" for name, share in left.items()]
    more = [f"{len(named) - MOST_NAMES} more"] if len(named) > MOST_NAMES else []
    return f"stays in float32: {', '.join(named[:MOST_NAMES] + more)}"


def described(error: Exception) -> str:
    """An error in one line, with its place in the code unless it is a message for the user."""
    if isinstance(error, UserError | RunError):
        return str(error)
    return describe(error)


def remove(path: Path) -> None:
    """Remove a file and that of its weights."""
    for file in path.parent.glob(f"{escape(path.name)}*"):
        file.unlink()


def renamed(
    exportable: Exportable,
    input_names: Sequence[str],
    output_names: Sequence[str],
    batch: int | None = None,
) -> Exportable:
    """The model with other names for its inputs and outputs, given in the order of its own names.

    What is not given keeps its names.
    """
    if not input_names and not output_names:
        return exportable
    shapes = of_batch(exportable.inputs, batch or 2)
    out = jax.eval_shape(exportable.function, exportable.weights, shapes)
    ins = chosen("--input-names", input_names, named(exportable.inputs, "input"))
    outs = chosen("--output-names", output_names, named(out, "output", ins))
    if both := set(ins) & set(outs):
        raise UserError(
            f"--output-names: {min(both)!r} is the name of an input as well; choose another"
        )
    function, structure = exportable.function, jax.tree.structure(exportable.inputs)

    def with_names(weights: PyTree, inputs: dict[str, jax.Array]) -> PyTree:
        outputs = function(weights, jax.tree.unflatten(structure, [inputs[name] for name in ins]))
        return OrderedDict(zip(outs, jax.tree.leaves(outputs), strict=True))

    inputs = OrderedDict(zip(ins, jax.tree.leaves(exportable.inputs), strict=True))
    return exportable._replace(function=with_names, inputs=inputs)


def chosen(option: str, names: Sequence[str], present: Collection[str]) -> list[str]:
    """The names of an option, or those that are present; raises if they do not fit."""
    if not names:
        return list(present)
    if len(names) != len(present):
        raise UserError(
            f"{option}: has {len(names)} names, the model has {len(present)}: {', '.join(present)}"
        )
    for i, name in enumerate(names):
        if not re.fullmatch(r"[A-Za-z_][\w./-]*", name):
            raise UserError(f"{option}: {name!r} is not a name; begin it with a letter")
        if name in names[:i]:
            raise UserError(f"{option}: {name!r} is given twice")
    return list(names)
