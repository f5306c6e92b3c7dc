"""Writes the files of one checkpoint, each by the route that can, and verifies them."""

import sys
import tempfile
import time
import traceback
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from inference.examples import Examples
from inference.lowering.trace import trace
from inference.lowering.walk import Missing
from inference.packages import needed
from inference.runtimes import open_model
from inference.verify import (
    BATCHES,
    TOLERANCE,
    Reference,
    in_batches,
    part,
    random_inputs,
    repeated,
    scores,
    verify,
)
from utils import RunError, UserError

MOST_LOST = 0.005  # of the accuracy, before quantization is warned of


class Exporter:
    """`arguments` are those of the command; what is asked of JAX is asked once."""

    def __init__(self, arguments, shipped):
        self.arguments, self.shipped = arguments, shipped
        self.batches = (arguments.batch,) if arguments.batch else BATCHES
        self.size = max(self.batches)
        self.examples, self.no_examples = self.real_examples()
        self.reference = Reference(shipped)
        self.questions = {
            kind: (inputs, self.reference.answers(inputs)) for kind, inputs in self.inputs().items()
        }
        self.before = self.scores(self.reference) if arguments.quantize else None

    def real_examples(self):
        """(the config's data, None), or (None, why it cannot be had)."""
        is_int8 = self.arguments.quantize == "int8"
        try:
            examples = Examples(self.shipped)
        except (UserError, RunError) as error:
            if is_int8:
                raise UserError(
                    f"--quantize int8: takes its ranges from training data, which cannot be had: {error}"
                ) from error
            print(
                f"Verified on random inputs alone, since there is no data for it: {error}",
                file=sys.stderr,
            )
            return None, str(error)
        if self.arguments.quantize and examples.other_than_trained_on():
            message = f"the data, {examples.source}, is not what the checkpoint was trained on; name it, as in data.args.dir=..."
            if is_int8:
                raise UserError(
                    f"--quantize int8: takes its ranges from training data, but {message}"
                )
            print(f"Scored on other data: {message}", file=sys.stderr)
        return examples, None

    def inputs(self):
        """{kind: a batch of inputs to verify on}"""
        real = (
            {"real": repeated(self.examples.first(self.size), self.size)} if self.examples else {}
        )
        return {"random": random_inputs(self.shipped, self.size)} | real

    def reports(self, stem):
        """({format: report}, {format: why there is none}) of the files <stem>.<format>."""
        reports, wrong = {}, {}
        for each in self.arguments.formats:
            path = stem.with_name(f"{stem.name}.{each}")
            try:
                reports[each] = self.report(each, path)
            except Exception as error:  # of many kinds, where a converter fails
                path.unlink(missing_ok=True)
                wrong[each] = f"{each}: {error}"
                if not isinstance(error, UserError | RunError):
                    traceback.print_exc()
        return reports, wrong

    def report(self, each, path):
        """Write one file, and tell what it is worth."""
        start, precision = time.perf_counter(), self.arguments.quantize
        report = {"precision": precision or "float32"} | self.write(each, path)
        if precision:  # int8 has its ranges from real inputs, and others would be cut to them
            judged = ("real",) if precision == "int8" else ("random", "real")
            report |= verify(path, self.questions, TOLERANCE[precision], self.batches, judged)
        else:
            report |= verify(path, self.questions, self.tolerance, self.batches)
        if self.before:
            report["test_set"] = {"before": self.before, "after": self.scores(open_model(path))}
        return report | {"seconds": round(time.perf_counter() - start, 2)}

    @property
    def tolerance(self):
        """How far a file that is not quantized may be off."""
        return TOLERANCE[self.traced.precision]

    @cached_property
    def traced(self):
        return trace(*self.function)

    @property
    def function(self):
        """What there is to trace."""
        return (
            self.shipped.function,
            self.shipped.weights,
            self.shipped.inputs,
            self.arguments.batch,
        )

    def write(self, each, path):
        """Write one file by the route that can: {"route", and what the native one lacked, if anything}."""
        route, lacked = self.arguments.route, {}
        if route != "jax2tf":
            try:
                self.in_precision(each, path, partial(self.native, each))
                return {"route": "native"}
            except Missing as error:
                if route == "native":
                    raise UserError(
                        f"the table has no op for {error}; add one, or leave out --route native"
                    ) from error
                print(
                    f"{each}: the table has no op for {error}; going by jax2tf instead",
                    file=sys.stderr,
                )
                lacked = {"lacked": str(error)}
        self.in_precision(each, path, partial(self.by_jax2tf, each))
        return {"route": "jax2tf"} | lacked

    def in_precision(self, each, path, write):
        """Write a file; a quantized one only where the same in float32 computes what JAX does."""
        precision = self.arguments.quantize
        if not precision:
            return write(path)
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder) / path.name
            write(whole)
            verify(whole, self.questions, self.tolerance, self.batches)
            if each == "tflite":
                return write(path, quantize=precision, samples=self.samples)
            from inference.quantize_onnx import quantize_onnx

            quantize_onnx(whole, path, precision, self.samples)

    def native(self, each, path, **quantized):
        """Write a file from our own tables."""
        if each == "tflite":
            needed("tensorflow", "ai_edge_litert")
            from inference.to_tflite import write_tflite

            write_tflite(self.traced, path, **quantized)
        else:
            needed("onnx", "onnxruntime")
            from inference.to_onnx import write_onnx

            write_onnx(self.traced, path, self.arguments.opset)

    def by_jax2tf(self, each, path, **quantized):
        """Write a file the old way, which knows other primitives and makes larger graphs."""
        needed("tensorflow", "tf2onnx", "onnx", "onnxruntime", "ai_edge_litert")
        from inference.fallback.convert import onnx_by_jax2tf, tflite_by_jax2tf

        if each == "tflite":
            tflite_by_jax2tf(*self.function, path, **quantized)
        else:
            onnx_by_jax2tf(*self.function, path, opset=self.arguments.opset)

    @cached_property
    def samples(self):
        """Training examples as the function takes them, where int8 needs them."""
        if self.arguments.quantize != "int8":
            return None
        inputs, size = self.examples.spread(self.arguments.samples), self.arguments.batch or 1
        count = len(next(iter(inputs.values())))
        return [repeated(part(inputs, start, size), size) for start in range(0, count, size)]

    def scores(self, model):
        """{metric: value} on the test set; None where the data has none, or the config has no score of such outputs."""
        if not self.examples or self.examples.tested is None:
            return None
        outputs, targets = [], []
        for inputs, target in self.examples.tests(self.size):
            outputs.append(in_batches(model, inputs, self.size)["output"])
            targets.append(target)
        try:
            return scores(self.shipped, np.concatenate(outputs), np.concatenate(targets))
        except (UserError, ValueError, TypeError) as error:
            print(f"No score on the test set: {error}", file=sys.stderr)
            return None

    def warnings(self, reports):
        """What to look at twice before shipping it."""
        for each, report in reports.items():
            scored = report.get("test_set")
            lost = (
                scored["before"].get("accuracy", 0) - scored["after"].get("accuracy", 0)
                if scored
                else 0
            )
            if lost > MOST_LOST:
                yield f"Beware: {each} in {report['precision']} loses {100 * lost:.1f} points of accuracy"
