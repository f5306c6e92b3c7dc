"""Writes the files of one checkpoint, each by the route that can, and verifies them."""

import sys
import time
import traceback

from inference.load import Examples
from inference.lowering.trace import trace
from inference.lowering.walk import Missing
from inference.packages import needed
from inference.runtimes import open_model
from inference.verify import BATCHES, Reference, in_batches, part, random_inputs, repeated, scores, verify
from utils import RunError, UserError


class Exporter:
    """`arguments` are those of the command; what is asked of JAX is asked once."""

    def __init__(self, arguments, shipped):
        self.arguments, self.shipped = arguments, shipped
        self.precision = arguments.quantize or "float32"
        self.batches = (arguments.batch,) if arguments.batch else BATCHES
        self.size = max(self.batches)
        self.examples = self.real_examples()
        self.reference = Reference(shipped, self.size)
        self.questions = {kind: (inputs, self.reference(inputs)) for kind, inputs in self.inputs().items()}
        self.before = self.scores(self.reference) if arguments.quantize else None

    def real_examples(self):
        """The config's data, where it can be had."""
        try:
            return Examples(self.shipped)
        except (UserError, RunError) as error:
            if self.arguments.quantize == "int8":
                raise UserError(f"--quantize int8: takes its ranges from training data, which cannot be had: {error}") from error
            print(f"Verified on random inputs alone, since the data cannot be had: {error}", file=sys.stderr)
            return None

    def inputs(self):
        """{kind: a batch of inputs to verify on}"""
        real = {"real": repeated(self.examples.test(self.size)[0], self.size)} if self.examples else {}
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
        start = time.perf_counter()
        report = {"precision": self.precision} | self.write(each, path)
        report |= verify(path, self.questions, self.precision, self.batches)
        if self.before:
            report["test_set"] = {"before": self.before, "after": self.scores(open_model(path))}
        return report | {"seconds": round(time.perf_counter() - start, 2)}

    def write(self, each, path):
        """Write one file by the route that can: {"route", and what the native one lacked, if anything}."""
        route = self.arguments.route
        if route != "jax2tf":
            try:
                self.native(each, path)
                return {"route": "native"}
            except Missing as error:
                if route == "native":
                    raise UserError(f"the table has no op for {error}; add one, or leave out --route native") from error
                print(f"{each}: the table has no op for {error}; going by jax2tf instead", file=sys.stderr)
                lacked = {"lacked": str(error)}
        else:
            lacked = {}
        self.by_jax2tf(each, path)
        return {"route": "jax2tf"} | lacked

    def native(self, each, path):
        """Write a file from our own tables."""
        traced = trace(*self.traced())
        if each == "tflite":
            needed("tensorflow", "ai_edge_litert")
            from inference.to_tflite import write_tflite

            write_tflite(traced, path, quantize=self.arguments.quantize, samples=self.samples())
        else:
            needed("onnx", "onnxruntime")
            from inference.to_onnx import write_onnx

            self.quantized(path, lambda file: write_onnx(traced, file, self.arguments.opset))

    def by_jax2tf(self, each, path):
        """Write a file the old way, which knows more primitives and makes larger graphs."""
        needed("tensorflow", "tf2onnx", "onnx", "onnxruntime", "ai_edge_litert")
        from inference.fallback.convert import onnx_by_jax2tf, tflite_by_jax2tf

        if each == "tflite":
            tflite_by_jax2tf(*self.traced(), path, quantize=self.arguments.quantize, samples=self.samples())
        else:
            self.quantized(path, lambda file: onnx_by_jax2tf(*self.traced(), file, opset=self.arguments.opset))

    def traced(self):
        """What there is to trace."""
        return self.shipped.function, self.shipped.weights, self.shipped.inputs, self.arguments.batch

    def quantized(self, path, write):
        """Write an ONNX file in the precision that is asked for."""
        if not self.arguments.quantize:
            return write(path)
        from inference.quantize_onnx import quantize_onnx

        whole = path.with_name("float32.onnx")
        try:
            write(whole)
            quantize_onnx(whole, path, self.arguments.quantize, self.samples())
        finally:
            whole.unlink(missing_ok=True)

    def samples(self):
        """Training examples as the function takes them, where int8 needs them."""
        if self.arguments.quantize != "int8":
            return None
        inputs, size = self.examples.spread(self.arguments.samples)[0], self.arguments.batch or 1
        count = len(next(iter(inputs.values())))
        return [repeated(part(inputs, start, size), size) for start in range(0, count, size)]

    def scores(self, model):
        """{metric: value} on the test set; None where the data has none, or the output is a tree."""
        if not self.examples or "test" not in self.examples.sets or list(self.questions["random"][1]) != ["output"]:
            return None
        inputs, targets = self.examples.test()
        return scores(self.shipped, inputs, targets, lambda x: in_batches(model, x, self.size))
