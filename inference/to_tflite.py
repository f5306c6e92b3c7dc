"""Write a traced function as a TFLite file of builtin ops, through TensorFlow's converter.

Several files become one with a signature for each, which share their weights.
"""

import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.child import locally
from inference.metadata import add_metadata
from inference.packages import Flat, import_tensorflow, needed, quiet, read_tflite, tflite_bytes
from inference.quantize_onnx import excluded_names
from inference.quantize_tflite import in_int8, reason, restored
from utils import RunError, UserError
from utils.files import atomic_write

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

    from inference.lowering.trace import Traced
    from inference.runtimes import Arrays


def write_tflite(
    traced: "Traced",
    path: Path,
    *,
    quantize: str | None = None,
    samples: "list[Arrays] | None" = None,
    exclude: Sequence[str] = (),
    call: Callable[..., Any] = locally,
) -> None:
    """Write the file; `quantize` is None, float16, dynamic or int8.

    int8 is calibrated with `samples`, a list of {input: array}. Weights whose names match one of
    the regexes in `exclude` stay float32. The converter runs where `call` runs it, as that of a
    `Child`, which imports this module and needs no JAX.
    """
    needed("tensorflow")
    with tempfile.TemporaryDirectory() as folder:
        with quiet():
            import_tensorflow()
            check_types(traced)
            kept = excluded_names(traced.weights, exclude)
            save(*as_tensorflow(traced, quantize != "int8", kept), folder)
        data = converted(folder, quantize, samples, call, bool(kept))
    data = call("naming the tensors", in_order, data, [*traced.inputs], [*traced.outputs])
    atomic_write(path, data)


def check_types(traced: "Traced") -> None:
    from inference.lowering.tf_ops.target import TYPES

    for name, aval in [*traced.inputs.items(), *traced.outputs.items()]:
        if str(aval.dtype) not in TYPES:
            raise UserError(
                f"{name}: TFLite's ops do not take {aval.dtype}; convert it in the model to one of "
                f"{', '.join(sorted(TYPES))}"
            )


def as_tensorflow(
    traced: "Traced", products: bool, kept: Collection[str] = ()
) -> "tuple[tf.types.experimental.ConcreteFunction, tf.Module]":
    """The traced function as a TensorFlow function with the same names, and the module it needs;
    see `TfTarget` for `products` and `kept`."""
    import tensorflow as tf

    from inference.lowering.tf_ops import LAYERS, PRIMITIVES
    from inference.lowering.tf_ops.target import TfTarget
    from inference.lowering.walk import Walk, located

    def run(*tensors: "tf.Tensor") -> "dict[str, tf.Tensor]":
        inputs = dict(zip(traced.inputs, tensors, strict=True))
        target = TfTarget(LAYERS, PRIMITIVES, traced.inputs, inputs, products, kept)
        with located(walk := Walk(target)):
            results = walk.outputs(traced, inputs)
            return {name: tf.identity(target.whole(value)) for name, value in results.items()}

    specs = [
        tf.TensorSpec(free(aval.shape), aval.dtype, name=name)
        for name, aval in traced.inputs.items()
    ]
    return tf.function(run, autograph=False).get_concrete_function(*specs), tf.Module()


def free(shape: Iterable[Any]) -> list[int | None]:
    """A shape whose free dimensions are None."""
    return [d if isinstance(d, int) else None for d in shape]


def save(
    function: "tf.types.experimental.ConcreteFunction", owner: "tf.Module", folder: str
) -> None:
    """Write a TensorFlow function as a SavedModel."""
    import tensorflow as tf

    options = tf.saved_model.SaveOptions(save_debug_info=True)  # for the converter's errors
    tf.saved_model.save(owner, folder, {"serving_default": function}, options)


def converted(
    folder: str,
    quantize: str | None,
    samples: "list[Arrays] | None",
    call: Callable[..., Any] = locally,
    keeps: bool = False,
) -> bytes:
    """The bytes of the file of a SavedModel; `keeps`: some of its ops stay float32 (KEPT)."""
    if quantize != "int8":
        step = f"converting to TFLite{f' in {quantize}' if quantize else ''}"
        data = call(step, convert, folder, quantize)
        if not keeps:
            return data
        original = call("converting to TFLite", convert, folder, None)
        return call("restoring the excluded weights", restored, data, original)
    if not samples:
        raise UserError("int8 needs samples of real inputs, which show how large its numbers are")
    data = call(f"measuring {len(samples)} samples for int8", convert, folder, quantize, samples)
    return call("quantizing to int8", in_int8, data, keeps)


