"""A traced function as a StableHLO module of the version that TensorFlow reads."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.extend import source_info_util
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from inference.lowering.value import Value, is_one
from inference.lowering.walk import Walk


class Module(NamedTuple):
    """A serialized module; `kept` are the places of the inputs that it takes."""

    data: bytes
    version: int  # of the calling convention
    kept: tuple


def stablehlo_of(function, shapes):
    """The module of a function of arrays of these shapes, which may have symbolic sizes."""
    exported = export.export(jax.jit(function), platforms=["cpu"])(*shapes)
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
        data = stablehlo.serialize_portable_artifact(module, readable_version())
    return Module(data, exported.calling_convention_version, exported.module_kept_var_idx)


def readable_version():
    """JAX writes StableHLO of a month ago, jax2tf too, and a TensorFlow that is older cannot read `erf` in it."""
    return stablehlo.get_version_from_compatibility_requirement(
        stablehlo.StablehloCompatibilityRequirement.WEEK_12
    )


class Plain(Walk):
    """A walk whose target is JAX itself: the function without marks and calls, as it is where no platform is special."""

    def __init__(self):
        super().__init__(Target())
        self.bound = []  # (equation, its operands, where in the user's code) in order

    def __call__(self, traced, *arrays):
        """The outputs of what was traced, in order."""
        values = self.outputs(traced, dict(zip(traced.inputs, arrays, strict=True))).values()
        return [jnp.asarray(self.whole(value)) for value in values]

    def primitive(self, eqn, operands):
        given = [self.whole(value) for value in operands]
        self.bound.append((eqn, given, self.place))
        with source_info_util.user_context(
            eqn.source_info.traceback
        ):  # where an error of the converter shall be
            compute = (
                as_convolution
                if eqn.primitive.name == "dot_general" and lay_deep(eqn, *operands)
                else bound
            )
            return self.results(eqn, operands, lambda: compute(eqn, *given))


class Target:
    """What `Walk` asks of a target, in JAX's own words."""

    layers: ClassVar = {}
    table: ClassVar = {"reshape": lambda target, x, new_sizes: jnp.reshape(x, new_sizes)}

    def operand(self, value: Value):
        return value.data

    def expanded(self, value: Value):
        return jnp.broadcast_to(value.data, value.shape)


def bound(eqn, *operands):
    """The results of an equation for other operands."""
    if eqn.primitive.name == "gather" and picks(eqn, *operands):
        return picked(eqn, *operands)
    if eqn.primitive.name == "dot_general" and lies_deep(eqn, *operands):
        return as_convolution(eqn, *operands)
    return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))


def picks(eqn, operand, indices):
    """Whether a gather is `x[:, 2]`, `x[:, 1:3, 0]` or `x[:, [3, 1]]` of a free batch, for which TFLite has no gather."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if (
        all(isinstance(d, int) for d in sizes)
        or numbers.operand_batching_dims
        or not isinstance(indices, np.ndarray)
    ):
        return False
    last = [operand.shape[axis] - sizes[axis] for axis in numbers.start_index_map]
    return all(isinstance(d, int) for d in last) and bool(
        np.all((indices >= 0) & (indices <= last))
    )


def picked(eqn, operand, indices):
    """Such a gather as slices, one for each row of the indices."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    slices = []
    for row in indices.reshape(-1, indices.shape[-1]):
        starts = dict(zip(numbers.start_index_map, map(int, row), strict=True))
        starts = [starts.get(axis, 0) for axis in range(operand.ndim)]
        found = lax.slice(
            operand, starts, [start + size for start, size in zip(starts, sizes, strict=True)]
        )
        slices.append(jnp.squeeze(found, numbers.collapsed_slice_dims))
    found = jnp.stack(slices).reshape(*indices.shape[:-1], *slices[0].shape)
    offsets = numbers.offset_dims
    others = [axis for axis in range(found.ndim) if axis not in offsets]
    return jnp.moveaxis(found, range(found.ndim), [*others, *offsets])


def lies_deep(eqn, x, y):
    """Whether a matrix multiplies the last of four axes or more, the first of which is 1: TFLite's converter trips over that."""
    return x.ndim > 3 and is_one(x.shape[0]) and by_matrix(eqn, x, y)


def lay_deep(eqn, x, y):
    """Whether it multiplies what was one pixel just now: the converter undoes the reshaping, and trips as well."""
    made, (source, *_) = x.origin or (None, [x])
    is_pixel = len(source.shape) > 3 and all(map(is_one, source.shape[:-1]))
    return (
        is_pixel and made is not None and made.primitive.name == "reshape" and by_matrix(eqn, x, y)
    )


def by_matrix(eqn, x, y):
    (ours, theirs), batch = eqn.params["dimension_numbers"]
    return len(y.shape) == 2 and ours == (len(x.shape) - 1,) and len(theirs) == 1 and not any(batch)


def as_convolution(eqn, x, y):
    """Such a product as a convolution of one pixel."""
    (_, theirs), _ = eqn.params["dimension_numbers"]
    kernel = jnp.moveaxis(y, theirs[0], 0)[None, None]
    pixels = x.reshape(1, -1, x.shape[-2], x.shape[-1])
    precision = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
    layout = ("NHWC", "HWIO", "NHWC")
    found = lax.conv_general_dilated(
        pixels, kernel, (1, 1), "VALID", dimension_numbers=layout, **precision
    )
    return found.reshape(eqn.outvars[0].aval.shape)
