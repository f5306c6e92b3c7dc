"""A product with constants that is scaled or shifted by others has other constants: batch norm vanishes into a convolution."""

import numpy as np

from inference.lowering.onnx_ops.graph import Scope

CHANNELS = {
    "Conv": (1, 0),
    "ConvTranspose": (1, 1),
    "Gemm": (-1, 1),
    "MatMul": (-1, 1),
}  # of the result, of the weight


def fold(t, graph):
    """Takes Mul and Add with constants into the product before them, where nobody else reads that product."""
    makers = {name: node for node in graph.nodes for name in node.outputs}
    uses = counted(graph)
    for node in list(graph.nodes):
        if node.op not in ("Mul", "Add"):
            continue
        maker, by = operands(t, node, makers)
        if maker is None or uses[maker.outputs[0]] > 1 or not absorb(t, node.op, maker, by):
            continue
        maker.outputs = node.outputs
        makers[node.outputs[0]] = maker
        graph.nodes.remove(node)


def counted(scope):
    """{name: how often it is read}, within subgraphs, too."""
    counts = dict.fromkeys([name for node in scope.nodes for name in node.outputs], 0)

    def count(scope):
        for name in [*scope.outputs, *(name for node in scope.nodes for name in node.inputs)]:
            counts[name] = counts.get(name, 0) + 1
        for node in scope.nodes:
            for value in node.attributes.values():
                if isinstance(value, Scope):
                    count(value)

    count(scope)
    return counts


def operands(t, node, makers):
    """The product that a node scales or shifts, and the name of the constant; None without."""
    for product, by in (node.inputs, node.inputs[::-1]):
        maker = makers.get(product)
        if (
            by in t.weights
            and maker is not None
            and maker.op in CHANNELS
            and all(x in t.weights for x in maker.inputs[1:])
        ):
            return maker, by
    return None, None


def absorb(t, op, maker, by):
    """Whether the product's constants could take it in."""
    weight = t.weights[maker.inputs[1]]
    is_matrix = maker.op in ("Gemm", "MatMul")
    rank = len(t.shapes.get(maker.outputs[0], ())) if is_matrix else weight.ndim
    result_axis, weight_axis = CHANNELS[maker.op]
    if (maker.attributes.get("group", 1) > 1 and maker.op == "ConvTranspose") or (
        is_matrix and weight.ndim != 2
    ):
        return False
    by_each = by_channel(t.weights[by], rank, result_axis, weight.shape[weight_axis])
    if by_each is None or weight.dtype.kind != "f" or (op == "Add" and is_matrix and rank != 2):
        return False
    if op == "Add":
        maker.op = "Gemm" if is_matrix else maker.op
        old = t.weights[maker.inputs[2]] if len(maker.inputs) > 2 else 0
        maker.inputs[2:] = [replaced(t, by, old + by_each)]
        return True
    along = [-1 if axis == weight_axis else 1 for axis in range(weight.ndim)]
    factors = [by_each.reshape(along), by_each]  # of the weight, of the bias
    changed = zip(maker.inputs[1:], factors, strict=False)
    maker.inputs[1:] = [replaced(t, name, t.weights[name] * factor) for name, factor in changed]
    return True


def by_channel(array, rank, axis, channels):
    """A constant as one number for each channel; None where it is something else."""
    if array.ndim > rank or rank < 2:
        return None
    wide = array.reshape((1,) * (rank - array.ndim) + array.shape)
    others = np.delete(np.array(wide.shape), axis)
    if np.any(others != 1) or wide.shape[axis] not in (1, channels):
        return None
    return np.broadcast_to(wide.reshape(-1), (channels,)).astype(array.dtype)


def replaced(t, name, array):
    """The name of what takes the place of a constant."""
    return t.weight(array, t.stems[name])
