"""The jax2tf route, for ops that the native tables lack: StableHLO -> TFLite -> tf2onnx.

As in jax2tf, the function becomes one XlaCallModule op, which TensorFlow's converter lowers. jax2tf
itself is not used, since it writes a newer StableHLO than TensorFlow reads. ONNX is converted from
the TFLite file, since tf2onnx cannot convert XlaCallModule in TensorFlow's own graphs.
"""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jaxtyping import PyTree

from inference.child import Crash, locally
from inference.fallback.in_tensorflow import onnx_of_tflite, save_module
from inference.lowering.complex_numbers import dft_matrix, real_dft_p
from inference.lowering.trace import Traced, trace
from inference.lowering.value import Value, is_one
from inference.lowering.walk import Target, Walk
from inference.packages import needed, quiet
from inference.quantize_onnx import NO_NAMES
from inference.runtimes import Arrays
from inference.to_tflite import converted, free, in_order
from utils import UserError, first_line
from utils.files import atomic_write

Specs = dict[str, Any]  # {name: shape and dtype}, also of symbolic sizes
Operands = list[Any]  # arrays of JAX or NumPy
Equation = tuple[JaxprEqn, Operands, str]  # and its location in the user's code


def tflite_by_jax2tf(
    function: Callable[..., Any],
    weights: PyTree,
    inputs: PyTree,
    batch: int | None,
    path: Path,
    *,
    quantize: str | None = None,
    samples: list[Arrays] | None = None,
    exclude: Sequence[str] = (),
    call: Callable[..., Any] = locally,
) -> None:
    """Write (weights, inputs) -> outputs as a TFLite file; see `trace` and `write_tflite`."""
    if exclude:
        raise UserError(NO_NAMES)
    needed("tensorflow")
    options = {"quantize": quantize, "samples": samples, "call": call}
    atomic_write(path, file_bytes(as_tflite, function, weights, inputs, batch, **options))


def onnx_by_jax2tf(
    function: Callable[..., Any],
    weights: PyTree,
    inputs: PyTree,
    batch: int | None,
    path: Path,
    opset: int = 20,
    call: Callable[..., Any] = locally,
) -> None:
    """Write (weights, inputs) -> outputs as an ONNX file of this opset; see `trace`."""
    needed("tensorflow", "tf2onnx", "onnx", "onnxruntime")
    options = {"opset": opset, "call": call}
    atomic_write(path, file_bytes(as_onnx, function, weights, inputs, batch, **options))


def file_bytes(
    convert: Callable[..., bytes],
    function: Callable[..., Any],
    weights: PyTree,
    inputs: PyTree,
    batch: int | None,
    **options: Any,
) -> bytes:
    """The bytes of a file; raises an error that names the op that cannot be converted."""
    plain = Plain()

    def attempt(plain: "Plain", batch: int | None) -> bytes:
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


def find_culprit(convert: Callable[..., bytes], equations: "list[Equation]") -> str | None:
    """The first equation that cannot be converted alone, with its location in the user's code.

    A cast to a dtype that the format does not accept as an input or output is only reported if no
    other equation fails, since usually the use of its result fails.
    """
    tried, failed_cast = set(), None
    for eqn, operands, place in equations:
        if all(isinstance(x, np.ndarray) for x in operands):
            continue  # computed from sizes only; there is nothing to convert
        name = eqn.primitive.name
        avals: list[Any] = [var.aval for var in (*eqn.invars, *eqn.outvars)]
        dtypes = [str(aval.dtype) for aval in avals]
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


