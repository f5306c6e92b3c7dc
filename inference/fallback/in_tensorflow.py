"""What the jax2tf route does in TensorFlow: it reads a StableHLO module, and converts a TFLite file
to ONNX with tf2onnx, whose bugs are worked around. This file needs no JAX, so that a child process
starts fast."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from numpy.typing import ArrayLike

from inference.packages import read_tflite
from inference.to_tflite import save

if TYPE_CHECKING:
    import tensorflow as tf
    from onnx import ModelProto

TypedShapes = dict[str, tuple[list[int | None], str]]  # {name: (shape, dtype)}
OPSET = 18  # the newest that tf2onnx writes


def onnx_of_tflite(data: bytes, shapes: dict[str, tuple[int | str, ...]], opset: int) -> bytes:
    """The bytes of the ONNX file; `shapes` are {input or output: shape}, a free size is a name."""
    import onnx
    import onnxruntime

    model = converted(data)
    name_aliases(model, data)
    name_sizes(model, shapes)
    if opset > OPSET:
        model = onnx.version_converter.convert_version(model, opset)
    onnx.checker.check_model(model, full_check=True)
    data = model.SerializeToString()
    # ONNX Runtime rejects some types that the checker accepts.
    onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return data


def converted(data: bytes) -> "ModelProto":
    """The model from tf2onnx.convert.from_tflite, without its bugs."""
    import tensorflow as tf
    from tf2onnx import optimizer
    from tf2onnx.tfonnx import process_tf_graph

    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default() as graph:
        path = Path(folder, "model.tflite")
        path.write_bytes(data)
        handlers = {name: (function, []) for name, function in HANDLERS.items()}
        with fused_clips_supported():
            graph = process_tf_graph(
                graph, opset=OPSET, tflite_path=str(path), custom_op_handlers=handlers
            )
    passes = dict(optimizer._get_optimizers())
    # It moves transposes past sums without changing the axes of the sums.
    del passes["optimize_transpose"]
    graph = optimizer.optimize_graph(graph, catch_errors=False, optimizers=passes)
    return graph.make_model("model")


@contextmanager
def fused_clips_supported() -> Iterator[None]:
    """TFLite fuses `clip(x, -1, 1)` into the op before it, as in erf; tf2onnx cannot split them."""
    from tf2onnx.tflite_handlers import tfl_math, tfl_nn

    original = tfl_math.separate_fused_activation_function

    def separate(context: Any, node: Any) -> None:
        clips = node.attr["fused_activation_function"].s == b"RELU_N1_TO_1"
        if clips:
            node.set_attr("fused_activation_function", b"NONE")
        original(context, node)
        if clips:
            output = node.output[0]
            bounds = [constant(context, np.float32(bound)) for bound in (-1, 1)]
            types = {"shapes": [context.get_shape(output)], "dtypes": [context.get_dtype(output)]}
            clip = context.make_node("Clip", [output, *bounds], **types)
            context.insert_node_on_output(clip, output)

    name = original.__name__
    with mock.patch.object(tfl_math, name, separate), mock.patch.object(tfl_nn, name, separate):
        yield


def name_aliases(model: "ModelProto", data: bytes) -> None:
    """Add an Identity for each output that is also an input or another output.

    In TFLite such an output shares their tensor; in ONNX it needs a name of its own.
    """
    from onnx import helper

    read = read_tflite(data)
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in [*model.graph.input, *model.graph.output]
    }
    del model.graph.output[:]
    for output in read.signatureDefs[0].outputs:
        name = output.name.decode()
        tensor = read.subgraphs[0].tensors[output.tensorIndex].name.decode()
        if name != tensor:
            model.graph.node.append(helper.make_node("Identity", [tensor], [name]))
        model.graph.output.append(helper.make_tensor_value_info(name, types[tensor], []))


def name_sizes(model: "ModelProto", shapes: dict[str, tuple[int | str, ...]]) -> None:
    """Give the free sizes of inputs and outputs the names that JAX uses, and the inputs its order;
    tf2onnx numbers the ones, and sorts the others."""
    model.graph.input.sort(key=lambda value: list(shapes).index(value.name))
    for value in [*model.graph.input, *model.graph.output]:
        dims = value.type.tensor_type.shape.dim
        del dims[:]
        for size in shapes[value.name]:
            dims.add(**({"dim_value": size} if isinstance(size, int) else {"dim_param": size}))


def select(context: Any, node: Any, *_: object) -> None:
    """Select as Where; tf2onnx multiplies by 0 and 1, so an infinite value makes the result NaN."""
    node.type = "Where"


def segment_products(context: Any, node: Any, *_: object) -> None:
    """UnsortedSegmentProd, which computes the shapes of products with a free batch size.

    tf2onnx's own handler fails for elements that belong to no segment.
    """
    data, segments, count = node.inputs
    segments, count = segments.get_tensor_value(as_list=False), int(count.get_tensor_value())
    axis = constant(context, np.array([0]))
    products = []
    for segment in range(count):
        indices = constant(context, np.flatnonzero(segments == segment))
        elements = context.make_node("Gather", [data.output[0], indices]).output[0]
        product = context.make_node("ReduceProd", [elements, axis], attr={"keepdims": 1})
        products.append(product.output[0])
    outputs, types, shapes = node.output, node.output_dtypes, node.output_shapes
    context.remove_node(node.name)
    context.make_node(
        "Concat", products, attr={"axis": 0}, outputs=outputs, dtypes=types, shapes=shapes
    )


def constant(context: Any, array: ArrayLike) -> str:
    from tf2onnx.utils import make_name

    return context.make_const(make_name("const"), np.asarray(array)).output[0]


HANDLERS = {"Select": select, "SelectV2": select, "UnsortedSegmentProd": segment_products}


def save_module(
    module: tuple[bytes, int, tuple[int, ...]],
    inputs: TypedShapes,
    outputs: TypedShapes,
    folder: str,
) -> None:
    """Write a module as a SavedModel; see `Module`. Inputs and outputs are {name: (shape, dtype)},
    and a free size is None."""
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.python.xla import call_module

    data, version, kept_inputs = module

    def call(*tensors: "tf.Tensor") -> "dict[str, tf.Tensor]":
        results: Any = call_module(
            [tensors[i] for i in kept_inputs],
            version=version,
            module=data,
            Tout=[dtype for _, dtype in outputs.values()],
            Sout=[shape for shape, _ in outputs.values()],
            platforms=["CPU"],
            disabled_checks=["shape_assertions"],
        )
        return dict(zip(outputs, map(tf.identity, results), strict=True))

    specs = [tf.TensorSpec(shape, dtype, name=name) for name, (shape, dtype) in inputs.items()]
    save(tf.function(call, autograph=False).get_concrete_function(*specs), tf.Module(), folder)
