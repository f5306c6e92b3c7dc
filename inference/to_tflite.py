"""Write a traced function as a TFLite file of builtin ops, through TensorFlow's converter."""

import tempfile
import warnings

from inference.child import locally
from inference.excluded import excluded_names
from inference.packages import import_tensorflow, needed, quiet
from inference.tflite_weights import check_kept, is_kept, restored
from utils import RunError, UserError
from utils.files import atomic_write

CONVOLUTIONS = {"CONV_2D", "DEPTHWISE_CONV_2D", "CONV_3D", "TRANSPOSE_CONV", "CONV_3D_TRANSPOSE"}
PRODUCTS = CONVOLUTIONS | {"FULLY_CONNECTED", "BATCH_MATMUL"}  # the ops that int8 quantizes


def write_tflite(traced, path, *, quantize=None, samples=None, exclude=(), call=locally):
    """Write the file; `quantize` is None, float16, dynamic or int8.

    int8 is calibrated with `samples`, a list of {input: array}. Weights whose names match one of
    the regexes in `exclude` stay float32. The converter runs where `call` runs it, as that of a
    `Child`, which imports this module and needs no JAX.
    """
    needed("tensorflow")
    with tempfile.TemporaryDirectory() as folder:
        with quiet():
            import_tensorflow()
            check_types(traced)
            kept = excluded_names(traced.weights, exclude)
            save(*as_tensorflow(traced, quantize != "int8", kept), folder)
        data = converted(folder, quantize, samples, call, bool(kept))
    data = call("naming the tensors", in_order, data, [*traced.inputs], [*traced.outputs])
    atomic_write(path, data)


def check_types(traced):
    from inference.lowering.tf_ops.target import TYPES

    for name, aval in [*traced.inputs.items(), *traced.outputs.items()]:
        if str(aval.dtype) not in TYPES:
            raise UserError(
                f"{name}: TFLite's ops do not take {aval.dtype}; convert it in the model to one of "
                f"{', '.join(sorted(TYPES))}"
            )


def as_tensorflow(traced, products, kept=()):
    """The traced function as a TensorFlow function with the same names, and the module it needs;
    see `TfTarget` for `products` and `kept`."""
    import tensorflow as tf

    from inference.lowering.tf_ops import LAYERS, PRIMITIVES
    from inference.lowering.tf_ops.target import TfTarget
    from inference.lowering.walk import Walk, located

    def run(*tensors):
        inputs = dict(zip(traced.inputs, tensors, strict=True))
        target = TfTarget(LAYERS, PRIMITIVES, traced.inputs, inputs, products, kept)
        with located(walk := Walk(target)):
            results = walk.outputs(traced, inputs)
            return {name: tf.identity(target.whole(value)) for name, value in results.items()}

    specs = [
        tf.TensorSpec(free(aval.shape), aval.dtype, name=name)
        for name, aval in traced.inputs.items()
    ]
    return tf.function(run, autograph=False).get_concrete_function(*specs), tf.Module()


def free(shape):
    """A shape whose free dimensions are None."""
    return [d if isinstance(d, int) else None for d in shape]


def save(function, owner, folder):
    """Write a TensorFlow function as a SavedModel."""
    import tensorflow as tf

    options = tf.saved_model.SaveOptions(save_debug_info=True)  # for the converter's errors
    tf.saved_model.save(owner, folder, {"serving_default": function}, options)


def converted(folder, quantize, samples, call=locally, keeps=False):
    """The bytes of the file of a SavedModel; `keeps`: some of its ops stay float32 (KEPT)."""
    if quantize != "int8":
        step = f"converting to TFLite{f' in {quantize}' if quantize else ''}"
        data = call(step, convert, folder, quantize)
        if not keeps:
            return data
        original = call("converting to TFLite", convert, folder, None)
        return call("restoring the excluded weights", restored, data, original)
    if not samples:
        raise UserError("int8 needs samples of real inputs, which show how large its numbers are")
    data = call(f"measuring {len(samples)} samples for int8", convert, folder, quantize, samples)
    return call("quantizing to int8", in_int8, data, keeps)


