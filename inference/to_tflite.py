"""Traced functions as TFLite files of builtin ops, through TensorFlow's converter."""

import warnings

from inference.lowering.walk import Walk
from inference.packages import needed, quiet
from utils import RunError, UserError, atomic_write

# Left in float when the rest is in int8: normalization, whose numbers span more than 256 steps can tell apart, and softmax.
KEPT = (
    *("MEAN", "SUM", "SQUARED_DIFFERENCE", "SQUARE", "RSQRT", "SQRT", "SUB", "MUL", "ADD", "DIV"),
    *("SOFTMAX", "LOG_SOFTMAX", "EXP", "LOG"),
)


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
            raise UserError(f"{name}: TFLite's ops take no {aval.dtype}, but {', '.join(sorted(TYPES))}; convert it in the model")


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

    specs = [tf.TensorSpec(free(aval.shape), aval.dtype, name=name) for name, aval in traced.inputs.items()]
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
        raise UserError("int8 asks for samples of real inputs, which say how large its numbers become")
    try:
        return in_int8(converter, samples) if quantize == "int8" else converter.convert()
    except Exception as error:  # of many kinds
        raise RunError(f"TensorFlow's converter refuses the model: {reason(error)}") from error


def in_int8(converter, samples):
    """Products and convolutions in int8; inputs and outputs in float, as they were."""
    from tensorflow.lite.tools.optimize.debugging.python import debugger  # only it can leave ops out

    def representative():
        yield from samples

    converter.representative_dataset = representative
    options = debugger.QuantizationDebugOptions(denylisted_ops=list(KEPT))
    with warnings.catch_warnings(action="ignore"):  # TensorFlow warns of its own interpreter, which it uses here
        debugging = debugger.QuantizationDebugger(converter=converter, debug_dataset=representative, debug_options=options)
        return debugging.get_nondebug_quantized_model()


def reason(error):
    """Of the converter's long message, the line that names the ops it cannot write."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("TF Select ops:", "Custom ops:"))]
    return (telling or lines or [type(error).__name__])[0]
