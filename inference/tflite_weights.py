"""Weights that a quantized TFLite file keeps in float32, for which TensorFlow's converter has no
option: the names of the ops that read them contain KEPT. In int8 the quantizer leaves out ops by
their names; in other precisions these ops get the weights of the float32 file."""

import copy

from utils import UserError

KEPT = "stays_in_float32"  # in the names of these ops


def is_kept(graph, op):
    """Whether an op reads weights that stay in float32. An op that computes an output of the model
    has the name of the output instead, so there the names of its weights decide."""
    named = list(op.outputs)
    if not set(named).isdisjoint(graph.outputs):
        computed = {*graph.inputs, *(i for each in graph.operators for i in each.outputs)}
        named += [i for i in op.inputs if i >= 0 and i not in computed]
    return any(KEPT in graph.tensors[i].name.decode() for i in named)


def check_kept(model):
    """Raise if no op has such a name: the converter has made other ops of it."""
    if not any(is_kept(graph, op) for graph in model.subgraphs for op in graph.operators):
        raise UserError(
            "--exclude: TensorFlow's converter has merged the ops of these weights with others; "
            "exclude the layers before or after them too, or use --formats onnx"
        )


def restored(quantized, original):
    """The bytes of a file in dynamic or float16 precision whose ops named KEPT have the weights of
    the `original`, the file of the same graph in float32."""
    from tensorflow.lite.tools import flatbuffer_utils

    model, source = map(flatbuffer_utils.convert_bytearray_to_object, (quantized, original))
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
    return bytes(flatbuffer_utils.convert_object_to_bytearray(model))


def kind_of(model, op):
    from tensorflow.lite.tools import flatbuffer_utils

    return flatbuffer_utils.opcode_to_name(model, op.opcodeIndex)


def same_ops(model, graph, source, from_graph):
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


def in_float32(model, graph, op):
    """Have an op, as a GATHER of rows, compute what a DEQUANTIZE of its result computes."""
    for after in graph.operators:
        if kind_of(model, after) == "DEQUANTIZE" and after.inputs[0] in op.outputs:
            op.outputs = after.outputs
            graph.operators.remove(after)
            return


def take_weights(op, from_op, to, source, moved):
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


def drop_unread(model, graph):
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


def read_by(graph):
    """The tensors that the ops of a graph read, or that it returns."""
    return {i for op in graph.operators for i in op.inputs} | {*graph.outputs}
