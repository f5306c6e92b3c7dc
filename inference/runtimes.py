"""Run exported files as functions {input: array} -> {output: array}, on one thread."""

import importlib.util
import operator
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

from inference.child import Child
from inference.packages import quiet
from inference.quantize_onnx import graphs
from utils import UserError, check_memory, first_line

Arrays = dict[str, np.ndarray]  # {input or output: array}
Specs = dict[
    str, tuple[tuple[int | None, ...], np.dtype]
]  # {name: (shape, dtype)}; a free size is None
# {suffix: package that runs it}
PACKAGES = {".onnx": "onnxruntime", ".tflite": "ai_edge_litert", ".stablehlo": "jax"}


class FileModel(Protocol):
    """A model in a file, as a function of its inputs; a free dimension is None."""

    path: Path
    inputs: Specs
    outputs: Specs

    def __call__(self, arrays: Arrays) -> Arrays: ...

    def nodes(self) -> int:
        """The number of nodes in the file."""
        ...


def open_model(path: str | Path, signature: str | None = None) -> FileModel:
    """The model in a file, by its suffix; `signature` names one of a TFLite file's signatures."""
    path = Path(path)
    suffix = path.suffix.lower()
    package = PACKAGES.get(suffix)
    if package is None:
        raise UserError(f"{path}: must end in .onnx, .tflite or .stablehlo")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    check_memory(path, path.stat().st_size)
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{path}: running it needs {package}: pip install -r inference/requirements.txt"
        )
    try:
        if signature:
            return LiteRTSignature(path, signature)  # pyright: ignore[reportReturnType]  # no nodes
        return MODELS[suffix](path)
    except Exception as error:  # damaged files raise many kinds
        raise UserError(f"{path}: cannot be read as {suffix[1:]}: {first_line(error)}") from error


class OnnxModel:
    """A model in ONNX Runtime; `inputs` and `outputs` are {name: (shape, dtype)}.

    A free dimension is None.
    """

    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3  # its warnings are about optimizations that it lacks
        self.session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self.inputs, self.outputs = (
            {x.name: (free_as_none(x.shape), onnx_type(x.type)) for x in infos}
            for infos in (self.session.get_inputs(), self.session.get_outputs())
        )
        self.path = path

    def __call__(self, arrays: Arrays) -> Arrays:
        results: list[Any] = list(self.session.run(list(self.outputs), arrays))
        return dict(zip(self.outputs, results, strict=True))

    def nodes(self) -> int:
        """The number of nodes in the file, also inside loops and branches."""
        import onnx

        graph = onnx.load(self.path, load_external_data=False).graph
        return sum(len(each.node) for each in graphs(graph))


class LiteRTModel:
    """A model in LiteRT with its default delegate; `inputs` and `outputs` as in OnnxModel."""

    def __init__(self, path: Path) -> None:
        from ai_edge_litert.interpreter import Interpreter

        self.interpreter = Interpreter(str(path), num_threads=1)
        signature = next(iter(self.interpreter.get_signature_list()), None)
        if signature:
            runner = self.interpreter.get_signature_runner(signature)
            inputs = in_order(runner.get_input_details(), self.interpreter.get_input_details())
            outputs = in_order(runner.get_output_details(), self.interpreter.get_output_details())
        else:
            inputs = {detail["name"]: detail for detail in self.interpreter.get_input_details()}
            outputs = {detail["name"]: detail for detail in self.interpreter.get_output_details()}
        # Two tables, since an output may have the name of an input.
        self.input_index, self.output_index = (
            {name: detail["index"] for name, detail in details.items()}
            for details in (inputs, outputs)
        )
        self.inputs, self.outputs = specs_of(inputs), specs_of(outputs)
        self.shapes = None
        self.path = path

    def __call__(self, arrays: Arrays) -> Arrays:
        shapes = {name: np.shape(array) for name, array in arrays.items()}
        if shapes != self.shapes:
            self.shapes = None  # until the interpreter has accepted all of them
            for name, shape in shapes.items():
                self.interpreter.resize_tensor_input(self.input_index[name], shape)
            with quiet():  # it prints the name of its delegate
                self.interpreter.allocate_tensors()
            self.shapes = shapes
        for name, array in arrays.items():
            self.interpreter.set_tensor(self.input_index[name], array)
        self.interpreter.invoke()
        return {
            name: self.interpreter.get_tensor(index) for name, index in self.output_index.items()
        }

    def nodes(self) -> int:
        """The number of nodes in the file, without the node that the delegate adds."""
        return sum(op["op_name"] != "DELEGATE" for op in self.interpreter._get_ops_details())


