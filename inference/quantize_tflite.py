"""Quantize TFLite files with TensorFlow's tools.

TensorFlow's converter has no option that keeps some weights in float32. So the ops that read such
weights have names that contain KEPT: in int8, the quantizer leaves out ops by their names; in other
precisions, these ops get the weights of the float32 file.
"""

import copy
from pathlib import Path
from typing import Any

from inference.packages import Flat, read_tflite, tflite_bytes
from inference.quantize_onnx import LARGE
from utils import RunError, UserError

CONVOLUTIONS = {"CONV_2D", "DEPTHWISE_CONV_2D", "CONV_3D", "TRANSPOSE_CONV", "CONV_3D_TRANSPOSE"}
PRODUCTS = CONVOLUTIONS | {"FULLY_CONNECTED", "BATCH_MATMUL"}  # the ops that int8 quantizes
KEPT = "stays_in_float32"  # in the names of these ops


def is_kept(graph: Flat, op: Flat) -> bool:
    """Whether an op reads weights that stay in float32. An op that computes an output of the model
    has the name of the output instead, so there the names of its weights decide."""
    named = list(op.outputs)
    if not set(named).isdisjoint(graph.outputs):
        computed = {*graph.inputs, *(i for each in graph.operators for i in each.outputs)}
        named += [i for i in op.inputs if i >= 0 and i not in computed]
    return any(KEPT in graph.tensors[i].name.decode() for i in named)


def check_kept(model: Flat) -> None:
    """Raise if no op has such a name: the converter has made other ops of it."""
    if not any(is_kept(graph, op) for graph in model.subgraphs for op in graph.operators):
        raise UserError(
            "--exclude: TensorFlow's converter has merged the ops of these weights with others; "
            "exclude the layers before or after them too, or use --formats onnx"
        )


def restored(quantized: bytes, original: bytes) -> bytes:
    """The bytes of a file in dynamic or float16 precision whose ops named KEPT have the weights of
    the `original`, the file of the same graph in float32."""
    model, source = map(read_tflite, (quantized, original))
    check_kept(source)
    for graph, from_graph in zip(model.subgraphs, source.subgraphs, strict=True):
        moved = {}  # {tensor in the original: the same tensor here}
        for op, from_op in same_ops(model, graph, source, from_graph):
            if is_kept(from_graph, from_op):
                in_float32(model, graph, op)
                take_weights(op, from_op, (model, graph), (source, from_graph), moved)
        drop_unread(model, graph)
    used = {tensor.buffer for graph in model.subgraphs for tensor in graph.tensors}
    used |= {entry.buffer for entry in model.metadata or []}
    for index in set(range(len(model.buffers))) - used:
        model.buffers[index].data = None
    return tflite_bytes(model)


def kind_of(model: Flat, op: Flat) -> str:
    from tensorflow.lite.tools import flatbuffer_utils

    return str(flatbuffer_utils.opcode_to_name(model, op.opcodeIndex))


def same_ops(model: Flat, graph: Flat, source: Flat, from_graph: Flat) -> list[tuple[Flat, Flat]]:
    """Pairs of the ops of two files of one graph, which differ in DEQUANTIZE alone."""
    ops, from_ops = (
        [op for op in each.operators if kind_of(file, op) != "DEQUANTIZE"]
        for file, each in ((model, graph), (source, from_graph))
    )
    if [kind_of(model, op) for op in ops] != [kind_of(source, op) for op in from_ops]:
        raise UserError(
            "--exclude: TensorFlow's converter makes another graph in this precision; "
            "use --formats onnx"
        )
    return list(zip(ops, from_ops, strict=True))


def in_float32(model: Flat, graph: Flat, op: Flat) -> None:
    """Have an op, as a GATHER of rows, compute what a DEQUANTIZE of its result computes."""
    for after in graph.operators:
        if kind_of(model, after) == "DEQUANTIZE" and after.inputs[0] in op.outputs:
            op.outputs = after.outputs
            graph.operators.remove(after)
            return


