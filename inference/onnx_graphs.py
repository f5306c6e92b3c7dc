"""ONNX graphs with subgraphs: what they read, the order of their nodes, their weights in 8 bits."""

import heapq
import re

import numpy as np

from inference.excluded import excluded_names

LARGE = 1024  # numbers; a smaller weight is not worth two more nodes
# {op: the axis of its weight with the output channels}; for any other op it is the last axis.
CHANNELS = {"Conv": 0, "ConvTranspose": 1, "LSTM": 1, "GRU": 1}
# The ops whose large constants are weights, whatever their names.
WEIGHTS = {"Gather", "MatMul", "Gemm", "Transpose", *CHANNELS}
PRODUCER = "rawtree"  # the producer_name of files of the native route, which name their weights
UNNAMED = "constant_"  # begins the name of each constant that is not a weight of the model


def graphs(graph):
    """A graph and all the graphs within it."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from graphs(inner)


def subgraphs(node):
    return [attribute.g for attribute in node.attribute if attribute.type == attribute.GRAPH]


def reads(node):
    """The names that a node reads, also from within its subgraphs."""
    names = {name for name in node.input if name}
    return names.union(*(reads(inner) for graph in subgraphs(node) for inner in graph.node))


def sort_nodes(graph):
    """Put the nodes of a graph into an order in which each comes after those that it reads."""
    nodes = list(graph.node)
    makers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    before = [{makers[name] for name in reads(node) & makers.keys()} for node in nodes]
    after = {i: [] for i in range(len(nodes))}
    for i, needed in enumerate(before):
        for j in needed:
            after[j].append(i)
    ready, order = [i for i, needed in enumerate(before) if not needed], []
    while ready:
        i = heapq.heappop(ready)
        order.append(nodes[i])
        for j in after[i]:
            before[j].discard(i)
            if not before[j]:
                heapq.heappush(ready, j)
    del graph.node[:]
    graph.node.extend(order)


def excluded_weights(model, patterns, weights=()):
    """The names of the constants of the weights that match one of the patterns. Several constants
    of one weight are numbered, but so may be the `weights` themselves, as w_1 and w_2."""
    constants = [x.name for x in model.graph.initializer]
    names = {name: name if name in weights else without_number(name) for name in constants}
    named = {weight for name, weight in names.items() if not name.startswith(UNNAMED)}
    found = excluded_names(named, patterns, " of the ONNX file")
    return {name for name, weight in names.items() if weight in found}


def without_number(name):
    return re.sub(r"_\d+$", "", name)


def excluded_nodes(model, names):
    """The nodes that read one of these weights."""
    found = (node for graph in graphs(model.graph) for node in graph.node)
    return [node for node in found if not names.isdisjoint(node.input)] if names else []


def weight_names(model):
    """The names of the weights of a file of the native route, whose other constants have none."""
    names = {x.name for x in model.graph.initializer if not x.name.startswith(UNNAMED)}
    return names if model.producer_name == PRODUCER else set()


def large_floats(model):
    """The large constants that are float32."""
    from onnx import TensorProto

    large = (x for x in model.graph.initializer if np.prod(x.dims) >= LARGE)
    return [x for x in large if x.data_type == TensorProto.FLOAT]


def store_in_8_bits(model, exclude, named=()):
    """Store the large weights that are still float32 as int8, with one scale per channel: those
    that are `named`, whatever reads them, and those of the ops in WEIGHTS.

    These are tables of embeddings, positions, and the weights of recurrent layers, loops and
    branches. The rows of a table are read before they are restored; other weights are restored
    once, outside the loops.
    """
    from onnx import numpy_helper

    for tensor in large_floats(model):
        name, readers = tensor.name, list(readers_of(model.graph, tensor.name))
        ops = {node.op_type for _, node in readers}
        is_weight = readers and (name in named or not ops.isdisjoint(WEIGHTS))
        if len(tensor.dims) < 2 or name in exclude or not is_weight:
            continue
        axis = next((CHANNELS[op] for op in ops if op in CHANNELS), len(tensor.dims) - 1)
        numbers, scale = in_8_bits(numpy_helper.to_array(tensor), axis)
        parts = [f"{name}_int8", f"{name}_scale"]
        model.graph.initializer.remove(tensor)
        model.graph.initializer.append(numpy_helper.from_array(numbers, parts[0]))
        model.graph.initializer.append(numpy_helper.from_array(scale, parts[1]))
        for graph, node in readers:
            if is_table(node, name):
                result = node.output[0]
                node.input[0], node.output[0] = parts[0], f"{result}_int8"
                inputs = [node.output[0], parts[1]]
                graph.node.append(restored(inputs, result, -1))
        if any(not is_table(node, parts[0]) for _, node in readers):
            model.graph.node.append(restored(parts, name, axis))
    for graph in graphs(model.graph):
        sort_nodes(graph)


def restored(parts, name, axis):
    """The node that computes a float array from its numbers in 8 bits and their scales."""
    from onnx import helper

    node_name = f"{name}_restored"
    return helper.make_node("DequantizeLinear", parts, [name], name=node_name, axis=axis)


def readers_of(graph, name):
    """(graph, node) for each node that reads a tensor."""
    for inner in graphs(graph):
        yield from ((inner, node) for node in inner.node if name in node.input)


def is_table(node, name):
    """Whether a node reads rows of this array."""
    axis = next((x.i for x in node.attribute if x.name == "axis"), 0)
    return node.op_type == "Gather" and axis == 0 and node.input[0] == name


def in_8_bits(array, axis):
    """(int8 numbers, scales): one scale for each position along the axis."""
    others = tuple(i for i in range(array.ndim) if i != axis)
    largest = np.abs(array).max(others, keepdims=True)
    scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    return np.round(array / scale).astype(np.int8), scale.reshape(-1)
