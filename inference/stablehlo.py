"""A traced function as a StableHLO module of the version that TensorFlow reads."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from inference.lowering.value import Value
from inference.lowering.walk import Walk


class Module(NamedTuple):
    """A serialized module; `kept` are the places of the inputs that it takes, `outputs` the shapes and types of its results."""

    data: bytes
    version: int  # of the calling convention
    kept: tuple
    outputs: tuple


def stablehlo_of(function, shapes):
    """The module of a function of arrays of these shapes, which may have symbolic sizes."""
    exported = export.export(jax.jit(function), platforms=["cpu"])(*shapes)
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
        data = stablehlo.serialize_portable_artifact(module, readable_version())
    return Module(data, exported.calling_convention_version, exported.module_kept_var_idx, exported.out_avals)


def readable_version():
    """JAX writes StableHLO of a month ago, jax2tf too, and a TensorFlow that is older cannot read `erf` in it."""
    return stablehlo.get_version_from_compatibility_requirement(stablehlo.StablehloCompatibilityRequirement.WEEK_12)


class Plain(Walk):
    """A walk whose target is JAX itself: the function without marks and calls, as it is where no platform is special."""

    def __init__(self):
        super().__init__(Target())
        self.bound = []  # (equation, its operands) in order

    def __call__(self, traced, *arrays):
        """The outputs of what was traced, in order."""
        values = self.outputs(traced, dict(zip(traced.inputs, arrays, strict=True))).values()
        return [jnp.asarray(self.whole(value)) for value in values]

    def primitive(self, eqn, operands):
        given = [self.whole(value) for value in operands]
        self.bound.append((eqn, given))
        return self.results(eqn, operands, lambda: bound(eqn, given))


class Target:
    """What `Walk` asks of a target, in JAX's own words."""

    table = {"reshape": lambda target, x, new_sizes: jnp.reshape(x, new_sizes)}  # noqa: RUF012

    def operand(self, value: Value):
        return value.data

    def expanded(self, value: Value):
        return jnp.broadcast_to(value.data, value.shape)


def bound(eqn, operands):
    """The results of an equation for other operands."""
    if eqn.primitive.name == "gather" and picks_along_one_axis(eqn, *operands):
        return picked(eqn, *operands)
    return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))


def picks_along_one_axis(eqn, operand, indices):
    """Whether a gather is `x[:, 2]`, `x[:, ::2]` or `x[:, [3, 1]]`, with a free size elsewhere, which TFLite's has not."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if not isinstance(indices, np.ndarray) or len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return False
    axis = numbers.start_index_map[0]
    whole = all(size == d for i, (size, d) in enumerate(zip(sizes, operand.shape, strict=True)) if i != axis)
    return whole and numbers.collapsed_slice_dims == (axis,) and not export.is_symbolic_dim(operand.shape[axis])


def picked(eqn, operand, indices):
    """Such a gather as slices."""
    numbers = eqn.params["dimension_numbers"]
    axis = numbers.start_index_map[0]
    places = np.clip(indices.ravel(), 0, operand.shape[axis] - 1)
    slices = [lax.slice_in_dim(operand, int(i), int(i) + 1, axis=axis) for i in places]
    found = jnp.moveaxis(jnp.concatenate(slices, axis), axis, 0)
    found = found.reshape(*indices.shape[:-1], *found.shape[1:])
    offsets = list(numbers.offset_dims)
    others = [i for i in range(found.ndim) if i not in offsets]
    return jnp.moveaxis(found, range(found.ndim), others + offsets)