def succeeds(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except Exception:
        return False
    return True


def one_result(
    eqn: JaxprEqn, operands: Operands, index: int
) -> tuple[Callable[..., list[jax.Array]], Specs, Specs]:
    """(a function that returns one result of an equation, its input specs, its output spec)"""
    positions = [i for i, x in enumerate(operands) if not isinstance(x, np.ndarray)]

    def function(*arrays: jax.Array) -> list[jax.Array]:
        given = dict(zip(positions, arrays, strict=True))
        result = evaluate(eqn, *(given.get(i, x) for i, x in enumerate(operands)))
        return [result[index] if eqn.primitive.multiple_results else result]

    inputs = {
        f"x{i}": jax.ShapeDtypeStruct(operands[i].shape, operands[i].dtype) for i in positions
    }
    return function, inputs, {"y": eqn.outvars[index].aval}


def as_tflite(
    function: Callable[..., Any],
    inputs: Specs,
    outputs: Specs,
    quantize: str | None = None,
    samples: list[Arrays] | None = None,
    call: Callable[..., Any] = locally,
) -> bytes:
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


def as_onnx(
    function: Callable[..., Any],
    inputs: Specs,
    outputs: Specs,
    opset: int = 18,
    call: Callable[..., Any] = locally,
) -> bytes:
    """The bytes of an ONNX file of the same function."""
    data = as_tflite(function, inputs, outputs, call=call)
    shapes = {
        name: tuple(d if isinstance(d, int) else str(d) for d in aval.shape)
        for name, aval in (inputs | outputs).items()
    }
    return call("converting TFLite to ONNX", onnx_of_tflite, data, shapes, opset)


class Module(NamedTuple):
    """A serialized module; `kept_inputs` are the indices of the inputs that it takes."""

    data: bytes
    version: int  # of the calling convention
    kept_inputs: tuple[int, ...]


def stablehlo_of(function: Callable[..., Any], shapes: Iterable[jax.ShapeDtypeStruct]) -> Module:
    """The module of a function of arrays of these shapes, which may have symbolic sizes."""
    exported = export.export(jax.jit(function), platforms=["cpu"])(*shapes)
    # JAX and jax2tf write the StableHLO of a month ago, in which an older TensorFlow cannot read
    # `erf`; it reads that of 12 weeks ago.
    version = stablehlo.get_version_from_compatibility_requirement(
        stablehlo.StablehloCompatibilityRequirement.WEEK_12
    )
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
        data = stablehlo.serialize_portable_artifact(module, version)
    return Module(data, exported.calling_convention_version, exported.module_kept_var_idx)


class Plain(Walk):
    """A walk whose target is JAX itself: a function without op marks, calls or platform choices."""

    def __init__(self) -> None:
        super().__init__(JaxTarget())
        self.equations = []  # (equation, its operands, its location in the user's code), in order

    def __call__(self, traced: Traced, *arrays: jax.Array) -> list[jax.Array]:
        """The outputs of the traced function, in order."""
        values = self.outputs(traced, dict(zip(traced.inputs, arrays, strict=True))).values()
        return [jnp.asarray(self.whole(value)) for value in values]

    def primitive(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        arrays = [self.whole(value) for value in operands]
        self.equations.append((eqn, arrays, self.place))
        is_conv = eqn.primitive.name == "dot_general" and is_pixel_product(eqn, *operands)
        compute = product_by_convolution if is_conv else evaluate
        # The converter's errors then point to the user's code.
        with source_info_util.user_context(eqn.source_info.traceback):
            results = compute(eqn, *arrays)
        return self.results(eqn, operands, results if isinstance(results, list) else [results])


class JaxTarget(Target):
    """The target protocol of `Walk`, implemented with JAX."""

    def __init__(self) -> None:
        self.layers = {}
        self.table = {"reshape": lambda target, x, new_sizes: jnp.reshape(x, new_sizes)}

    def operand(self, value: Value) -> Any:
        return value.data

    def expanded(self, value: Value) -> jax.Array:
        return jnp.broadcast_to(value.data, value.shape)


def evaluate(eqn: JaxprEqn, *operands: Any) -> Any:
    """The results of an equation for other operands, in ops that TFLite's converter supports."""
    if eqn.primitive.name == "gather" and is_constant_gather(eqn, *operands):
        return gather_by_slices(eqn, *operands)
    if eqn.primitive.name == "dot_general" and is_deep_product(eqn, *operands):
        return product_by_convolution(eqn, *operands)
    if eqn.primitive is real_dft_p:
        return transform_by_product(*operands)
    return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))


