"""Single equations of a jaxpr: which are calls, no-ops, elementwise or constant, and those that
neither format has, written in JAX with equations that both formats have.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jaxtyping import Array

from inference.lowering.value import Size, Value, aval_of, broadcast, joint_shape, on_host

# {primitive that only calls a jaxpr: the parameter that holds the jaxpr}
CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "composite": "jaxpr",
}
IDENTITIES = {"copy", "copy_p", "stop_gradient", "optimization_barrier", "name"}
IDENTITIES |= {"sharding_constraint", "device_put"}

# Primitives whose operands may have 1 where the result has more.
ELEMENTWISE = """
    add sub mul div rem pow integer_pow max min clamp select_n convert_element_type
    eq ne lt le gt ge eq_to lt_to le_to and or xor not is_finite
    sign abs neg square nextafter reduce_precision
    exp exp2 expm1 log log1p sqrt rsqrt cbrt erf erfc erf_inv lgamma digamma logistic
    sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh
    ceil floor round shift_left shift_right_arithmetic shift_right_logical population_count
"""
ELEMENTWISE = set(ELEMENTWISE.split())
LARGE = 2**20  # numbers; the target computes a larger constant, unless its operands are as large


def is_identity(eqn: JaxprEqn) -> bool:
    name, params = eqn.primitive.name, eqn.params
    if name == "convert_element_type":
        return params["new_dtype"] == aval_of(eqn.invars[0]).dtype
    if name == "reduce_precision":
        full = jax.numpy.finfo(aval_of(eqn.invars[0]).dtype)
        return params["exponent_bits"] >= full.nexp and params["mantissa_bits"] >= full.nmant
    return name in IDENTITIES


def called(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr:
    """The jaxpr that an equation of CALLS calls; JAX 0.11 has another name for a composite's."""
    name = CALLS[eqn.primitive.name]
    return eqn.params[name if name in eqn.params else "call_jaxpr"]


def passes_operands(eqn: JaxprEqn) -> bool:
    """Whether the equation passes its operands on unchanged."""
    return eqn.primitive.name in CALLS or is_identity(eqn)


