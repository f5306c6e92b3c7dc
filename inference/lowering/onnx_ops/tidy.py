"""Clean-up of the finished graph."""

import numpy as np

from inference.lowering.onnx_ops.dims import is_number, is_zero
from inference.lowering.onnx_ops.folding import fold
from inference.lowering.onnx_ops.graph import Node, Scope


def tidy(t):
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


def uses(scope):
    """Every name that is read in a scope or in one of its subgraphs."""
    yield from scope.outputs
    for node in scope.nodes:
        yield from node.inputs
        for subgraph in subgraphs(node):
            yield from uses(subgraph)


def subgraphs(node):
    return [value for value in node.attributes.values() if isinstance(value, Scope)]


def drop_unused(scope):
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


def rename_outputs(t, graph):
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


def rename(scope, names):
    for node in scope.nodes:
        node.inputs = [names.get(name, name) for name in node.inputs]
        node.outputs = [names.get(name, name) for name in node.outputs]
        for subgraph in subgraphs(node):
            rename(subgraph, names)


def renumber(t, graph):
    """Name what is left as if nothing had been dropped: weights by path, other tensors by op."""
    used = set(uses(graph))
    t.taken = {*graph.inputs, *graph.outputs, *inner_names(graph)}
    names = {name: t.weight_name(t.stems[name]) for name in t.weights if name in used}
    t.weights = {new: t.weights[old] for old, new in names.items()}
    makers = {
        name: node.op for node in graph.nodes for name in node.outputs if name not in graph.outputs
    }
    rename(graph, names | {name: t.name(op) for name, op in makers.items()})


def inner_names(scope):
    """The names of all tensors in subgraphs."""
    for node in scope.nodes:
        for inner in subgraphs(node):
            yield from inner.inputs
            yield from (name for node in inner.nodes for name in node.outputs)
            yield from inner_names(inner)


def store_once(t, graph):
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


def reshape_instead(t, node):
    """A transposition that only moves axes of size 1 becomes a Reshape, which costs nothing."""
    shape, order = t.shapes.get(node.outputs[0]), node.attributes["perm"]
    if shape is None or sum(not is_number(d) for d in shape) > 1 or any(map(is_zero, shape)):
        return
    moved = [axis for axis, d in zip(order, shape, strict=True) if not (is_number(d) and d == 1)]
    if moved == sorted(moved):
        argument = np.array([d if is_number(d) else -1 for d in shape], np.int64)
        node.op, node.attributes = "Reshape", {}
        node.inputs = [node.inputs[0], t.weight(argument, "")]


def join_reshapes(t, graph):
    """Replace two Reshapes in a row by the second one."""
    sources = {}
    for node in graph.nodes:
        if node.op != "Reshape":
            continue
        shape = t.weights.get(node.inputs[1])
        if shape is not None and shape.all():  # a 0 may stand for a size of the input
            node.inputs[0] = sources.get(node.inputs[0], node.inputs[0])
        sources[node.outputs[0]] = node.inputs[0]
