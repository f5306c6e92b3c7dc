"""Write the files of one checkpoint, each by a route that supports it, and verify them."""

import sys
import tempfile
import time
import traceback
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from inference.examples import Examples
from inference.load import describe, output_kind
from inference.lowering.trace import UNBATCHED, trace
from inference.lowering.walk import Missing
from inference.metadata import add_metadata, commit_of, facts_of, size_names
from inference.names import renamed
from inference.packages import needed
from inference.runtimes import open_model
from inference.sizes import free_axes, free_shapes, parse_free, tried_shapes
from inference.to_stablehlo import write_stablehlo
from inference.verify import (
    BATCHES,
    TOLERANCE,
    Reference,
    random_inputs,
    repeated,
    run_in_batches,
    scores,
    take,
    verify,
)
from utils import RunError, UserError

MAX_LOSS = 0.005  # the accuracy that quantization may lose without a warning


class Exporter:
    """Exports one loaded model; `arguments` are those of the command line."""

    def __init__(self, arguments, loaded, examples=None):
        loaded = renamed(loaded, arguments.input_names, arguments.output_names, arguments.batch)
        self.arguments, self.loaded = arguments, loaded
        first = 0 if arguments.batch == UNBATCHED else 1
        self.free = free_axes(loaded.inputs, parse_free(arguments.free), first)
        self.batches = (arguments.batch,) if arguments.batch else BATCHES
        self.size = max(self.batches)
        self.classes = output_kind(loaded.config, loaded.form) != "numbers"
        self.examples, self.no_examples = (examples, None) if examples else self.load_examples()
        self.reference = Reference(loaded)
        self.cases = {
            kind: (inputs, self.reference.outputs(inputs)) for kind, inputs in self.inputs().items()
        }
        self.cases |= self.other_sizes()
        self.before = self.scores(self.reference) if arguments.quantize else None

    def load_examples(self):
        """(the config's data, None), or (None, why it cannot be loaded)."""
        is_int8 = self.arguments.quantize == "int8"
        int8_needs = "--quantize int8: takes its ranges from training data"
        try:
            examples = Examples(self.loaded)
        except (UserError, RunError) as error:
            if is_int8:
                raise UserError(f"{int8_needs}, which cannot be loaded: {error}") from error
            print(
                f"Verified on random inputs only, no data can be loaded: {error}", file=sys.stderr
            )
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
        inputs = {"random": random_inputs(self.loaded, self.size)}
        if self.examples:
            inputs["real"] = repeated(self.examples.first(self.size), self.size)
        return inputs

    def other_sizes(self):
        """{kind: (random inputs with other free sizes, JAX's outputs)}"""
        cases = {}
        for sizes, shapes in tried_shapes(self.loaded.inputs, self.free):
            text = " ".join(f"{name} {size}" for name, size in sizes.items())
            inputs = random_inputs(self.loaded._replace(inputs=shapes), self.size)
            try:
                cases[f"random, {text}"] = (inputs, self.reference.outputs(inputs))
            except Exception as error:  # the model may be the user's own
                raise UserError(
                    f"--free: the model itself fails with {text}: {describe(error)}; give the "
                    "sizes that it takes, as in --free 1:length:8-512, or leave out --free"
                ) from error
        return cases

    def reports(self, stem):
        """Write <stem>.<format> for each format; returns ({format: report}, {format: error})."""
        reports, failures = {}, {}
        for name in self.arguments.formats:
            path = stem.with_name(f"{stem.name}.{name}")
            try:
                reports[name] = self.report(name, path)
            except Exception as error:  # converters raise many kinds
                for file in path.parent.glob(f"{path.name}*"):
                    file.unlink()
                failures[name] = f"{name}: {error}"
                if not isinstance(error, UserError | RunError):
                    traceback.print_exc()
        return reports, failures

    def report(self, format, path):
        """Write and verify one file; returns its report."""
        start, precision = time.perf_counter(), self.arguments.quantize
        report = {"precision": precision or "float32"} | self.write(format, path)
        sizes = size_names(self.traced)
        add_metadata(path, self.facts(path.stem) | {"sizes": sizes})
        if self.free:
            report["sizes"] = sizes
        if precision:
            # The ranges of int8 come from real inputs; random inputs would be clipped to them.
            judged = ("real",) if precision == "int8" else ("random", "real")
            report |= self.verified(path, TOLERANCE[precision], judged)
        else:
            report |= self.verified(path, self.tolerance)
        if self.before:
            report["test_set"] = {"before": self.before, "after": self.scores(open_model(path))}
        return report | {"seconds": round(time.perf_counter() - start, 2)}

    def facts(self, title):
        """What a file says about itself."""
        checkpoint = self.arguments.weights
        source = Path(checkpoint).name if checkpoint else None
        title = self.loaded.config.get("title") or title
        return facts_of(self.loaded, title, source, checkpoint and commit_of(checkpoint))

    def verified(self, path, tolerance, judged=("random", "real")):
        """The report about a file that computes what JAX computes."""
        return verify(path, self.cases, tolerance, self.batches, judged, self.classes)

    @property
    def tolerance(self):
        """The largest relative error of a file that is not quantized."""
        return TOLERANCE[self.traced.precision]

    @cached_property
    def traced(self):
        return trace(*self.trace_arguments)

    @property
    def trace_arguments(self):
        loaded = self.loaded
        inputs = free_shapes(loaded.inputs, self.free)
        return loaded.function, loaded.weights, inputs, self.arguments.batch

    def write(self, format, path):
        """Write one file; returns {"route": ..., "lacked": the op that the native route lacks}."""
        if format == "stablehlo":
            write_stablehlo(*self.trace_arguments, path)
            return {"route": "jax"}
        route, lacked = self.arguments.route, {}
        if route != "jax2tf":
            try:
                self.write_in_precision(format, path, partial(self.native, format))
                return {"route": "native"}
            except Missing as error:
                message = f"the native route has no op for {error}"
                if route == "native":
                    raise UserError(f"{message}; add one, or remove --route native") from error
                print(f"{format}: {message}; using jax2tf instead", file=sys.stderr)
                lacked = {"lacked": str(error)}
        self.write_in_precision(format, path, partial(self.by_jax2tf, format))
        return {"route": "jax2tf"} | lacked

    def write_in_precision(self, format, path, write):
        """Write a file; a quantized one only after its float32 version has been verified."""
        precision = self.arguments.quantize
        if not precision:
            return write(path)
        with tempfile.TemporaryDirectory() as folder:
            float32_path = Path(folder) / path.name
            write(float32_path)
            self.verified(float32_path, self.tolerance)
            if format == "tflite":
                return write(path, quantize=precision, samples=self.samples)
            from inference.quantize_onnx import quantize_onnx

            quantize_onnx(float32_path, path, precision, self.samples, self.arguments.exclude)

    def native(self, format, path, **quantization):
        """Write a file with this project's own tables of ops."""
        if format == "tflite":
            needed("tensorflow", "ai_edge_litert")
            from inference.to_tflite import write_tflite

            write_tflite(self.traced, path, **quantization)
        else:
            needed("onnx", "onnxruntime")
            from inference.to_onnx import write_onnx

            write_onnx(self.traced, path, self.arguments.opset)

    def by_jax2tf(self, format, path, **quantization):
        """Write a file by the jax2tf route, which has other primitives and makes larger graphs."""
        needed("tensorflow", "tf2onnx", "onnx", "onnxruntime", "ai_edge_litert")
        from inference.fallback.convert import onnx_by_jax2tf, tflite_by_jax2tf

        if format == "tflite":
            tflite_by_jax2tf(*self.trace_arguments, path, **quantization)
        else:
            onnx_by_jax2tf(*self.trace_arguments, path, opset=self.arguments.opset)

    @cached_property
    def samples(self):
        """Training inputs that calibrate int8, in batches; None for other precisions."""
        if self.arguments.quantize != "int8":
            return None
        inputs, size = self.examples.spread(self.arguments.samples), self.arguments.batch or 1
        if size == UNBATCHED:
            return [inputs]
        count = len(next(iter(inputs.values())))
        return [repeated(take(inputs, start, size), size) for start in range(0, count, size)]

    def scores(self, model):
        """{metric: value} on the test set; None without a test set or a metric of such outputs."""
        if not self.examples or self.examples.test_set is None:
            return None
        outputs, targets = [], []
        for inputs, target in self.examples.test_batches(self.size):
            results = list(run_in_batches(model, inputs, self.size).values())
            if len(results) != 1:
                return None
            outputs += results
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