def open_jaxpr(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def needed_equations(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations that the results depend on, in order."""
    needed, kept = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}, []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            kept.append(eqn)
            needed |= {atom for atom in eqn.invars if not isinstance(atom, Literal)}
    return kept[::-1]


def can_fold(eqn: JaxprEqn, operands: Sequence[Value]) -> bool:
    """Whether the results are constants, not much larger than their operands; all sizes, also those
    to which an operand is broadcast, must be known."""
    if not all(value.constant for value in operands) or eqn.primitive.name == "dim_as_value":
        return False
    shapes = [x.shape for x in operands] + [aval_of(var).shape for var in eqn.outvars]
    if not all(isinstance(d, int) for shape in shapes for d in shape):
        return False
    size = sum(aval_of(var).size for var in eqn.outvars)
    return size <= max(LARGE, 2 * sum(value.data.size for value in operands))


def fold(eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    """The results of an equation of constants; a result made from one weight keeps its name."""
    shape = None
    if eqn.primitive.name in ELEMENTWISE and any(x.data_shape != x.shape for x in operands):
        shape = joint_shape([x.data_shape for x in operands if x.data_shape])
    with jax.ensure_compile_time_eval():  # the walk itself may be traced
        arrays = [broadcast(x.data, shape if shape and x.data_shape else x.shape) for x in operands]
        results = eqn.primitive.bind(*arrays, **eqn.params)
    results = results if eqn.primitive.multiple_results else [results]
    names = {value.name for value in operands} - {""}
    name = names.pop() if len(names) == 1 else ""
    return [
        Value(on_host(array), aval_of(var).shape, aval_of(var).dtype, name=name, data_shape=shape)
        for array, var in zip(results, eqn.outvars, strict=True)
    ]


def divisor_of_mean(eqn: JaxprEqn, operands: Sequence[Value], count: Value) -> bool:
    """Whether dividing the result of this equation, a sum, by `count` makes it a mean."""
    if eqn.primitive.name != "reduce_sum" or not count.constant or count.data.size != 1:
        return False
    if not jax.numpy.issubdtype(aval_of(eqn.outvars[0]).dtype, np.floating):  # a sum may overflow
        return False
    sizes = [operands[0].shape[axis] for axis in eqn.params["axes"]]
    return all(isinstance(size, int) for size in sizes) and bool(np.prod(sizes) == count.data)


def rewrite(eqn: JaxprEqn) -> Callable[..., Array] | None:
    """A function in JAX with the operands and results of an equation; None where it needs none."""
    name, params = eqn.primitive.name, eqn.params
    if name == "clz":
        return leading_zeros
    if name == "integer_pow" and params["y"] == 0:
        return jnp.ones_like
    if name == "one_minus_square":  # of JAX 0.11, in the gradient of tanh
        return lambda x: (1 - x) * (1 + x)
    if name == "conv_general_dilated" and not isinstance(params["feature_group_count"], int):
        return functools.partial(convolution_by_taps, **params)
    if name == "scatter" and params["update_jaxpr"] is not None:
        return functools.partial(scatter_apply, **params)
    return None


def convolution_by_taps(
    x: Array,
    weight: Array,
    *,
    dimension_numbers: lax.ConvDimensionNumbers,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    feature_group_count: Size,
    **_: object,
) -> Array:
    """A convolution in as many groups as there are examples, each of which has its own kernel: one
    product for each tap of the kernel."""
    x_spec, weight_spec, out_spec = dimension_numbers
    x = jnp.transpose(x, (x_spec[0], *x_spec[2:], x_spec[1]))
    weight = jnp.transpose(weight, (*weight_spec[2:], weight_spec[1], weight_spec[0]))
    *sizes, channels, outputs = weight.shape
    around = zip(padding, lhs_dilation, strict=True)
    config = [(0, 0, 0), *((low, high, step - 1) for (low, high), step in around), (0, 0, 0)]
    x = lax.pad(x, jnp.zeros((), x.dtype), config)
    x = x.reshape(*x.shape[:-1], feature_group_count, channels)
    weight = weight.reshape(*sizes, channels, feature_group_count, outputs // feature_group_count)
    geometry = list(zip(x.shape[1:-2], sizes, window_strides, rhs_dilation, strict=True))
    ends = [(n - (k - 1) * d - 1) // s * s + 1 for n, k, s, d in geometry]
    total: Any = 0
    for tap in itertools.product(*map(range, sizes)):
        starts = [i * d for i, d in zip(tap, rhs_dilation, strict=True)]
        parts = zip(starts, ends, window_strides, strict=True)
        seen = x[(slice(None), *(slice(low, low + end, step) for low, end, step in parts))]
        total = total + jnp.einsum("n...gc,cgo->n...go", seen, weight[tap])
    y = total.reshape(*total.shape[:-2], outputs)
    return jnp.transpose(y, tuple(np.argsort([out_spec[0], *out_spec[2:], out_spec[1]])))


def leading_zeros(x: Array) -> Array:
    """Sets every bit below the highest one, and counts the others."""
    size = 8 * x.dtype.itemsize
    for distance in (1, 2, 4, 8, 16, 32):
        if distance < size:
            x = x | lax.shift_right_logical(x, jnp.full((), distance, x.dtype))
    return jnp.asarray(size, x.dtype) - lax.population_count(x)


def scatter_apply(
    x: Array,
    indices: Array,
    updates: Array,
    *,
    update_jaxpr: Jaxpr,
    update_consts: Sequence[Any],
    unique_indices: bool,
    **params: Any,
) -> Array:
    """`x.at[indices].apply(f)`, which calls f once for each time that a position is named."""
    function = jaxpr_as_fun(ClosedJaxpr(update_jaxpr, update_consts))
    zero = jnp.zeros((), x.dtype)  # the update, which f does not read
    applied = functools.reduce(lambda f, _: jax.vmap(f), x.shape, lambda a: function(a, zero)[0])
    ones = jnp.ones(updates.shape, jnp.int32)
    params = {key: params[key] for key in ("dimension_numbers", "indices_are_sorted", "mode")}
    counts = lax.scatter_add(jnp.zeros(x.shape, jnp.int32), indices, ones, **params)
    if unique_indices:
        return jnp.where(counts > 0, applied(x), x)
    step = lambda i, x: jnp.where(counts > i, applied(x), x)  # noqa: E731
    return lax.fori_loop(0, counts.max(), step, x)
