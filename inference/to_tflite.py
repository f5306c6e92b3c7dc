"""Traced functions as TFLite files of builtin ops, through TensorFlow's converter."""

import warnings

from inference.lowering.walk import Walk
from inference.packages import needed, quiet
from utils import RunError, UserError, atomic_write

CONVOLUTIONS = {"CONV_2D", "DEPTHWISE_CONV_2D", "CONV_3D", "TRANSPOSE_CONV", "CONV_3D_TRANSPOSE"}
PRODUCTS = CONVOLUTIONS | {"FULLY_CONNECTED", "BATCH_MATMUL"}  # what int8 is for


def write_tflite(traced, path, *, quantize=None, samples=None):
    """Write the file; `quantize` is None, float16, dynamic or int8, which asks for `samples`, a list of {input: array}."""
    needed("tensorflow")
    with quiet():
        check_types(traced)
        function, owner = as_tensorflow(traced, products=quantize != "int8")
        data = converted(function, owner, quantize, samples)
    atomic_write(path, data)


def check_types(traced):
    from inference.lowering.tf_ops.target import TYPES

    for name, aval in [*traced.inputs.items(), *traced.outputs.items()]:
        if str(aval.dtype) not in TYPES:
            raise UserError(
                f"{name}: TFLite's ops take no {aval.dtype}, but {', '.join(sorted(TYPES))}; convert it in the model"
            )


def as_tensorflow(traced, products):
    """The traced function as one of TensorFlow, whose arguments and results have the names of the file's; and its owner."""
    import tensorflow as tf

    from inference.lowering.tf_ops import LAYERS, PRIMITIVES
    from inference.lowering.tf_ops.target import Target

    def run(*tensors):
        given = dict(zip(traced.inputs, tensors, strict=True))
        sized = [(aval.shape, given[name]) for name, aval in traced.inputs.items()]
        target = Target(LAYERS, PRIMITIVES, sized, products)
        results = Walk(target).outputs(traced, given)
        return {name: tf.identity(target.whole(value)) for name, value in results.items()}

    specs = [
        tf.TensorSpec(free(aval.shape), aval.dtype, name=name)
        for name, aval in traced.inputs.items()
    ]
    return tf.function(run, autograph=False).get_concrete_function(*specs), tf.Module()


def free(shape):
    """A shape in which a free size is None."""
    return [d if isinstance(d, int) else None for d in shape]


def converted(function, owner, quantize, samples):
    """The bytes of the file. The converter is not allowed any op that is no builtin of TFLite, so it refuses those."""
    import tensorflow as tf

    converter = tf.lite.TFLiteConverter.from_concrete_functions([function], owner)
    if quantize:
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if quantize == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if quantize == "int8" and not samples:
        raise UserError(
            "int8 asks for samples of real inputs, which say how large its numbers become"
        )
    try:
        return in_int8(converter, samples) if quantize == "int8" else converter.convert()
    except Exception as error:  # of many kinds
        raise RunError(f"TensorFlow's converter refuses the model: {reason(error)}") from error


def in_int8(converter, samples):
    """Convolutions and products in int8, but for those that would lose by it; inputs and outputs in float, as they were."""
    from tensorflow.lite.python.convert import mlir_quantize

    converter.representative_dataset = lambda: samples
    converter._experimental_calibrate_only = (
        True  # the second step by itself can leave ops out, and only that
    )
    with warnings.catch_warnings(
        action="ignore"
    ):  # TensorFlow warns of its own interpreter, which it uses here
        measured = converter.convert()
    kinds, nodes = left_in_float(measured)
    return mlir_quantize(measured, denylisted_ops=kinds, denylisted_nodes=nodes)


def left_in_float(data):
    """What int8 leaves alone of a TFLite file: the kinds of its ops without weights, and the names of some with weights.

    - A reshape or a sum in int8 would leave 256 steps of the numbers that pass, and a normalization magnifies those steps.
    - So would a convolution that sees the input itself, where most of an image is background.
      With both in int8, a vit after 20 steps is off by 0.50 of its output's scale, without them by 0.08.
    - Products of two computed arrays, as in attention: no file is smaller for them, and in int8 a vit takes 3 times as long.
    """
    from tensorflow.lite.tools import flatbuffer_utils

    model = flatbuffer_utils.convert_bytearray_to_object(data)
    kinds, names = set(), []
    for graph in model.subgraphs:
        computed, mixed = (
            set(graph.inputs),
            set(),
        )  # mixed: computed by way of a convolution or a product
        for op in graph.operators:
            kind = flatbuffer_utils.opcode_to_name(model, op.opcodeIndex)
            if kind not in PRODUCTS:
                kinds.add(kind)
            elif computed.issuperset(op.inputs[:2]) or (
                kind in CONVOLUTIONS and mixed.isdisjoint(op.inputs)
            ):
                names += [graph.tensors[i].name.decode() for i in op.outputs]
            computed.update(op.outputs)
            if kind in PRODUCTS or not mixed.isdisjoint(op.inputs):
                mixed.update(op.outputs)
    return sorted(kinds), names


def reason(error):
    """Of the converter's long message, the line that names the ops it cannot write."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("TF Select ops:", "Custom ops:"))]
    return (telling or lines or [type(error).__name__])[0]
