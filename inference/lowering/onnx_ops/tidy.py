"""What is done to the whole graph once it stands."""

import numpy as np

from inference.lowering.onnx_ops.dims import is_number
from inference.lowering.onnx_ops.folding import fold
from inference.lowering.onnx_ops.graph import Scope


def tidy(t):
    """Leaves what the outputs need, in the fewest nodes."""
    graph = t.scopes[0]
    drop_unused(graph)
    fold(t, graph)
    rename_outputs(t, graph)
    for node in graph.nodes:
        if node.op == "Transpose":
            reshape_instead(t, node)
    drop_unused(graph)
    name_anew(t, graph)


def uses(scope):
    """Every name that is read in a scope, or within one of its subgraphs."""
    yield from scope.outputs
    for node in scope.nodes:
        yield from node.inputs
        for value in node.attributes.values():
            if isinstance(value, Scope):
                yield from uses(value)


def drop_unused(scope):
    """Drop the nodes that no result depends on."""
    used, kept = set(scope.outputs), []
    for node in reversed(scope.nodes):
        if used.isdisjoint(node.outputs):
            continue
        for value in node.attributes.values():
            if isinstance(value, Scope):
                drop_unused(value)
                used.update(uses(value))
        used.update(node.inputs)
        kept.append(node)
    scope.nodes = kept[::-1]


def rename_outputs(t, graph):
    """A node that makes an output bears its name, so that no Identity is needed."""
    makers = {name: node for node in graph.nodes for name in node.outputs}
    renamed = {}
    for node in [
        node for node in graph.nodes if node.op == "Identity" and node.outputs[0] in graph.outputs
    ]:
        source = node.inputs[0]
        if source in makers and source not in renamed and source not in graph.outputs:
            renamed[source] = node.outputs[0]
            graph.nodes.remove(node)
    rename(graph, renamed)
    for old, new in renamed.items():
        if old in t.shapes:
            t.shapes[new] = t.shapes[old]


def rename(scope, names):
    for node in scope.nodes:
        node.inputs = [names.get(name, name) for name in node.inputs]
        node.outputs = [names.get(name, name) for name in node.outputs]
        for value in node.attributes.values():
            if isinstance(value, Scope):
                rename(value, names)


def name_anew(t, graph):
    """What is left is named as if nothing else had been: weights by their paths, other tensors by the ops that make them."""
    used = set(uses(graph))
    t.taken = {*graph.inputs, *graph.outputs, *inner_names(graph)}
    names = {name: t.weight_name(t.stems[name]) for name in t.weights if name in used}
    t.weights = {new: t.weights[old] for old, new in names.items()}
    makers = {
        name: node.op for node in graph.nodes for name in node.outputs if name not in graph.outputs
    }
    rename(graph, names | {name: t.name(op) for name, op in makers.items()})


def inner_names(scope):
    """What subgraphs make."""
    for node in scope.nodes:
        for inner in node.attributes.values():
            if isinstance(inner, Scope):
                yield from (
                    *inner.inputs,
                    *(name for node in inner.nodes for name in node.outputs),
                    *inner_names(inner),
                )


def reshape_instead(t, node):
    """A transposition that moves nothing but axes of size 1 is a Reshape, which costs nothing."""
    after, order = t.shapes.get(node.outputs[0]), node.attributes["perm"]
    if (
        after is None
        or sum(not is_number(d) for d in after) > 1
        or 0 in [d for d in after if is_number(d)]
    ):
        return
    large = [axis for axis, d in zip(order, after, strict=True) if not (is_number(d) and d == 1)]
    if large == sorted(large):
        shape = np.array([d if is_number(d) else -1 for d in after], np.int64)
        node.op, node.attributes = "Reshape", {}
        node.inputs = [node.inputs[0], t.weight(shape, "")]
