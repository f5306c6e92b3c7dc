"""A TFLite file as an ONNX one, by tf2onnx, with what it does wrong put right."""

import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np

OPSET = 18  # the newest that tf2onnx writes


def onnx_of_tflite(data, inputs, outputs, opset):
    """The bytes of the ONNX file; `inputs` and `outputs` are {name: shape}, in which free sizes are symbols."""
    import onnx
    import onnxruntime

    model = converted(data)
    name_aliases(model, data)
    name_sizes(model, inputs | outputs)
    if opset > OPSET:
        model = onnx.version_converter.convert_version(model, opset)
    onnx.checker.check_model(model, full_check=True)
    data = model.SerializeToString()
    onnxruntime.InferenceSession(
        data, providers=["CPUExecutionProvider"]
    )  # refuses types that the checker lets pass
    return data


def converted(data):
    """What tf2onnx.convert.from_tflite answers, but for what is wrong with it."""
    import tensorflow as tf
    from tf2onnx import optimizer
    from tf2onnx.tfonnx import process_tf_graph

    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default() as graph:
        path = Path(folder, "model.tflite")
        path.write_bytes(data)
        ours = {name: (function, []) for name, function in HANDLERS.items()}
        with clips_known():
            graph = process_tf_graph(
                graph, opset=OPSET, tflite_path=str(path), custom_op_handlers=ours
            )
    passes = dict(optimizer._get_optimizers())
    del passes["optimize_transpose"]  # it moves transposes past sums, and leaves these their axes
    return optimizer.optimize_graph(graph, catch_errors=False, optimizers=passes).make_model(
        "model"
    )


@contextmanager
def clips_known():
    """TFLite fuses `clip(x, -1, 1)` into what made x, as in erf; tf2onnx does not know how to part them again."""
    from tf2onnx.tflite_handlers import tfl_math, tfl_nn

    separate = tfl_math.separate_fused_activation_function

    def ours(context, node):
        clips = node.attr["fused_activation_function"].s == b"RELU_N1_TO_1"
        if clips:
            node.set_attr("fused_activation_function", b"NONE")
        separate(context, node)
        if clips:
            output = node.output[0]
            bounds = [constant(context, np.float32(bound)) for bound in (-1, 1)]
            about = {"shapes": [context.get_shape(output)], "dtypes": [context.get_dtype(output)]}
            context.insert_node_on_output(
                context.make_node("Clip", [output, *bounds], **about), output
            )

    name = separate.__name__
    with mock.patch.object(tfl_math, name, ours), mock.patch.object(tfl_nn, name, ours):
        yield


def name_aliases(model, data):
    """An output that is an input, or another output, has no tensor of its own in TFLite; in ONNX it must have its name."""
    from onnx import helper
    from tensorflow.lite.tools import flatbuffer_utils

    read = flatbuffer_utils.convert_bytearray_to_object(data)
    signature = read.signatureDefs[0]
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in [*model.graph.input, *model.graph.output]
    }
    del model.graph.output[:]
    for output in signature.outputs:
        name, tensor = (
            text.decode()
            for text in (output.name, read.subgraphs[0].tensors[output.tensorIndex].name)
        )
        if name != tensor:
            model.graph.node.append(helper.make_node("Identity", [tensor], [name]))
        model.graph.output.append(helper.make_tensor_value_info(name, types[tensor], []))


def name_sizes(model, shapes):
    """Call the free sizes of inputs and outputs as JAX does; tf2onnx numbers them."""
    for value in [*model.graph.input, *model.graph.output]:
        sizes = value.type.tensor_type.shape
        del sizes.dim[:]
        for size in shapes[value.name]:
            sizes.dim.add(
                **({"dim_value": size} if isinstance(size, int) else {"dim_param": str(size)})
            )


def select(context, node, *_):
    """A choice; tf2onnx's own product with 0 and 1 is NaN where what is not chosen is infinite."""
    node.type = "Where"


def segment_products(context, node, *_):
    """Products of chosen sizes, in the shapes of products of a free batch; tf2onnx's own stumbles over what no segment has."""
    data, segments, count = node.inputs
    segments, count = segments.get_tensor_value(as_list=False), int(count.get_tensor_value())
    axis = constant(context, np.array([0]))
    products = []
    for segment in range(count):
        places = constant(context, np.flatnonzero(segments == segment))
        chosen = context.make_node("Gather", [data.output[0], places])
        products.append(
            context.make_node("ReduceProd", [chosen.output[0], axis], attr={"keepdims": 1}).output[
                0
            ]
        )
    outputs, types, shapes = node.output, node.output_dtypes, node.output_shapes
    context.remove_node(node.name)
    context.make_node(
        "Concat", products, attr={"axis": 0}, outputs=outputs, dtypes=types, shapes=shapes
    )


def constant(context, array):
    from tf2onnx.utils import make_name

    return context.make_const(make_name("const"), np.asarray(array)).output[0]


HANDLERS = {"Select": select, "SelectV2": select, "UnsortedSegmentProd": segment_products}
