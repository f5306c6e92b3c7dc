"""Folds a scale or shift by constants into the product before it, as batch norm into a Conv."""

import numpy as np

from inference.lowering.onnx_ops.graph import Scope

# {op: (the axis of the channels in the result, in the weight)}
CHANNELS = {"Conv": (1, 0), "ConvTranspose": (1, 1), "Gemm": (-1, 1), "MatMul": (-1, 1)}


def fold(t, graph):
    """Fold each Mul and Add into the product before it, where nothing else reads that product."""
    makers = {name: node for node in graph.nodes for name in node.outputs}
    reads = read_counts(graph)
    for node in list(graph.nodes):
        if node.op not in ("Mul", "Add"):
            continue
        product, by = operands(t, node, makers)
        if product is None or reads[product.outputs[0]] > 1 or not absorb(t, node.op, product, by):
            continue
        product.outputs = node.outputs
        makers[node.outputs[0]] = product
        graph.nodes.remove(node)


def read_counts(scope):
    """{name: how often it is read}, including reads in subgraphs."""
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
    """The product that a node scales or shifts and the constant's name, or (None, None)."""
    for name, by in (node.inputs, node.inputs[::-1]):
        maker = makers.get(name)
        if by not in t.weights or maker is None or maker.op not in CHANNELS:
            continue
        if all(x in t.weights for x in maker.inputs[1:]):
            return maker, by
    return None, None


def absorb(t, op, product, by):
    """Change the product's constants by `op` with the constant `by`; False if it cannot be done."""
    weight = t.weights[product.inputs[1]]
    is_matrix = product.op in ("Gemm", "MatMul")
    rank = len(t.shapes.get(product.outputs[0], ())) if is_matrix else weight.ndim
    result_axis, weight_axis = CHANNELS[product.op]
    if product.attributes.get("group", 1) > 1 and product.op == "ConvTranspose":
        return False
    if is_matrix and weight.ndim != 2:
        return False
    numbers = by_channel(t.weights[by], rank, result_axis, weight.shape[weight_axis])
    if numbers is None or weight.dtype.kind != "f" or (op == "Add" and is_matrix and rank != 2):
        return False
    if op == "Add":
        product.op = "Gemm" if is_matrix else product.op
        bias = t.weights[product.inputs[2]] if len(product.inputs) > 2 else 0
        product.inputs[2:] = [t.weight(bias + numbers, t.stems[by])]
        return True
    along = [-1 if axis == weight_axis else 1 for axis in range(weight.ndim)]
    factors = [numbers.reshape(along), numbers]  # for the weight, for the bias
    product.inputs[1:] = [
        t.weight(t.weights[name] * factor, t.stems[name])
        for name, factor in zip(product.inputs[1:], factors, strict=False)
    ]
    return True


def by_channel(array, rank, axis, channels):
    """A constant as one number per channel; None where it is something else."""
    if array.ndim > rank or rank < 2:
        return None
    wide = array.reshape((1,) * (rank - array.ndim) + array.shape)
    others = np.delete(np.array(wide.shape), axis)
    if np.any(others != 1) or wide.shape[axis] not in (1, channels):
        return None
    return np.broadcast_to(wide.reshape(-1), (channels,)).astype(array.dtype)