def convert(folder, quantize, samples=None):
    """The bytes of a file of builtin TFLite ops only; for int8, those of the calibrated model."""
    import tensorflow as tf

    converter = tf.lite.TFLiteConverter.from_saved_model(folder)
    if quantize:
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if quantize == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if quantize == "int8":
        converter.representative_dataset = lambda: samples
        # Quantize in a second step, since only that can leave ops out.
        converter._experimental_calibrate_only = True
    try:
        # TensorFlow warns about its own interpreter, which it calibrates with.
        with warnings.catch_warnings(action="ignore"):
            return converter.convert()
    except Exception as error:  # the converter raises many kinds
        raise RunError(f"TensorFlow's converter rejects the model: {reason(error)}") from error


def in_int8(calibrated, keeps=False):
    """A calibrated file with the convolutions and products in int8, except those that would lose
    accuracy, or have a name of KEPT. Inputs and outputs stay in float."""
    from tensorflow.lite.python.convert import mlir_quantize

    kinds, nodes = left_in_float(calibrated, keeps)
    try:
        return mlir_quantize(calibrated, denylisted_ops=kinds, denylisted_nodes=nodes)
    except Exception as error:
        raise RunError(f"TensorFlow's quantizer rejects the model: {reason(error)}") from error


def left_in_float(data, keeps=False):
    """What int8 leaves in float: the kinds of ops without weights, names of some ops with weights.

    - A reshape or a sum in int8 would round its numbers to 256 steps, and a normalization magnifies
      those steps.
    - So would a convolution of the input itself, where most of an image is background. With both in
      int8, a vit after 20 steps is off by 0.50 of its output's scale, without them by 0.08.
    - Products of two computed arrays, as in attention: int8 does not make the file smaller, and a
      vit takes 3 times as long.
    """
    from tensorflow.lite.tools import flatbuffer_utils

    model = flatbuffer_utils.convert_bytearray_to_object(data)
    if keeps:
        check_kept(model)
    kinds, names = set(), []
    for graph in model.subgraphs:
        computed = set(graph.inputs)
        mixed = set()  # the tensors computed through a convolution or a product
        for op in graph.operators:
            kind = flatbuffer_utils.opcode_to_name(model, op.opcodeIndex)
            outputs = [graph.tensors[i].name.decode() for i in op.outputs]
            if is_kept(graph, op) and kind in PRODUCTS | {"GATHER"}:
                names += outputs
            elif kind == "GATHER":  # the rows of a constant table are as good in int8
                names += outputs if op.inputs[0] in computed else []
            elif kind not in PRODUCTS:
                kinds.add(kind)
            elif computed.issuperset(op.inputs[:2]) or (
                kind in CONVOLUTIONS and mixed.isdisjoint(op.inputs)
            ):
                names += outputs
            computed.update(op.outputs)
            if kind in PRODUCTS or not mixed.isdisjoint(op.inputs):
                mixed.update(op.outputs)
    return sorted(kinds), names


def in_order(data, inputs, outputs):
    """A file with its inputs and outputs in this order, which TensorFlow sorts by name, and with
    their names for the tensors as well, since not every program reads signatures."""
    from tensorflow.lite.tools import flatbuffer_utils

    model = flatbuffer_utils.convert_bytearray_to_object(data)
    (signature,) = model.signatureDefs
    graph = model.subgraphs[signature.subgraphIndex]
    for kind, names in (("outputs", outputs), ("inputs", inputs)):
        by_name = {tensor.name.decode(): tensor for tensor in getattr(signature, kind)}
        tensors = [by_name[name] for name in names]
        setattr(signature, kind, tensors)
        setattr(graph, kind, [tensor.tensorIndex for tensor in tensors])
        for tensor in tensors:
            graph.tensors[tensor.tensorIndex].name = tensor.name
    return bytes(flatbuffer_utils.convert_object_to_bytearray(model))


def reason(error):
    """The line of the converter's long message that names the ops it cannot write."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    op_lines = [line for line in lines if line.startswith(("TF Select ops:", "Custom ops:"))]
    return (op_lines or lines or [type(error).__name__])[0]
