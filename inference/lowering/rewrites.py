"""Equations that neither format has, written in JAX with equations that both formats have."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun


def rewrite(eqn):
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
    x,
    weight,
    *,
    dimension_numbers,
    window_strides,
    padding,
    lhs_dilation,
    rhs_dilation,
    feature_group_count,
    **_,
):
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
    total = 0
    for tap in itertools.product(*map(range, sizes)):
        starts = [i * d for i, d in zip(tap, rhs_dilation, strict=True)]
        parts = zip(starts, ends, window_strides, strict=True)
        seen = x[(slice(None), *(slice(low, low + end, step) for low, end, step in parts))]
        total = total + jnp.einsum("n...gc,cgo->n...go", seen, weight[tap])
    y = total.reshape(*total.shape[:-2], outputs)
    return jnp.transpose(y, np.argsort([out_spec[0], *out_spec[2:], out_spec[1]]))


def leading_zeros(x):
    """Sets every bit below the highest one, and counts the others."""
    size = 8 * x.dtype.itemsize
    for distance in (1, 2, 4, 8, 16, 32):
        if distance < size:
            x = x | lax.shift_right_logical(x, jnp.full((), distance, x.dtype))
    return jnp.asarray(size, x.dtype) - lax.population_count(x)


def scatter_apply(x, indices, updates, *, update_jaxpr, update_consts, unique_indices, **params):
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
