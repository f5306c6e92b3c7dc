"""Quantize ONNX files with onnxruntime's tools; find the weights that --exclude names."""

import difflib
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from inference.packages import needed, quiet
from utils import RunError, UserError, first_line
from utils.files import atomic_write

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto
    from onnx.defs import OpSchema
    from onnxruntime.quantization import CalibrationDataReader

    from inference.runtimes import Arrays

LIMIT = np.finfo(np.float16).max
SMALLEST = 1e-7  # in float16; a smaller number, such as the eps of a norm, would become 0
DTYPES = {"Cast": "to", "RandomNormal": "dtype", "RandomUniform": "dtype", "EyeLike": "dtype"}
LARGE = 1024  # numbers; a smaller weight is not worth two more nodes
# {op: the axis of its weight with the output channels}; for any other op it is the last axis.
CHANNELS = {"Conv": 0, "ConvTranspose": 1, "LSTM": 1, "GRU": 1}
# The ops whose large constants are weights, whatever their names.
WEIGHTS = {"Gather", "MatMul", "Gemm", "Transpose", *CHANNELS}
PRODUCER = "rawtree"  # the producer_name of files of the native route, which name their weights
UNNAMED = "constant_"  # begins the name of each constant that is not a weight of the model
CONVOLUTIONS = ["Conv", "ConvTranspose"]
# The ops that are quantized; a normalization or a softmax would lose its small numbers.
PRODUCTS = [*CONVOLUTIONS, "MatMul", "Gemm"]
NO_NAMES = (
    "--exclude: the jax2tf route gives weights in TFLite no names; use --route native, or "
    "--formats onnx"
)

MOST_NAMES = 10  # in a message


def quantize_onnx(
    source: str | Path,
    path: str | Path,
    precision: str,
    samples: "Sequence[Arrays] | None" = None,
    exclude: Sequence[str] = (),
    weights: Collection[str] = (),
) -> None:
    """Write the float32 file `source` as float16, dynamic or int8; inputs and outputs stay float32.

    int8 is calibrated with `samples`, a list of {input: array}. Weights whose names match one of
    the regexes in `exclude` stay float32; `weights` are the names of the model's, where known.
    """
    write = {"float16": to_float16, "dynamic": to_dynamic, "int8": to_int8}.get(precision)
    if write is None:
        raise UserError(f"unknown precision {precision!r}; choose from float16, dynamic and int8")
    if precision == "int8" and not samples:
        raise UserError("int8 needs samples of real inputs, which show how large its numbers are")
    needed("onnx", "onnxruntime")
    import onnx

    # The tools write files of their own beside their input.
    with quiet(), tempfile.TemporaryDirectory() as folder:
        try:
            model = onnx.load(source)
            excluded, named = excluded_weights(model, exclude, weights), weight_names(model)
            data = checked(write(Path(source), Path(folder), samples or (), excluded, named))
        except UserError:
            raise
        except Exception as error:  # the tools have no error class of their own
            raise RunError(
                f"{source}: onnxruntime cannot convert it to {precision}: {first_line(error)}"
            ) from error
    atomic_write(path, data)


def checked(model: "ModelProto") -> bytes:
    """The bytes of a model that passes ONNX's full check."""
    import onnx

    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def to_float16(
    source: Path,
    folder: Path,
    samples: "Sequence[Arrays]",
    exclude: set[str],
    named: Collection[str],
) -> "ModelProto":
    """Weights and intermediate results in float16; inputs and outputs in float32."""
    import onnx

    model = onnx.load(source)
    narrow_model(model, exclude)
    return model


