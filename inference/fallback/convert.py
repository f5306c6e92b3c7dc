"""The jax2tf route, for ops that the native tables lack: StableHLO -> TFLite -> tf2onnx.

As in jax2tf, the function becomes one XlaCallModule op, which TensorFlow's converter lowers. jax2tf
itself is not used, since it writes a newer StableHLO than TensorFlow reads. ONNX is converted from
the TFLite file, since tf2onnx cannot convert XlaCallModule in TensorFlow's own graphs.
"""

import tempfile
from functools import partial

import jax
import numpy as np

from inference.child import Crash, locally
from inference.excluded import NO_NAMES
from inference.fallback.onnx_of_tflite import onnx_of_tflite
from inference.fallback.saved_module import save_module
from inference.fallback.stablehlo import Plain, evaluate, stablehlo_of
from inference.lowering.trace import trace
from inference.packages import needed, quiet
from inference.to_tflite import converted, free, in_order
from utils import UserError, first_line
from utils.files import atomic_write


def tflite_by_jax2tf(
    function, weights, inputs, batch, path, *, quantize=None, samples=None, exclude=(), call=locally
):
    """Write (weights, inputs) -> outputs as a TFLite file; see `trace` and `write_tflite`."""
    if exclude:
        raise UserError(NO_NAMES)
    needed("tensorflow")
    options = {"quantize": quantize, "samples": samples, "call": call}
    atomic_write(path, file_bytes(as_tflite, function, weights, inputs, batch, **options))


def onnx_by_jax2tf(function, weights, inputs, batch, path, opset=20, call=locally):
    """Write (weights, inputs) -> outputs as an ONNX file of this opset; see `trace`."""
    needed("tensorflow", "tf2onnx", "onnx", "onnxruntime")
    options = {"opset": opset, "call": call}
    atomic_write(path, file_bytes(as_onnx, function, weights, inputs, batch, **options))


def file_bytes(convert, function, weights, inputs, batch, **options):
    """The bytes of a file; raises an error that names the op that cannot be converted."""
    plain = Plain()

    def attempt(plain, batch):
        traced = trace(function, weights, inputs, batch)
        run = lambda *arrays: plain(traced, *arrays)  # noqa: E731
        return convert(run, traced.inputs, traced.outputs, **options)

    try:
        return attempt(plain, batch)
    except UserError:
        raise
    except Exception as error:  # what this route supports is only known by trying
        tried = partial(convert, call=options["call"])
        culprit = find_culprit(tried, plain.equations) or f"this model: {first_line(error)}"
        works_fixed = batch is None and succeeds(partial(attempt, Plain(), 2))
        fix = "; with a fixed batch size it can: pass --batch N" if works_fixed else ""
        crash = f": {error}" if isinstance(error, Crash) else ""
        raise UserError(f"the jax2tf route cannot convert {culprit}{crash}{fix}") from error


def find_culprit(convert, equations):
    """The first equation that cannot be converted alone, with its location in the user's code.

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


def as_tflite(function, inputs, outputs, quantize=None, samples=None, call=locally):
    """The bytes of a TFLite file of builtin ops.

    `inputs` and `outputs` are {name: shape and dtype} in the function's order.
    """
    with quiet():
        module = stablehlo_of(function, inputs.values())
    specs = [
        {name: (free(aval.shape), str(aval.dtype)) for name, aval in avals.items()}
        for avals in (inputs, outputs)
    ]
    with tempfile.TemporaryDirectory() as folder:
        call("reading StableHLO into TensorFlow", save_module, tuple(module), *specs, folder)
        data = converted(folder, quantize, samples, call)
    return call("naming the tensors", in_order, data, [*inputs], [*outputs])


def as_onnx(function, inputs, outputs, opset=18, call=locally):
    """The bytes of an ONNX file of the same function."""
    data = as_tflite(function, inputs, outputs, call=call)
    shapes = {
        name: tuple(d if isinstance(d, int) else str(d) for d in aval.shape)
        for name, aval in (inputs | outputs).items()
    }
    return call("converting TFLite to ONNX", onnx_of_tflite, data, shapes, opset)
