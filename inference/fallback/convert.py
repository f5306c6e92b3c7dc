"""The jax2tf route, for ops that the native tables lack: StableHLO -> TFLite -> tf2onnx.

As in jax2tf, the function becomes one XlaCallModule op, which TensorFlow's converter lowers. jax2tf
itself is not used, since it writes a newer StableHLO than TensorFlow reads. ONNX is converted from
the TFLite file, since tf2onnx cannot convert XlaCallModule in TensorFlow's own graphs.
"""

from functools import partial

import jax
import numpy as np

from file_io import atomic_write
from inference.fallback.stablehlo import Plain, evaluate, stablehlo_of
from inference.lowering.trace import trace
from inference.packages import needed, quiet
from inference.to_tflite import converted, free
from utils import UserError, first_line


def tflite_by_jax2tf(function, weights, inputs, batch, path, *, quantize=None, samples=None):
    """Write (weights, inputs) -> outputs as a TFLite file; see `trace` and `write_tflite`."""
    needed("tensorflow")
    options = {"quantize": quantize, "samples": samples}
    atomic_write(path, file_bytes(as_tflite, function, weights, inputs, batch, **options))


def onnx_by_jax2tf(function, weights, inputs, batch, path, opset=20):
    """Write (weights, inputs) -> outputs as an ONNX file of this opset; see `trace`."""
    needed("tensorflow", "tf2onnx", "onnx", "onnxruntime")
    atomic_write(path, file_bytes(as_onnx, function, weights, inputs, batch, opset=opset))


def file_bytes(convert, function, weights, inputs, batch, **options):
    """The bytes of a file; raises an error that names the op that cannot be converted."""
    traced, plain = trace(function, weights, inputs, batch), Plain()
    try:
        return convert(
            lambda *arrays: plain(traced, *arrays), traced.inputs, traced.outputs, **options
        )
    except UserError:
        raise
    except Exception as error:  # no step of this route can say beforehand what it supports
        culprit = find_culprit(convert, plain.equations) or f"this model: {first_line(error)}"
        works_fixed = batch is None and succeeds(
            lambda: file_bytes(convert, function, weights, inputs, 2)
        )
        fix = "; with a fixed batch size it can: pass --batch N" if works_fixed else ""
        raise UserError(f"the jax2tf route cannot convert {culprit}{fix}") from error


def find_culprit(convert, equations):
    """The first equation that cannot be converted by itself, with its location in the user's code.

    A cast to a dtype that the format does not accept as an input or output is only reported if no
    other equation fails, since usually the use of its result fails.
    """
    tried, failed_cast = set(), None
    for eqn, operands, place in equations:
        if all(isinstance(x, np.ndarray) for x in operands):
            continue  # computed from sizes only; there is nothing to convert
        name = eqn.primitive.name
        dtypes = [str(var.aval.dtype) for var in (*eqn.invars, *eqn.outvars)]
        key = (name, *dtypes, str(eqn.params))
        if key in tried:
            continue
        tried.add(key)
        results = range(len(eqn.outvars))
        if all(succeeds(partial(convert, *one_result(eqn, operands, i))) for i in results):
            continue
        culprit = f"{name} of {dtypes[0]} ({place})"
        if name != "convert_element_type":
            return culprit
        failed_cast = failed_cast or culprit
    return failed_cast


def succeeds(attempt):
    try:
        attempt()
    except Exception:
        return False
    return True


def one_result(eqn, operands, index):
    """(a function that returns one result of an equation, its input specs, its output spec)"""
    positions = [i for i, x in enumerate(operands) if not isinstance(x, np.ndarray)]

    def function(*arrays):
        given = dict(zip(positions, arrays, strict=True))
        result = evaluate(eqn, *(given.get(i, x) for i, x in enumerate(operands)))
        return [result[index] if eqn.primitive.multiple_results else result]

    inputs = {
        f"x{i}": jax.ShapeDtypeStruct(operands[i].shape, operands[i].dtype) for i in positions
    }
    return function, inputs, {"y": eqn.outvars[index].aval}


def as_tflite(function, inputs, outputs, quantize=None, samples=None):
    """The bytes of a TFLite file of builtin ops.

    `inputs` and `outputs` are {name: shape and dtype} in the function's order.
    """
    with quiet():
        module = stablehlo_of(function, inputs.values())
        import tensorflow as tf
        from tensorflow.compiler.tf2xla.python.xla import call_module

        def call(*tensors):
            results = call_module(
                [tensors[i] for i in module.kept_inputs],
                version=module.version,
                module=module.data,
                Tout=[aval.dtype for aval in outputs.values()],
                Sout=[free(aval.shape) for aval in outputs.values()],
                platforms=["CPU"],
                disabled_checks=["shape_assertions"],
            )
            return dict(zip(outputs, map(tf.identity, results), strict=True))

        specs = [
            tf.TensorSpec(free(aval.shape), aval.dtype, name=name) for name, aval in inputs.items()
        ]
        graph = tf.function(call, autograph=False).get_concrete_function(*specs)
        return with_plain_names(converted(graph, tf.Module(), quantize, samples))


def with_plain_names(data):
    """Name a TFLite file's tensors as in its signature, since tf2onnx does not read signatures."""
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
    shapes = [{name: aval.shape for name, aval in avals.items()} for avals in (inputs, outputs)]
    with quiet():
        return onnx_of_tflite(data, *shapes, opset)