def is_constant_gather(eqn: JaxprEqn, operand: Any, indices: Any) -> bool:
    """Whether a gather is `x[:, 2]`, `x[:, 1:3, 0]` or `x[:, [3, 1]]` with a free batch size.

    TFLite has no gather for these.
    """
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    has_fixed_size = all(isinstance(d, int) for d in sizes)
    if has_fixed_size or numbers.operand_batching_dims or not isinstance(indices, np.ndarray):
        return False
    last = [operand.shape[axis] - sizes[axis] for axis in numbers.start_index_map]
    if not all(isinstance(d, int) for d in last):
        return False
    return bool(np.all((indices >= 0) & (indices <= last)))


def gather_by_slices(eqn: JaxprEqn, operand: jax.Array, indices: np.ndarray) -> jax.Array:
    """The gather as slices, one for each row of the indices."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    slices = []
    for row in indices.reshape(-1, indices.shape[-1]):
        starts = dict(zip(numbers.start_index_map, map(int, row), strict=True))
        starts = [starts.get(axis, 0) for axis in range(operand.ndim)]
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        piece = lax.slice(operand, starts, ends)
        slices.append(jnp.squeeze(piece, numbers.collapsed_slice_dims))
    result = jnp.stack(slices).reshape(*indices.shape[:-1], *slices[0].shape)
    offsets = numbers.offset_dims
    others = [axis for axis in range(result.ndim) if axis not in offsets]
    return jnp.moveaxis(result, range(result.ndim), [*others, *offsets])


def is_deep_product(eqn: JaxprEqn, x: Any, y: Any) -> bool:
    """Whether a matrix multiplies the last of four or more axes, the first of which is 1.

    TFLite's converter fails on such products.
    """
    return x.ndim > 3 and is_one(x.shape[0]) and is_matrix_product(eqn, x, y)


def transform_by_product(x: jax.Array) -> jax.Array:
    """The Fourier transform of real numbers as a product, see `real_dft_p`."""
    count = x.shape[-1]
    y = jnp.matmul(x, dft_matrix(count).astype(x.dtype), precision="highest")
    return jnp.swapaxes(y.reshape(*x.shape[:-1], 2, count // 2 + 1), -1, -2)


def is_pixel_product(eqn: JaxprEqn, x: Value, y: Value) -> bool:
    """Whether a matrix multiplies the reshaped channels of one pixel.

    The converter removes the reshape, and then fails on the product.
    """
    made, (source, *_) = x.origin or (None, [x])
    is_pixel = len(source.shape) > 3 and all(map(is_one, source.shape[:-1]))
    is_reshaped = made is not None and made.primitive.name == "reshape"
    return is_pixel and is_reshaped and is_matrix_product(eqn, x, y)


def is_matrix_product(eqn: JaxprEqn, x: Any, y: Any) -> bool:
    (x_axes, y_axes), batch = eqn.params["dimension_numbers"]
    is_last_axis = x_axes == (len(x.shape) - 1,)
    return len(y.shape) == 2 and is_last_axis and len(y_axes) == 1 and not any(batch)


def product_by_convolution(eqn: JaxprEqn, x: jax.Array, y: jax.Array) -> jax.Array:
    """The product as a convolution with a kernel of one pixel."""
    (_, y_axes), _ = eqn.params["dimension_numbers"]
    kernel = jnp.moveaxis(y, y_axes[0], 0)[None, None]
    pixels = x.reshape(1, -1, x.shape[-2], x.shape[-1])
    precision = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
    layout = ("NHWC", "HWIO", "NHWC")
    result = lax.conv_general_dilated(
        pixels, kernel, (1, 1), "VALID", dimension_numbers=layout, **precision
    )
    aval: Any = eqn.outvars[0].aval
    return result.reshape(aval.shape)
