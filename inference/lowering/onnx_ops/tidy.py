"""Clean-up of the finished graph, which also folds a scale or shift by constants into the product
before it, as batch norm into a Conv.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from inference.lowering.onnx_ops.target import (
    Node,
    OnnxTarget,
    Scope,
)
from inference.lowering.value import is_number, is_zero


def tidy(t: OnnxTarget) -> None:
    """Reduce the graph to the fewest nodes that compute its outputs."""
    graph = t.scopes[0]
    drop_unused(graph)
    fold(t, graph)
    rename_outputs(t, graph)
    for node in graph.nodes:
        if node.op == "Transpose":
            reshape_instead(t, node)
    join_reshapes(t, graph)
    drop_unused(graph)
    store_once(t, graph)
    renumber(t, graph)


def uses(scope: Scope) -> Iterator[str]:
    """Every name that is read in a scope or in one of its subgraphs."""
    yield from scope.outputs
    for node in scope.nodes:
        yield from node.inputs
        for subgraph in subgraphs(node):
            yield from uses(subgraph)


def subgraphs(node: Node) -> list[Scope]:
    return [value for value in node.attributes.values() if isinstance(value, Scope)]


def drop_unused(scope: Scope) -> None:
    """Drop the nodes that no output depends on."""
    used, kept = set(scope.outputs), []
    for node in reversed(scope.nodes):
        if used.isdisjoint(node.outputs):
            continue
        for subgraph in subgraphs(node):
            drop_unused(subgraph)
            used.update(uses(subgraph))
        used.update(node.inputs)
        kept.append(node)
    scope.nodes = kept[::-1]


def rename_outputs(t: OnnxTarget, graph: Scope) -> None:
    """Give a node that computes an output the output's name, so that no Identity is needed."""
    makers = {name: node for node in graph.nodes for name in node.outputs}
    new_names = {}
    for node in list(graph.nodes):
        if node.op != "Identity" or node.outputs[0] not in graph.outputs:
            continue
        source = node.inputs[0]
        if source in makers and source not in new_names and source not in graph.outputs:
            new_names[source] = node.outputs[0]
            graph.nodes.remove(node)
    rename(graph, new_names)
    for old, new in new_names.items():
        if old in t.shapes:
            t.shapes[new] = t.shapes[old]


def rename(scope: Scope, names: dict[str, str]) -> None:
    for node in scope.nodes:
        node.inputs = [names.get(name, name) for name in node.inputs]
        node.outputs = [names.get(name, name) for name in node.outputs]
        for subgraph in subgraphs(node):
            rename(subgraph, names)


def renumber(t: OnnxTarget, graph: Scope) -> None:
    """Name what is left as if nothing had been dropped: weights by path, other tensors by op."""
    used = set(uses(graph))
    t.taken = {*graph.inputs, *graph.outputs, *inner_names(graph)}
    names = {name: t.weight_name(t.stems[name]) for name in t.weights if name in used}
    t.weights = {new: t.weights[old] for old, new in names.items()}
    makers = {
        name: node.op for node in graph.nodes for name in node.outputs if name not in graph.outputs
    }
    rename(graph, names | {name: t.name(op) for name, op in makers.items()})


def inner_names(scope: Scope) -> Iterator[str]:
    """The names of all tensors in subgraphs."""
    for node in scope.nodes:
        for inner in subgraphs(node):
            yield from inner.inputs
            yield from (name for node in inner.nodes for name in node.outputs)
            yield from inner_names(inner)


def store_once(t: OnnxTarget, graph: Scope) -> None:
    """A weight that is read in both orders of its axes, as a tied embedding, is stored in one.

    The runtime transposes it once, when it loads the file.
    """
    used, first = set(uses(graph)), {}
    for name in [name for name in t.weights if name in used and t.stems[name]]:
        array, stem = t.weights[name], t.stems[name]
        other = first.setdefault((stem, array.shape[::-1]), name)
        first.setdefault((stem, array.shape), name)
        if array.ndim != 2 or other == name or not np.array_equal(t.weights[other].T, array):
            continue
        node = Node("Transpose", [other], [t.name("Transpose")], {"perm": (1, 0)})
        rename(graph, {name: node.outputs[0]})
        graph.nodes.insert(0, node)


def reshape_instead(t: OnnxTarget, node: Node) -> None:
    """A transposition that only moves axes of size 1 becomes a Reshape, which costs nothing."""
    shape, order = t.shapes.get(node.outputs[0]), node.attributes["perm"]
    if shape is None or sum(not is_number(d) for d in shape) > 1 or any(map(is_zero, shape)):
        return
    moved = [axis for axis, d in zip(order, shape, strict=True) if not (is_number(d) and d == 1)]
    if moved == sorted(moved):
        argument = np.array([d if is_number(d) else -1 for d in shape], np.int64)
        node.op, node.attributes = "Reshape", {}
        node.inputs = [node.inputs[0], t.weight(argument, "")]


def join_reshapes(t: OnnxTarget, graph: Scope) -> None:
    """Replace two Reshapes in a row by the second one."""
    sources = {}
    for node in graph.nodes:
        if node.op != "Reshape":
            continue
        shape = t.weights.get(node.inputs[1])
        if shape is not None and shape.all():  # a 0 may stand for a size of the input
            node.inputs[0] = sources.get(node.inputs[0], node.inputs[0])
        sources[node.outputs[0]] = node.inputs[0]


# {op: (the axis of the channels in the result, in the weight)}
CHANNELS = {"Conv": (1, 0), "ConvTranspose": (1, 1), "Gemm": (-1, 1), "MatMul": (-1, 1)}


def fold(t: OnnxTarget, graph: Scope) -> None:
    """Fold each Mul and Add into the product before it, where nothing else reads that product."""
    makers = {name: node for node in graph.nodes for name in node.outputs}
    reads = Counter(uses(graph))
    for node in list(graph.nodes):
        if node.op not in ("Mul", "Add"):
            continue
        found = operands(t, node, makers)
        if found is None:
            continue
        product, by = found
        if reads[product.outputs[0]] > 1 or not absorb(t, node.op, product, by):
            continue
        product.outputs = node.outputs
        makers[node.outputs[0]] = product
        graph.nodes.remove(node)


def operands(t: OnnxTarget, node: Node, makers: dict[str, Node]) -> tuple[Node, str] | None:
    """The product that a node scales or shifts and the constant's name, or None."""
    for name, by in (node.inputs, node.inputs[::-1]):
        maker = makers.get(name)
        if by not in t.weights or maker is None or maker.op not in CHANNELS:
            continue
        if all(x in t.weights for x in maker.inputs[1:]):
            return maker, by
    return None


def absorb(t: OnnxTarget, op: str, product: Node, by: str) -> bool:
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


def by_channel(array: np.ndarray, rank: int, axis: int, channels: int) -> np.ndarray | None:
    """A constant as one number per channel; None where it is something else."""
    if array.ndim > rank or rank < 2:
        return None
    wide = array.reshape((1,) * (rank - array.ndim) + array.shape)
    others = np.delete(np.array(wide.shape), axis)
    if np.any(others != 1) or wide.shape[axis] not in (1, channels):
        return None
    return np.broadcast_to(wide.reshape(-1), (channels,)).astype(array.dtype)
