"""Write a traced function as a StableHLO module of the version that TensorFlow reads."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.extend import source_info_util
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from inference.lowering.complex_numbers import dft_matrix, real_dft_p
from inference.lowering.value import Value, is_one
from inference.lowering.walk import Target, Walk


class Module(NamedTuple):
    """A serialized module; `kept_inputs` are the indices of the inputs that it takes."""

    data: bytes
    version: int  # of the calling convention
    kept_inputs: tuple


def stablehlo_of(function, shapes):
    """The module of a function of arrays of these shapes, which may have symbolic sizes."""
    exported = export.export(jax.jit(function), platforms=["cpu"])(*shapes)
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
        data = stablehlo.serialize_portable_artifact(module, readable_version())
    return Module(data, exported.calling_convention_version, exported.module_kept_var_idx)


def readable_version():
    """The StableHLO version of 12 weeks ago.

    JAX and jax2tf write the version of a month ago, in which an older TensorFlow cannot read `erf`.
    """
    return stablehlo.get_version_from_compatibility_requirement(
        stablehlo.StablehloCompatibilityRequirement.WEEK_12
    )


class Plain(Walk):
    """A walk whose target is JAX itself: a function without op marks, calls or platform choices."""

    def __init__(self):
        super().__init__(JaxTarget())
        self.equations = []  # (equation, its operands, its location in the user's code), in order

    def __call__(self, traced, *arrays):
        """The outputs of the traced function, in order."""
        values = self.outputs(traced, dict(zip(traced.inputs, arrays, strict=True))).values()
        return [jnp.asarray(self.whole(value)) for value in values]

    def primitive(self, eqn, operands):
        arrays = [self.whole(value) for value in operands]
        self.equations.append((eqn, arrays, self.place))
        is_conv = eqn.primitive.name == "dot_general" and is_pixel_product(eqn, *operands)
        compute = product_by_convolution if is_conv else evaluate
        # The converter's errors then point to the user's code.
        with source_info_util.user_context(eqn.source_info.traceback):
            results = compute(eqn, *arrays)
        results = results if eqn.primitive.multiple_results else [results]
        return self.results(eqn, operands, results)


class JaxTarget(Target):
    """The target protocol of `Walk`, implemented with JAX."""

    layers: ClassVar = {}
    table: ClassVar = {"reshape": lambda target, x, new_sizes: jnp.reshape(x, new_sizes)}

    def operand(self, value: Value):
        return value.data

    def expanded(self, value: Value):
        return jnp.broadcast_to(value.data, value.shape)


def evaluate(eqn, *operands):
    """The results of an equation for other operands, in ops that TFLite's converter supports."""
    if eqn.primitive.name == "gather" and is_constant_gather(eqn, *operands):
        return gather_by_slices(eqn, *operands)
    if eqn.primitive.name == "dot_general" and is_deep_product(eqn, *operands):
        return product_by_convolution(eqn, *operands)
    if eqn.primitive is real_dft_p:
        return transform_by_product(*operands)
    return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))


def is_constant_gather(eqn, operand, indices):
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


def gather_by_slices(eqn, operand, indices):
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


def is_deep_product(eqn, x, y):
    """Whether a matrix multiplies the last of four or more axes, the first of which is 1.

    TFLite's converter fails on such products.
    """
    return x.ndim > 3 and is_one(x.shape[0]) and is_matrix_product(eqn, x, y)


def transform_by_product(x):
    """The Fourier transform of real numbers as a product, see `real_dft_p`."""
    count = x.shape[-1]
    y = jnp.matmul(x, dft_matrix(count).astype(x.dtype), precision="highest")
    return jnp.swapaxes(y.reshape(*x.shape[:-1], 2, count // 2 + 1), -1, -2)


def is_pixel_product(eqn, x, y):
    """Whether a matrix multiplies the reshaped channels of one pixel.

    The converter removes the reshape, and then fails on the product.
    """
    made, (source, *_) = x.origin or (None, [x])
    is_pixel = len(source.shape) > 3 and all(map(is_one, source.shape[:-1]))
    is_reshaped = made is not None and made.primitive.name == "reshape"
    return is_pixel and is_reshaped and is_matrix_product(eqn, x, y)


def is_matrix_product(eqn, x, y):
    (x_axes, y_axes), batch = eqn.params["dimension_numbers"]
    is_last_axis = x_axes == (len(x.shape) - 1,)
    return len(y.shape) == 2 and is_last_axis and len(y_axes) == 1 and not any(batch)


def product_by_convolution(eqn, x, y):
    """The product as a convolution with a kernel of one pixel."""
    (_, y_axes), _ = eqn.params["dimension_numbers"]
    kernel = jnp.moveaxis(y, y_axes[0], 0)[None, None]
    pixels = x.reshape(1, -1, x.shape[-2], x.shape[-1])
    precision = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
    layout = ("NHWC", "HWIO", "NHWC")
    result = lax.conv_general_dilated(
        pixels, kernel, (1, 1), "VALID", dimension_numbers=layout, **precision
    )
    return result.reshape(eqn.outvars[0].aval.shape)
