"""An ONNX graph under construction, and its conversion to a GraphProto."""

from dataclasses import dataclass, field

import numpy as np

# dtypes that ONNX Runtime can compute in
TYPES = {"bool", "float16", "bfloat16", "float32", "float64"}
TYPES |= {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}


@dataclass
class Node:
    op: str
    inputs: list  # names of tensors, "" for an omitted one
    outputs: list
    attributes: dict  # a Scope stands for a subgraph


@dataclass(repr=False)
class Scope:
    """The nodes of the graph or of a subgraph, which can read the tensors of enclosing scopes."""

    nodes: list = field(default_factory=list)
    inputs: dict = field(default_factory=dict)  # {name: (shape, dtype)}
    outputs: dict = field(default_factory=dict)
    computed: dict = field(default_factory=dict)  # {key of a node: results}, to reuse the results


def stored_type(dtype):
    """The dtype in the file: float32 for bfloat16, which ONNX Runtime barely supports."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.name == "bfloat16" else dtype


def element_type(dtype):
    return tensor_type(stored_type(dtype))


def tensor_type(dtype):
    """ONNX's number for a dtype."""
    from onnx import helper

    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def graph_proto(scope, name, weights):
    """A scope as a GraphProto; `weights` are its initializers."""
    from onnx import helper, numpy_helper

    return helper.make_graph(
        [node_proto(node) for node in scope.nodes],
        name,
        [value_proto(*item) for item in scope.inputs.items()],
        [value_proto(*item) for item in scope.outputs.items()],
        [numpy_helper.from_array(array, weight) for weight, array in weights.items()],
    )


def node_proto(node):
    from onnx import helper

    attributes = {
        key: graph_proto(value, node.outputs[0], {}) if isinstance(value, Scope) else value
        for key, value in node.attributes.items()
    }
    return helper.make_node(node.op, node.inputs, node.outputs, name=node.outputs[0], **attributes)


def value_proto(name, shape_and_dtype):
    from onnx import helper

    shape, dtype = shape_and_dtype
    dims = [d if isinstance(d, int) else str(d) for d in shape]
    return helper.make_tensor_value_info(name, element_type(dtype), dims)
