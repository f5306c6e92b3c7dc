"""Write the files of one checkpoint, each by a route that supports it, and verify them."""

import sys
import tempfile
import time
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from inference.child import here
from inference.examples import Examples
from inference.load import output_kind
from inference.lowering.compared import equal_sizes
from inference.lowering.trace import place, trace
from inference.lowering.walk import Missing
from inference.packages import needed
from inference.runtimes import open_model
from inference.samples import own_inputs, random_inputs, table_sizes
from inference.verify import (
    BATCHES,
    KINDS,
    TOLERANCE,
    Reference,
    check_finite,
    repeated,
    run_in_batches,
    scores,
    take,
    verify,
)
from utils import RunError, UserError, first_line

NEEDED = {"tflite": ("tensorflow", "ai_edge_litert"), "onnx": ("onnx", "onnxruntime")}
MAX_LOSS = 0.005  # the accuracy that quantization may lose without a warning


class Exporter:
    """Exports one loaded model; `arguments` are those of the command line."""

    def __init__(self, arguments, loaded, call=here, check=lambda: None, progress=None):
        self.arguments, self.loaded = arguments, loaded
        self.child_call, self.check = call, check
        self.progress = progress or (lambda step: None)
        self.own = own_inputs(arguments.inputs, loaded) if arguments.inputs else None
        self.classes = output_kind(loaded.config, loaded.form) != "numbers"
        self.examples, self.no_examples = self.load_examples()
        self.progress("tracing the model")
        self.traced = trace(*self.trace_arguments)
        self.compared = equal_sizes(self.traced.compared)
        own_sizes = tuple(arguments.batches or BATCHES)
        self.batches = (arguments.batch,) if arguments.batch else own_sizes
        self.batches += tuple(size for size in self.compared if size not in self.batches)
        self.size = max(self.batches)
        self.progress("computing what the files must return, in JAX")
        self.reference = Reference(loaded)
        self.cases = self.expected()
        self.before = self.scores(self.reference) if arguments.quantize else None

    def load_examples(self):
        """(the config's data, None), or (None, why it cannot be loaded)."""
        is_int8 = self.arguments.quantize == "int8"
        int8_needs = "--quantize int8: takes its ranges from training data"
        try:
            examples = Examples(self.loaded)
        except (UserError, RunError) as error:
            if is_int8 and not self.own:
                message = f"which cannot be loaded: {error}; or pass some with --inputs FILE.npz"
                raise UserError(f"{int8_needs}, {message}") from error
            kinds = "your inputs" if self.own else "random inputs only"
            print(f"Verified on {kinds}, no data can be loaded: {error}", file=sys.stderr)
            return None, str(error)
        if self.arguments.quantize and examples.differs_from_training_data():
            message = (
                f"{examples.source} is not the data that the checkpoint was trained on; "
                "set it, as in data.args.dir=..."
            )
            if is_int8:
                raise UserError(f"{int8_needs}, but {message}")
            print(f"Scored on other data: {message}", file=sys.stderr)
        return examples, None

    def inputs(self):
        """{kind: a batch of inputs to verify on}"""
        known = {}
        if self.examples:  # more than one, since their range is that of random inputs
            known["real"] = self.examples.first(max(self.size, *BATCHES))
        if self.own:
            known["own"] = self.own
        inputs = {kind: repeated(take(x, 0, self.size), self.size) for kind, x in known.items()}
        if not self.arguments.real_only:
            seen = next(iter(known.values()), None)
            tables = table_sizes(self.traced)
            inputs = {"random": random_inputs(self.loaded, self.size, seen, tables)} | inputs
        elif not inputs:
            fix = "pass your own with --inputs FILE.npz"
            raise UserError(f"--real-only: no data can be loaded: {self.no_examples}; {fix}")
        return inputs

    def expected(self):
        """{kind: (inputs, expected)}; see `verify`."""
        cases = {}
        for kind, inputs in self.inputs().items():
            cases[kind] = inputs, self.reference.outputs(inputs)
        for kind, (_, expected) in list(cases.items()):
            try:
                check_finite(expected(self.size))
            except RunError as error:
                if kind != "random" or len(cases) == 1:
                    raise RunError(f"on {kind} inputs, {error}") from error
                print(f"Not verified on random inputs: {error}", file=sys.stderr)
                del cases[kind]
        return cases

    def reports(self, stem):
        """Write <stem>.<format> for each format; returns ({format: report}, {format: error})."""
        reports, failures = {}, {}
        for name in self.arguments.formats:
            path = stem.with_name(f"{stem.name}.{name}")
            try:
                reports[name] = self.report(name, path)
            except Exception as error:  # converters raise many kinds
                path.unlink(missing_ok=True)
                failures[name] = f"{name}: {described(error)}"
            self.check()
        return reports, failures

    def report(self, format, path):
        """Write and verify one file; returns its report. If no route is chosen and the native one
        fails in any way, even in the verification, jax2tf is tried."""
        if self.arguments.route != "auto":
            return self.report_by(self.arguments.route, format, path)
        needed(*NEEDED[format])  # by both routes
        try:
            return self.report_by("native", format, path)
        except Exception as error:
            self.check()
            message = described(error)
            print(f"{format}: {message}; trying jax2tf instead", file=sys.stderr)
        try:
            return self.report_by("jax2tf", format, path) | {"native_fails": message}
        except Exception as error:
            if (second := described(error)) == message:
                raise RunError(message) from error
            raise RunError(f"{message}; by jax2tf: {second}") from error

    def report_by(self, route, format, path):
        """Write and verify one file by a route."""
        start, precision = time.perf_counter(), self.arguments.quantize
        self.write_in_precision(route, format, path)
        # The ranges of int8 come from real inputs; random inputs would be clipped to them.
        judged = ("real", "own") if precision == "int8" else KINDS
        report = {"precision": precision or "float32", "route": route}
        report |= self.verified(path, precision or self.traced.precision, judged)
        if self.before:
            report["test_set"] = {"before": self.before, "after": self.scores(open_model(path))}
        return report | {"seconds": round(time.perf_counter() - start, 2)}

    def verified(self, path, precision, judged=KINDS):
        """The report about a file that computes what JAX computes."""
        self.progress(f"{path.name}: verifying")
        tolerance = self.arguments.tolerance or TOLERANCE[precision]
        return verify(
            path, self.cases, tolerance, self.batches, judged, self.classes, self.compared
        )

    def call(self, format, step, function, *args):
        """A call in the child process."""
        self.progress(f"{format}: {step}")
        result = self.child_call(step, function, *args)
        self.check()
        return result

    @property
    def trace_arguments(self):
        loaded = self.loaded
        return loaded.function, loaded.weights, loaded.inputs, self.arguments.batch

    def write_in_precision(self, route, format, path):
        """Write a file; a quantized one only after its float32 version has been verified."""
        self.progress(f"{path.name}: writing by the route {route}")
        write = partial({"native": self.native, "jax2tf": self.by_jax2tf}[route], format)
        precision = self.arguments.quantize
        if not precision:
            return write(path)
        with tempfile.TemporaryDirectory() as folder:
            float32_path = Path(folder) / path.name
            write(float32_path)
            self.verified(float32_path, self.traced.precision)
            if format == "tflite":
                return write(path, quantize=precision, samples=self.samples)
            from inference.quantize_onnx import quantize_onnx

            self.progress(f"{path.name}: quantizing to {precision}")
            quantize_onnx(float32_path, path, precision, self.samples)

    def native(self, format, path, **quantization):
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
            fix = "; add one, or remove --route native" if self.arguments.route == "native" else ""
            raise UserError(message + fix) from error

    def by_jax2tf(self, format, path, **quantization):
        """Write a file by the jax2tf route, which has other primitives and makes larger graphs."""
        needed("tensorflow", "tf2onnx", "onnx", "onnxruntime", "ai_edge_litert")
        from inference.fallback.convert import onnx_by_jax2tf, tflite_by_jax2tf

        options = {"call": partial(self.call, format)}
        if format == "tflite":
            tflite_by_jax2tf(*self.trace_arguments, path, **options, **quantization)
        else:
            onnx_by_jax2tf(*self.trace_arguments, path, opset=self.arguments.opset, **options)

    @cached_property
    def samples(self):
        """Training inputs that calibrate int8, in batches; None for other precisions."""
        if self.arguments.quantize != "int8":
            return None
        examples, size = self.examples, self.arguments.batch or 1
        inputs = examples.spread(self.arguments.samples) if examples else self.own
        count = len(next(iter(inputs.values())))
        return [repeated(take(inputs, start, size), size) for start in range(0, count, size)]

    def scores(self, model):
        """{metric: value} on the test set; None without a test set or a metric of such outputs."""
        if not self.examples or self.examples.test_set is None:
            return None
        outputs, targets = [], []
        for inputs, target in self.examples.test_batches(self.size):
            outputs.append(run_in_batches(model, inputs, self.size)["output"])
            targets.append(target)
        try:
            return scores(self.loaded, np.concatenate(outputs), np.concatenate(targets))
        except (UserError, ValueError, TypeError) as error:
            print(f"No score on the test set: {error}", file=sys.stderr)
            return None

    def warnings(self, reports):
        """One line per format whose quantization loses much accuracy."""
        for name, report in reports.items():
            before, after = (report.get("test_set", {}).get(key, {}) for key in ("before", "after"))
            loss = before.get("accuracy", 0) - after.get("accuracy", 0)
            if loss > MAX_LOSS:
                precision = report["precision"]
                yield f"Warning: {name} in {precision} loses {100 * loss:.1f} points of accuracy"


def described(error):
    """An error in one line; what was not raised for a user is named with its place."""
    if isinstance(error, UserError | RunError):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)} ({place(error)})"