def take_weights(
    op: Flat, from_op: Flat, to: tuple[Flat, Flat], source: tuple[Flat, Flat], moved: dict[int, int]
) -> None:
    """Replace the constant inputs of an op by those of the same op in the source."""
    (model, graph), (from_model, from_graph) = to, source
    inputs = list(op.inputs)
    for place, index in enumerate(from_op.inputs):
        data = from_model.buffers[from_graph.tensors[index].buffer].data if index >= 0 else None
        if data is None:
            continue
        if index not in moved:
            tensor = copy.copy(from_graph.tensors[index])
            model.buffers.append(copy.copy(from_model.buffers[tensor.buffer]))
            tensor.buffer = len(model.buffers) - 1
            moved[index] = len(graph.tensors)
            graph.tensors.append(tensor)
        inputs[place] = moved[index]
    op.inputs = inputs


def drop_unread(model: Flat, graph: Flat) -> None:
    """Remove each DEQUANTIZE whose result nothing reads, and unread constants."""
    used = read_by(graph)
    graph.operators = [
        op
        for op in graph.operators
        if kind_of(model, op) != "DEQUANTIZE" or not used.isdisjoint(op.outputs)
    ]
    used = read_by(graph)
    for index, tensor in enumerate(graph.tensors):
        if index not in used and model.buffers[tensor.buffer].data is not None:
            tensor.buffer = 0  # the empty one


def read_by(graph: Flat) -> set[int]:
    """The tensors that the ops of a graph read, or that it returns."""
    return {i for op in graph.operators for i in op.inputs} | {*graph.outputs}


def in_int8(calibrated: bytes, keeps: bool = False) -> bytes:
    """A calibrated file with the convolutions and products in int8, except those that would lose
    accuracy, or have a name of KEPT. Inputs and outputs stay in float."""
    from tensorflow.lite.python.convert import mlir_quantize

    kinds, nodes = left_in_float(calibrated, keeps)
    try:
        data: Any = mlir_quantize(calibrated, denylisted_ops=kinds, denylisted_nodes=nodes)
    except Exception as error:
        raise RunError(f"TensorFlow's quantizer rejects the model: {reason(error)}") from error
    return data


def left_in_float(data: bytes, keeps: bool = False) -> tuple[list[str], list[str]]:
    """What int8 leaves in float: the kinds of ops without weights, names of some ops with weights.

    - A reshape or a sum in int8 would round its numbers to 256 steps, and a normalization magnifies
      those steps.
    - So would a convolution of the input itself, where most of an image is background. With both in
      int8, a vit after 20 steps is off by 0.50 of its output's scale, without them by 0.08.
    - Products of two computed arrays, as in attention: int8 does not make the file smaller, and a
      vit takes 3 times as long.
    """
    model = read_tflite(data)
    if keeps:
        check_kept(model)
    kinds, names = set(), []
    for graph in model.subgraphs:
        computed = set(graph.inputs)
        mixed = set()  # the tensors computed through a convolution or a product
        for op in graph.operators:
            kind = kind_of(model, op)
            outputs = [graph.tensors[i].name.decode() for i in op.outputs]
            if is_kept(graph, op) and kind in PRODUCTS | {"GATHER"}:
                names += outputs
            elif kind == "GATHER":  # the rows of a constant table are as good in int8
                names += outputs if op.inputs[0] in computed else []
            elif kind not in PRODUCTS:
                kinds.add(kind)
            elif computed.issuperset(op.inputs[:2]) or (
                kind in CONVOLUTIONS and mixed.isdisjoint(op.inputs)
            ):
                names += outputs
            computed.update(op.outputs)
            if kind in PRODUCTS or not mixed.isdisjoint(op.inputs):
                mixed.update(op.outputs)
    return sorted(kinds), names


def reason(error: Exception) -> str:
    """The line of the converter's long message that names the ops it cannot write."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    op_lines = [line for line in lines if line.startswith(("TF Select ops:", "Custom ops:"))]
    return (op_lines or lines or [type(error).__name__])[0]


def float32_weights(path: Path) -> dict[str, int]:
    """{name: bytes} of the large float32 weights in a file. A weight has the name of the op that
    reads it, followed by its shape."""
    from tensorflow.lite.python import schema_py_generated as schema

    model, weights = read_tflite(path.read_bytes()), {}
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            data = model.buffers[tensor.buffer].data
            is_float32 = tensor.type == schema.TensorType.FLOAT32
            if is_float32 and data is not None and len(data) >= 4 * LARGE:
                name = f"{tensor.name.decode()} {[int(d) for d in tensor.shape]}"
                weights[name] = weights.get(name, 0) + len(data)
    return weights