def in_order(
    by_name: dict[str, dict[str, Any]], details: list[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """{name: detail} of a signature, which LiteRT sorts, in the order of the file."""
    indices = [detail["index"] for detail in details]
    return dict(sorted(by_name.items(), key=lambda item: indices.index(item[1]["index"])))


def specs_of(details: dict[str, dict[str, Any]]) -> Specs:
    """The shapes and dtypes of the tensors that LiteRT describes."""
    return {
        name: (free_as_none(detail["shape_signature"]), np.dtype(detail["dtype"]))
        for name, detail in details.items()
    }


class LiteRTSignature:
    """A signature of several in LiteRT; `inputs` and `outputs` as in OnnxModel."""

    def __init__(self, path: Path, signature: str) -> None:
        from ai_edge_litert.interpreter import Interpreter

        self.path, self.started = path, False
        self.runner = Interpreter(str(path), num_threads=1).get_signature_runner(signature)
        self.inputs = specs_of(self.runner.get_input_details())
        self.outputs = specs_of(self.runner.get_output_details())

    def __call__(self, arrays: Arrays) -> Arrays:
        if self.started:
            return self.runner(**arrays)
        self.started = True
        with quiet():  # it prints the name of its delegate
            return self.runner(**arrays)


class StableHloModel:
    """A StableHLO file in JAX on the CPU; `inputs` and `outputs` as in OnnxModel."""

    def __init__(self, path: Path) -> None:
        # Imported here, since the other runtimes need no JAX.
        import jax.export

        from inference.lowering.trace import named

        self.exported = jax.export.deserialize(bytearray(path.read_bytes()))
        (inputs,), _ = jax.tree.unflatten(self.exported.in_tree, self.exported.in_avals)
        outputs = jax.tree.unflatten(self.exported.out_tree, self.exported.out_avals)
        self.structure = jax.tree.structure(inputs)
        leaves = named(inputs, "input"), named(outputs, "output", named(inputs, "input"))
        self.inputs, self.outputs = (
            {name: (free_as_none(leaf.shape), leaf.dtype) for name, leaf in side.items()}
            for side in leaves
        )
        self.call = jax.jit(self.exported.call)
        self.path = path

    def __call__(self, arrays: Arrays) -> Arrays:
        import jax

        inputs = jax.tree.unflatten(self.structure, [arrays[name] for name in self.inputs])
        with jax.default_device(jax.devices("cpu")[0]):
            leaves = jax.tree.leaves(self.call(inputs))
        return dict(zip(self.outputs, map(np.asarray, leaves), strict=True))

    def nodes(self) -> int:
        """The number of operations in the file."""
        module = module_of(self.exported.mlir_module_serialized)
        return len(re.findall(r'(?<== )"?(?:stablehlo|chlo)\.(?!constant)', module))


def module_of(data: bytes) -> str:
    """A serialized StableHLO module as text, with its large constants left out."""
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo

    with ir.Context() as context:
        stablehlo.register_dialect(context)
        module = stablehlo.deserialize_portable_artifact(context, data)
        return str(module.operation.get_asm(large_elements_limit=8))


MODELS = {".onnx": OnnxModel, ".tflite": LiteRTModel, ".stablehlo": StableHloModel}


def free_as_none(shape: Iterable[Any]) -> tuple[int | None, ...]:
    """A shape whose free dimensions are None."""
    return tuple(int(d) if isinstance(d, int | np.integer) and d >= 0 else None for d in shape)


def onnx_type(name: str) -> np.dtype:
    """tensor(float) -> float32"""
    inner = name.removeprefix("tensor(").removesuffix(")")
    return np.dtype({"float": "float32", "double": "float64"}.get(inner, inner))


class IsolatedModel:
    """A model in the process of a Child, which a runtime that crashes ends in place of this one;
    `inputs` and `outputs` as in OnnxModel."""

    def __init__(self, child: Child, path: Path) -> None:
        self.child, self.path = child, path
        self.kept = child.keep(f"opening {path.name}", open_model, path)
        self.inputs, self.outputs = self.apply(operator.attrgetter("inputs", "outputs"))

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(model, *args) in the process of the model."""
        return self.child.call(f"running {self.path.name}", function, self.kept, *args)

    def __call__(self, arrays: Arrays) -> Arrays:
        return self.apply(operator.call, arrays)

    def nodes(self) -> int:
        return self.apply(operator.methodcaller("nodes"))


def latency(model: FileModel, arrays: Arrays) -> float:
    """The median time of a call, measured in the process of the model."""
    is_isolated = isinstance(model, IsolatedModel)
    return model.apply(median_time, arrays) if is_isolated else median_time(model, arrays)


def median_time(model: FileModel, arrays: Arrays, seconds: float = 0.3) -> float:
    """The median time of a call."""
    model(arrays)
    times, end = [], time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 1000):
        start = time.perf_counter()
        model(arrays)
        times.append(time.perf_counter() - start)
    return median(times)
