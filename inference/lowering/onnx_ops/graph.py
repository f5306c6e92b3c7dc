"""An ONNX graph while it grows, and the file's form of it."""

from dataclasses import dataclass, field

import numpy as np

TYPES = {
    "bool",
    "float16",
    "bfloat16",
    "float32",
    "float64",
}  # of numbers that can be computed with
TYPES |= {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}


@dataclass
class Node:
    op: str
    inputs: list  # names of tensors; "" for one that is left out
    outputs: list
    attributes: dict  # a Scope stands for a subgraph


@dataclass(repr=False)
class Scope:
    """The nodes of the graph, or of a subgraph, which sees the tensors of those around it."""

    nodes: list = field(default_factory=list)
    inputs: dict = field(default_factory=dict)  # {name: (shape, type)}
    outputs: dict = field(default_factory=dict)
    made: dict = field(
        default_factory=dict
    )  # what a node computes -> its results, so that nothing is computed twice


def stored_type(dtype):
    """The type that a tensor has in the file: bfloat16, which ONNX Runtime barely knows, is computed in float32."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.name == "bfloat16" else dtype


def element_type(dtype):
    return tensor_type(stored_type(dtype))


def tensor_type(dtype):
    """ONNX's number of a type."""
    from onnx import helper

    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def graph_proto(scope, name, weights):
    """A scope as a GraphProto; `weights` are the constants that it holds."""
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


def value_proto(name, about):
    from onnx import helper

    shape, dtype = about
    dims = [d if isinstance(d, int) else str(d) for d in shape]
    return helper.make_tensor_value_info(name, element_type(dtype), dims)
