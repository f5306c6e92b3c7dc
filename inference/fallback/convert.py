"""The old way, for what the tables of ops lack: StableHLO -> TFLite -> tf2onnx.

It is jax2tf's way: the function becomes one XlaCallModule op, which TensorFlow's converter takes apart. jax2tf itself is left
out, since it writes a newer StableHLO than TensorFlow reads; and with it tf2onnx's way from TensorFlow's own graphs, which
knows no such op.
"""

from functools import partial

import jax
import numpy as np

from inference.fallback.stablehlo import Plain, bound, stablehlo_of
from inference.lowering.trace import trace
from inference.packages import needed, quiet
from inference.to_tflite import converted, free
from utils import UserError, atomic_write, first_line


def tflite_by_jax2tf(function, weights, inputs, batch, path, *, quantize=None, samples=None):
    """Write (weights, inputs) -> outputs as a TFLite file; the arguments are those of `trace` and of `write_tflite`."""
    needed("tensorflow")
    atomic_write(
        path,
        written(as_tflite, function, weights, inputs, batch, quantize=quantize, samples=samples),
    )


def onnx_by_jax2tf(function, weights, inputs, batch, path, opset=20):
    """Write (weights, inputs) -> outputs as an ONNX file of this opset; the arguments are those of `trace`."""
    needed("tensorflow", "tf2onnx", "onnx", "onnxruntime")
    atomic_write(path, written(as_onnx, function, weights, inputs, batch, opset=opset))


def written(write, function, weights, inputs, batch, **options):
    """The bytes of a file, or an error that names what cannot be written."""
    traced, plain = trace(function, weights, inputs, batch), Plain()
    try:
        return write(
            lambda *arrays: plain(traced, *arrays), traced.inputs, traced.outputs, **options
        )
    except UserError:
        raise
    except Exception as error:  # of many kinds: no part of this way says beforehand what it can do
        told = culprit(write, plain.bound) or f"this model: {first_line(error)}"
        fixed = batch is None and succeeds(lambda: written(write, function, weights, inputs, 2))
        mend = "; with a batch of a fixed size it can: --batch N" if fixed else ""
        raise UserError(f"the way by jax2tf cannot do {told}{mend}") from error


def culprit(write, equations):
    """The first equation that cannot be written by itself, and where in the user's code it is.

    A conversion to a type of which the format has no inputs and outputs is blamed last: it is its use that fails.
    """
    tried, conversion = set(), None
    for eqn, operands, place in equations:
        name, types = (
            eqn.primitive.name,
            [str(var.aval.dtype) for var in (*eqn.invars, *eqn.outvars)],
        )
        kind = (name, *types, str(eqn.params))
        if all(isinstance(x, np.ndarray) for x in operands):
            continue  # nothing by itself: it is made of sizes alone
        alone = (
            []
            if kind in tried
            else [partial(write, *part(eqn, operands, i)) for i in range(len(eqn.outvars))]
        )
        tried.add(kind)
        if all(map(succeeds, alone)):
            continue
        told = f"{name} of {types[0]} ({place})"
        if name != "convert_element_type":
            return told
        conversion = conversion or told
    return conversion


def succeeds(attempt):
    try:
        attempt()
    except Exception:
        return False
    return True


def part(eqn, operands, result):
    """One result of an equation as a function of those of its operands that are no constants; its inputs, its output."""
    places = [i for i, x in enumerate(operands) if not isinstance(x, np.ndarray)]

    def function(*arrays):
        given = dict(zip(places, arrays, strict=True))
        found = bound(eqn, *(given.get(i, x) for i, x in enumerate(operands)))
        return [found[result] if eqn.primitive.multiple_results else found]

    inputs = {f"x{i}": jax.ShapeDtypeStruct(operands[i].shape, operands[i].dtype) for i in places}
    return function, inputs, {"y": eqn.outvars[result].aval}


def as_tflite(function, inputs, outputs, quantize=None, samples=None):
    """The bytes of a TFLite file of builtin ops; `inputs` and `outputs` are {name: shape and type} in the function's order."""
    with quiet():
        module = stablehlo_of(function, inputs.values())
        import tensorflow as tf
        from tensorflow.compiler.tf2xla.python.xla import call_module

        def call(*tensors):
            found = call_module(
                [tensors[i] for i in module.kept],
                version=module.version,
                module=module.data,
                Tout=[aval.dtype for aval in outputs.values()],
                Sout=[free(aval.shape) for aval in outputs.values()],
                platforms=["CPU"],
                disabled_checks=["shape_assertions"],
            )
            return dict(zip(outputs, map(tf.identity, found), strict=True))

        specs = [
            tf.TensorSpec(free(aval.shape), aval.dtype, name=name) for name, aval in inputs.items()
        ]
        graph = tf.function(call, autograph=False).get_concrete_function(*specs)
        return with_plain_names(converted(graph, tf.Module(), quantize, samples))


def with_plain_names(data):
    """A TFLite file whose tensors have the names of its signature, for readers that do not know signatures, as tf2onnx."""
    from tensorflow.lite.tools import flatbuffer_utils

    model = flatbuffer_utils.convert_bytearray_to_object(data)
    signature = model.signatureDefs[0]
    for tensor in [*signature.outputs, *signature.inputs]:
        model.subgraphs[signature.subgraphIndex].tensors[tensor.tensorIndex].name = tensor.name
    return bytes(flatbuffer_utils.convert_object_to_bytearray(model))


def as_onnx(function, inputs, outputs, opset=18):
    """The bytes of an ONNX file of the same function."""
    from inference.fallback.onnx_of_tflite import onnx_of_tflite

    data = as_tflite(function, inputs, outputs)
    shapes = [{name: aval.shape for name, aval in named.items()} for named in (inputs, outputs)]
    with quiet():
        return onnx_of_tflite(data, *shapes, opset)
