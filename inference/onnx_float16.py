"""Turn a float32 ONNX model into float16, its loops and branches included.

Every tensor of float32 becomes float16, except the inputs and outputs of the model, the excluded
weights and what an op only takes in float32. Ops have the same result type as their operands, so
only constants, declared types and casts have to be changed.
"""

import numpy as np

from inference.onnx_graphs import excluded_nodes, graphs, sort_nodes

LIMIT = np.finfo(np.float16).max
SMALLEST = 1e-7  # a smaller number, such as the eps of a norm, would become 0
DTYPES = {"Cast": "to", "RandomNormal": "dtype", "RandomUniform": "dtype", "EyeLike": "dtype"}


def to_float16(model, exclude=()):
    """Change the model; the weights named in `exclude` stay float32, as the ops that read them."""
    from onnx import TensorProto, shape_inference

    types = shape_inference.infer_shapes(model)
    floats = {
        value.name
        for graph in graphs(types.graph)
        for value in (*graph.value_info, *graph.input, *graph.output)
        if value.type.tensor_type.elem_type == TensorProto.FLOAT
    }
    floats |= {x.name for x in model.graph.initializer if x.data_type == TensorProto.FLOAT}
    version = next(x.version for x in model.opset_import if x.domain in ("", "ai.onnx"))
    wide = excluded_nodes(model, exclude)
    kept = {name for node in wide for name in node.input if name in exclude}
    for graph in graphs(model.graph):
        convert_nodes(graph, floats, wide, kept, version)
        del graph.value_info[:]
        if graph is not model.graph:
            for value in (*graph.input, *graph.output):
                if value.name in floats:
                    value.type.tensor_type.elem_type = TensorProto.FLOAT16
    kept |= {name for graph in graphs(model.graph) for name in float32_only(graph, version)}
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in kept:
            narrow(tensor)
    cast_ends(model.graph, floats)
    for graph in graphs(model.graph):
        sort_nodes(graph)


def convert_nodes(graph, floats, wide, kept, version):
    """Change the constants of a graph's nodes; casts around those that compute in float32."""
    from onnx import TensorProto, helper

    for node in list(graph.node):
        for attribute in node.attribute:
            if attribute.type == attribute.TENSOR and attribute.t.data_type == TensorProto.FLOAT:
                narrow(attribute.t)
            if attribute.name == DTYPES.get(node.op_type) and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
        is_wide = any(node is other for other in wide)
        for names, is_input in ((node.input, True), (node.output, False)):
            for i, name in enumerate(names):
                if name not in floats or name in kept:
                    continue
                if not is_wide and takes_float16(node, i, is_input, version):
                    continue
                if is_input and is_concrete(node, i, version) and is_initializer(graph, name):
                    continue  # it stays float32
                names[i] = f"{name}_in_float32_{len(graph.node)}"
                pair = (name, names[i]) if is_input else (names[i], name)
                dtype = TensorProto.FLOAT if is_input else TensorProto.FLOAT16
                graph.node.append(helper.make_node("Cast", pair[:1], pair[1:], to=dtype))


def formal(node, i, is_input, version):
    """(the schema of a node, the schema of one of its operands or results)"""
    from onnx import defs

    schema = defs.get_schema(node.op_type, version, node.domain)
    values = schema.inputs if is_input else schema.outputs
    return schema, values[min(i, len(values) - 1)]


def takes_float16(node, i, is_input, version):
    schema, value = formal(node, i, is_input, version)
    allowed = {
        name
        for constraint in schema.type_constraints
        if constraint.type_param_str == value.type_str
        for name in constraint.allowed_type_strs
    }
    return "tensor(float16)" in (allowed or {value.type_str})


def is_concrete(node, i, version):
    """Whether an operand can only be float32, as the scales of Resize."""
    return formal(node, i, True, version)[1].type_str == "tensor(float)"


def is_initializer(graph, name):
    return any(tensor.name == name for tensor in graph.initializer)


def float32_only(graph, version):
    """The names of the operands in a graph that can only be float32."""
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name and is_concrete(node, i, version):
                yield name


def narrow(tensor):
    """Change a tensor to float16, with finite numbers in its range."""
    from onnx import numpy_helper

    array = numpy_helper.to_array(tensor)
    finite = np.where(np.isfinite(array), np.clip(array, -LIMIT, LIMIT), array)
    tiny = (array != 0) & (np.abs(array) < SMALLEST)
    finite = np.where(tiny, np.copysign(SMALLEST, array), finite)
    tensor.CopyFrom(numpy_helper.from_array(finite.astype(np.float16), tensor.name))


def cast_ends(graph, floats):
    """The inputs and outputs of the model stay float32."""
    from onnx import TensorProto, helper

    inputs = {x.name: f"{x.name}_in_float16" for x in graph.input if x.name in floats}
    outputs = {x.name: f"{x.name}_in_float16" for x in graph.output if x.name in floats}
    for inner in graphs(graph):
        for node in inner.node:
            node.input[:] = [(inputs | outputs).get(name, name) for name in node.input]
            node.output[:] = [outputs.get(name, name) for name in node.output]
    for pairs, dtype in (
        (inputs.items(), TensorProto.FLOAT16),
        (outputs.items(), TensorProto.FLOAT),
    ):
        for outside, inside in pairs:
            ends = (outside, inside) if dtype == TensorProto.FLOAT16 else (inside, outside)
            graph.node.append(helper.make_node("Cast", ends[:1], ends[1:], to=dtype))