def to_dynamic(
    source: Path,
    folder: Path,
    samples: "Sequence[Arrays]",
    exclude: set[str],
    named: Collection[str],
) -> "ModelProto":
    """Weights in 8 bits; the ranges of the activations are measured at run time.

    The weights are unsigned: on x86 processors without VNNI, ONNX Runtime's products of unsigned
    activations and signed weights overflow 16 bits (off by 0.080 of the output's scale in a small
    model; unsigned 0.022).
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    left = left_in_float(path := prepared(source, folder), exclude)
    quantize_dynamic(
        path,
        folder / "dynamic.onnx",
        op_types_to_quantize=PRODUCTS,
        nodes_to_exclude=names_of(left),
        per_channel=True,
        weight_type=QuantType.QUInt8,
    )
    return with_small_weights(folder / "dynamic.onnx", left, exclude, named)


def to_int8(
    source: Path,
    folder: Path,
    samples: "Sequence[Arrays]",
    exclude: set[str],
    named: Collection[str],
) -> "ModelProto":
    """Convolutions and products in int8, as pairs of QuantizeLinear and DequantizeLinear.

    Weights have one scale per channel. The output of a MatMul stays in float, since the
    normalization that follows needs more than 8 bits.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    left = left_in_float(path := prepared(source, folder), exclude)
    quantize_static(
        path,
        folder / "int8.onnx",
        reader(samples),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=PRODUCTS,
        nodes_to_exclude=names_of(left),
        per_channel=True,
        reduce_range=True,  # else products saturate on a CPU without VNNI, and are off by a third
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        extra_options={"OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]},
    )
    return with_small_weights(folder / "int8.onnx", left, exclude, named)


def prepared(source: Path, folder: Path) -> Path:
    """The path of a copy with named nodes and inferred shapes, which the tools need."""
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model = onnx.load(source)
    for i, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{i}"
    quant_pre_process(
        model, folder / "prepared.onnx", skip_symbolic_shape=True, skip_optimization=True
    )
    return folder / "prepared.onnx"


def left_in_float(path: Path, exclude: set[str]) -> "list[NodeProto]":
    """The nodes that stay in float: those of excluded weights, and the first convolutions."""
    import onnx

    model = onnx.load(path)
    return [*excluded_nodes(model, exclude), *first_convolutions(model.graph)]


def names_of(nodes: "Iterable[NodeProto]") -> list[str]:
    """The names of nodes, and those that they have after the tools have split each Gemm."""
    return [name for node in nodes for name in (node.name, f"{node.name}_MatMul")]


def with_small_weights(
    path: Path, left: "Sequence[NodeProto]", exclude: set[str], named: Collection[str]
) -> "ModelProto":
    """The model that a tool has written, with the weights that it left in float32 in 8 bits."""
    import onnx

    model = onnx.load(path)
    store_in_8_bits(model, exclude | {name for node in left for name in node.input}, named)
    return model


def first_convolutions(graph: "GraphProto") -> "list[NodeProto]":
    """The convolutions that take the input itself.

    They have few weights and lose much accuracy: on the sample, a stem in int8 makes the largest
    error 0.37 of the logits' scale instead of 0.12, since the normalization that follows magnifies
    the rounding of an empty background.
    """
    raw, found = {value.name for value in graph.input}, []
    for node in graph.node:
        if raw.isdisjoint(node.input):
            continue
        if node.op_type in CONVOLUTIONS:
            found.append(node)
        elif node.op_type not in PRODUCTS:
            raw.update(node.output)
    return found


def reader(samples: "Sequence[Arrays]") -> "CalibrationDataReader":
    """The samples as the tools read them: one by one, then None."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        remaining = iter(samples)

        def get_next(  # pyright: ignore[reportIncompatibleMethodOverride]  # None ends them
            self,
        ) -> "Arrays | None":
            return next(self.remaining, None)

    return Reader()


def graphs(graph: "GraphProto") -> "Iterator[GraphProto]":
    """A graph and all the graphs within it."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from graphs(inner)


def subgraphs(node: "NodeProto") -> "list[GraphProto]":
    return [attribute.g for attribute in node.attribute if attribute.type == attribute.GRAPH]


def reads(node: "NodeProto") -> set[str]:
    """The names that a node reads, also from within its subgraphs."""
    names = {name for name in node.input if name}
    return names.union(*(reads(inner) for graph in subgraphs(node) for inner in graph.node))


def sort_nodes(graph: "GraphProto") -> None:
    """Put the nodes of a graph into an order in which each comes after those that it reads."""
    nodes = list(graph.node)
    makers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    before = {
        i: {makers[name] for name in reads(node) & makers.keys()} for i, node in enumerate(nodes)
    }
    ordered = [nodes[i] for i in TopologicalSorter(before).static_order()]
    del graph.node[:]
    graph.node.extend(ordered)


def excluded_weights(
    model: "ModelProto", patterns: Sequence[str], weights: Collection[str] = ()
) -> set[str]:
    """The names of the constants of the weights that match one of the patterns. Several constants
    of one weight are numbered, but so may be the `weights` themselves, as w_1 and w_2."""
    constants = [x.name for x in model.graph.initializer]
    names = {name: name if name in weights else without_number(name) for name in constants}
    named = {weight for name, weight in names.items() if not name.startswith(UNNAMED)}
    found = excluded_names(named, patterns, " of the ONNX file")
    return {name for name, weight in names.items() if weight in found}


def without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def excluded_nodes(model: "ModelProto", names: set[str]) -> "list[NodeProto]":
    """The nodes that read one of these weights."""
    found = (node for graph in graphs(model.graph) for node in graph.node)
    return [node for node in found if not names.isdisjoint(node.input)] if names else []


def weight_names(model: "ModelProto") -> set[str]:
    """The names of the weights of a file of the native route, whose other constants have none."""
    names = {x.name for x in model.graph.initializer if not x.name.startswith(UNNAMED)}
    return names if model.producer_name == PRODUCER else set()


def float32_weights(path: Path) -> dict[str, int]:
    """{name: bytes} of the large float32 weights in a file."""
    import onnx

    tensors = large_floats(onnx.load(path, load_external_data=False))
    return {tensor.name: 4 * int(np.prod(tensor.dims)) for tensor in tensors}


def large_floats(model: "ModelProto") -> "list[TensorProto]":
    """The large constants that are float32."""
    from onnx import TensorProto

    large = (x for x in model.graph.initializer if np.prod(x.dims) >= LARGE)
    return [x for x in large if x.data_type == TensorProto.FLOAT]


def store_in_8_bits(model: "ModelProto", exclude: set[str], named: Collection[str] = ()) -> None:
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


def restored(parts: Sequence[str], name: str, axis: int) -> "NodeProto":
    """The node that computes a float array from its numbers in 8 bits and their scales."""
    from onnx import helper

    node_name = f"{name}_restored"
    return helper.make_node("DequantizeLinear", parts, [name], name=node_name, axis=axis)


def readers_of(graph: "GraphProto", name: str) -> "Iterator[tuple[GraphProto, NodeProto]]":
    """(graph, node) for each node that reads a tensor."""
    for inner in graphs(graph):
        yield from ((inner, node) for node in inner.node if name in node.input)


def is_table(node: "NodeProto", name: str) -> bool:
    """Whether a node reads rows of this array."""
    axis = next((x.i for x in node.attribute if x.name == "axis"), 0)
    return node.op_type == "Gather" and axis == 0 and node.input[0] == name


def in_8_bits(array: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """(int8 numbers, scales): one scale for each position along the axis."""
    others = tuple(i for i in range(array.ndim) if i != axis)
    largest = np.abs(array).max(others, keepdims=True)
    scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    return np.round(array / scale).astype(np.int8), scale.reshape(-1)


def narrow_model(model: "ModelProto", exclude: set[str]) -> None:
    """Turn a float32 model into float16, its loops and branches included, in which onnxruntime's
    own tool puts no casts. The weights named in `exclude` stay float32, as the ops that read them.

    Every tensor of float32 becomes float16, except the inputs and outputs of the model, the
    excluded weights and what an op only takes in float32. Ops have the same result type as their
    operands, so only constants, declared types and casts have to be changed.
    """
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
    kept |= {  # an op only takes these in float32
        name
        for graph in graphs(model.graph)
        for node in graph.node
        for i, name in enumerate(node.input)
        if name and is_concrete(node, i, version)
    }
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in kept:
            narrow(tensor)
    cast_ends(model.graph, floats)
    for graph in graphs(model.graph):
        sort_nodes(graph)


def convert_nodes(
    graph: "GraphProto", floats: set[str], wide: "Sequence[NodeProto]", kept: set[str], version: int
) -> None:
    """Change the constants of a graph's nodes; casts around those that compute in float32."""
    from onnx import TensorProto, helper

    constants = {tensor.name for tensor in graph.initializer}
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
                if is_input and is_concrete(node, i, version) and name in constants:
                    continue  # it stays float32
                names[i] = f"{name}_in_float32_{len(graph.node)}"
                pair = (name, names[i]) if is_input else (names[i], name)
                dtype = TensorProto.FLOAT if is_input else TensorProto.FLOAT16
                graph.node.append(helper.make_node("Cast", pair[:1], pair[1:], to=dtype))


def formal(
    node: "NodeProto", i: int, is_input: bool, version: int
) -> "tuple[OpSchema, OpSchema.FormalParameter]":
    """(the schema of a node, the schema of one of its operands or results)"""
    from onnx import defs

    schema = defs.get_schema(node.op_type, version, node.domain)
    values = schema.inputs if is_input else schema.outputs
    return schema, values[min(i, len(values) - 1)]


def takes_float16(node: "NodeProto", i: int, is_input: bool, version: int) -> bool:
    schema, value = formal(node, i, is_input, version)
    allowed = {
        name
        for constraint in schema.type_constraints
        if constraint.type_param_str == value.type_str
        for name in constraint.allowed_type_strs
    }
    return "tensor(float16)" in (allowed or {value.type_str})


def is_concrete(node: "NodeProto", i: int, version: int) -> bool:
    """Whether an operand can only be float32, as the scales of Resize."""
    return formal(node, i, True, version)[1].type_str == "tensor(float)"


def narrow(tensor: "TensorProto") -> None:
    """Change a tensor to float16, with finite numbers in its range."""
    from onnx import numpy_helper

    array = numpy_helper.to_array(tensor)
    finite = np.where(np.isfinite(array), np.clip(array, -LIMIT, LIMIT), array)
    tiny = (array != 0) & (np.abs(array) < SMALLEST)
    finite = np.where(tiny, np.copysign(SMALLEST, array), finite)
    tensor.CopyFrom(numpy_helper.from_array(finite.astype(np.float16), tensor.name))


def cast_ends(graph: "GraphProto", floats: set[str]) -> None:
    """The inputs and outputs of the model stay float32."""
    from onnx import TensorProto, helper

    inputs = {x.name: f"{x.name}_in_float16" for x in graph.input if x.name in floats}
    outputs = {x.name: f"{x.name}_in_float16" for x in graph.output if x.name in floats}
    for inner in graphs(graph):
        for node in inner.node:
            node.input[:] = [(inputs | outputs).get(name, name) for name in node.input]
            node.output[:] = [outputs.get(name, name) for name in node.output]
    for outside, inside in inputs.items():
        graph.node.append(helper.make_node("Cast", [outside], [inside], to=TensorProto.FLOAT16))
    for outside, inside in outputs.items():
        graph.node.append(helper.make_node("Cast", [inside], [outside], to=TensorProto.FLOAT))


def excluded_names(names: Collection[str], patterns: Iterable[str], place: str = "") -> set[str]:
    """The names that match one of the regexes; each regex must match at least one. `place` follows
    "no weight" in the message."""
    matching = {pattern: {n for n in names if re.fullmatch(pattern, n)} for pattern in patterns}
    for pattern, found in matching.items():
        if not found:
            message = f"--exclude: {pattern!r} matches no weight{place}"
            raise UserError(f"{message}; {names_near(names, pattern)}")
    return set().union(*matching.values())


def names_near(names: Iterable[str], pattern: str) -> str:
    """The names, in words; if there are many, only those nearest to the pattern."""
    names = sorted(names)
    if len(names) <= MOST_NAMES:
        return f"there are {', '.join(names) or 'none'}"
    near = difflib.get_close_matches(pattern, names, n=4, cutoff=0.4) or names[:4]
    return f"of the {len(names)} that there are, the nearest are {', '.join(near)}"
