"""Exported files as callables: {input: array} -> {output: array}, one thread, batches of any size that the file allows."""

import importlib.util
import time
from pathlib import Path
from statistics import median

import numpy as np

from inference.packages import quiet
from utils import UserError, first_line

PACKAGES = {".onnx": "onnxruntime", ".tflite": "ai_edge_litert"}  # what runs a file


def open_model(path):
    """The model in a file, by its suffix."""
    path = Path(path)
    kind = path.suffix.lower()
    package = PACKAGES.get(kind)
    if package is None:
        raise UserError(f"{path}: ends neither in .onnx nor in .tflite")
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{path}: running it needs {package}: pip install -r inference/requirements.txt"
        )
    try:
        return OnnxModel(path) if kind == ".onnx" else LiteRTModel(path)
    except Exception as error:  # of many kinds, by what is wrong with the bytes
        raise UserError(f"{path}: cannot be read as {kind[1:]}: {first_line(error)}") from error


class OnnxModel:
    """A model run by ONNX Runtime; `inputs` and `outputs` are {name: (shape, dtype)}, a free size is None."""

    def __init__(self, path):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3  # its warnings are about what it could do better itself
        self.session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self.inputs = {
            x.name: (sizes(x.shape), onnx_type(x.type)) for x in self.session.get_inputs()
        }
        self.outputs = {
            x.name: (sizes(x.shape), onnx_type(x.type)) for x in self.session.get_outputs()
        }
        self.path = path

    def __call__(self, arrays):
        return dict(zip(self.outputs, self.session.run(list(self.outputs), arrays), strict=True))

    def nodes(self):
        """How many there are, as the file has them."""
        import onnx

        return count_nodes(onnx.load(self.path, load_external_data=False).graph)


class LiteRTModel:
    """A model run by LiteRT with its default delegate; `inputs` and `outputs` as above."""

    def __init__(self, path):
        from ai_edge_litert.interpreter import Interpreter

        self.interpreter = Interpreter(str(path), num_threads=1)
        signature = next(iter(self.interpreter.get_signature_list()), None)
        if signature:
            runner = self.interpreter.get_signature_runner(signature)
            given, made = runner.get_input_details(), runner.get_output_details()
        else:
            given = {detail["name"]: detail for detail in self.interpreter.get_input_details()}
            made = {detail["name"]: detail for detail in self.interpreter.get_output_details()}
        self.given = {
            name: detail["index"] for name, detail in given.items()
        }  # an output may have an input's name
        self.made = {name: detail["index"] for name, detail in made.items()}
        self.inputs = {
            name: (sizes(detail["shape_signature"]), detail["dtype"])
            for name, detail in given.items()
        }
        self.outputs = {
            name: (sizes(detail["shape_signature"]), detail["dtype"])
            for name, detail in made.items()
        }
        self.shapes = None
        self.path = path

    def __call__(self, arrays):
        shapes = {name: np.shape(array) for name, array in arrays.items()}
        if shapes != self.shapes:
            self.shapes = None  # until they are all taken
            for name, shape in shapes.items():
                self.interpreter.resize_tensor_input(self.given[name], shape)
            with quiet():  # it tells the terminal of its delegate
                self.interpreter.allocate_tensors()
            self.shapes = shapes
        for name, array in arrays.items():
            self.interpreter.set_tensor(self.given[name], array)
        self.interpreter.invoke()
        return {name: self.interpreter.get_tensor(index) for name, index in self.made.items()}

    def nodes(self):
        """How many there are, as the file has them: what the delegate took over is not counted twice."""
        return sum(op["op_name"] != "DELEGATE" for op in self.interpreter._get_ops_details())


def sizes(shape):
    """A shape in which a free size is None."""
    return tuple(
        int(d) if not isinstance(d, str) and d is not None and d >= 0 else None for d in shape
    )


def onnx_type(name):
    """tensor(float) -> float32"""
    inner = name.removeprefix("tensor(").removesuffix(")")
    return np.dtype({"float": "float32", "double": "float64"}.get(inner, inner)).type


def count_nodes(graph):
    """All nodes, those inside of loops and branches included."""
    inner = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    inner += [g for node in graph.node for a in node.attribute for g in a.graphs]
    return len(graph.node) + sum(map(count_nodes, inner))


def latency(model, arrays, seconds=0.3):
    """The median time of a call."""
    model(arrays)
    times, end = [], time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 1000):
        start = time.perf_counter()
        model(arrays)
        times.append(time.perf_counter() - start)
    return median(times)