def convert(folder: str, quantize: str | None, samples: "list[Arrays] | None" = None) -> bytes:
    """The bytes of a file of builtin TFLite ops only; for int8, those of the calibrated model."""
    import tensorflow as tf

    converter = tf.lite.TFLiteConverter.from_saved_model(folder)
    if quantize:
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if quantize == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if quantize == "int8":
        converter.representative_dataset = lambda: samples
        # Quantize in a second step, since only that can leave ops out.
        converter._experimental_calibrate_only = True
    try:
        # TensorFlow warns about its own interpreter, which it calibrates with.
        with warnings.catch_warnings(action="ignore"):
            return converter.convert()
    except Exception as error:  # the converter raises many kinds
        raise RunError(f"TensorFlow's converter rejects the model: {reason(error)}") from error


def in_order(data: bytes, inputs: list[str], outputs: list[str]) -> bytes:
    """A file with its inputs and outputs in this order, which TensorFlow sorts by name, and with
    their names for the tensors as well, since not every program reads signatures."""
    model = read_tflite(data)
    (signature,) = model.signatureDefs
    graph = model.subgraphs[signature.subgraphIndex]
    for kind, names in (("outputs", outputs), ("inputs", inputs)):
        by_name = {tensor.name.decode(): tensor for tensor in getattr(signature, kind)}
        tensors = [by_name[name] for name in names]
        setattr(signature, kind, tensors)
        setattr(graph, kind, [tensor.tensorIndex for tensor in tensors])
        for tensor in tensors:
            graph.tensors[tensor.tensorIndex].name = tensor.name
    return tflite_bytes(model)


def write_merged(
    path: Path,
    files: dict[str, Path],
    inputs: "dict[str, Arrays]",
    facts: dict[str, Any],
    call: Callable[..., Any],
) -> None:
    """Write several TFLite files, {signature: path}, as one file with these metadata. `call` runs
    `check_signatures`, which compares it with them on the `inputs`, in another process."""
    path.write_bytes(merged({name: file.read_bytes() for name, file in files.items()}))
    add_metadata(path, facts)
    call("comparing the signatures", check_signatures, path, files, inputs)


def merged(files: dict[str, bytes]) -> bytes:
    """The bytes of one TFLite file with the graphs of several, {signature: bytes of a file}."""
    models = list(map(read_tflite, files.values()))
    whole = read_tflite(next(iter(files.values())))
    empty = next(buffer for buffer in whole.buffers if buffer.data is None)
    whole.subgraphs, whole.signatureDefs, whole.metadata = [], [], []
    whole.operatorCodes, whole.buffers = [], [empty]
    buffers, codes = {b"": 0}, {}  # {content: index in the file}
    for name, model in zip(files, models, strict=True):
        first = len(whole.subgraphs)
        new_codes = [
            index_of(code, str(sorted(vars(code).items())), codes, whole.operatorCodes)
            for code in model.operatorCodes
        ]
        for number, graph in enumerate(model.subgraphs):
            graph.name = name if number == 0 else f"{name}/{number}"
            for tensor in graph.tensors:
                buffer = model.buffers[tensor.buffer]
                tensor.buffer = index_of(buffer, content(buffer), buffers, whole.buffers)
            for op in graph.operators:
                op.opcodeIndex = new_codes[op.opcodeIndex]
                move_subgraphs(op.builtinOptions, first)
        (signature,) = model.signatureDefs
        signature.signatureKey, signature.subgraphIndex = name, signature.subgraphIndex + first
        whole.signatureDefs.append(signature)
        whole.subgraphs += model.subgraphs
    return tflite_bytes(whole)


def content(buffer: Flat) -> bytes:
    return b"" if buffer.data is None else bytes(buffer.data)


def index_of(item: Flat, key: str | bytes, indices: dict[Any, int], items: list[Flat]) -> int:
    """The index of an item in the file, to which it is added if none has its content."""
    if key not in indices:
        indices[key] = len(items)
        items.append(item)
    return indices[key]


def move_subgraphs(options: Flat, first: int) -> None:
    """Add `first` to the graphs that a loop or a branch calls."""
    for key, value in vars(options or object).items():
        if key.lower().endswith("subgraphindex"):
            setattr(options, key, value + first)


def check_signatures(path: Path, files: dict[str, Path], inputs: "dict[str, Arrays]") -> None:
    """Raise unless each signature computes bit for bit what its original file computes.

    `files` are {signature: path}, `inputs` {signature: {input: array}}.
    """
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter

    from inference.packages import quiet

    for name, file in files.items():
        with quiet():
            both = [
                Interpreter(str(each), num_threads=1).get_signature_runner(key)(**inputs[name])
                for each, key in ((path, name), (file, None))
            ]
        if any(
            not np.array_equal(*pair, equal_nan=True)
            for pair in zip(*map(ordered, both), strict=True)
        ):
            raise RunError(f"{path.name}: the signature {name} computes something else")


def ordered(outputs: "Arrays") -> "list[np.ndarray]":
    return [outputs[name] for name in sorted(outputs)]
