"""Formulas of activations, as other libraries and users write them, that the tables have as one op.

A Replacement is a formula, and the op that computes the same. `recognize` looks for the formulas in
a model; what it finds becomes the op.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.stats import norm as normal

from inference.lowering import foreign_ops
from inference.lowering.steps import is_float
from model.layers import activations as ours

# Numbers in a formula for which the model may have any other; each is exact in every float type.
EPS, ALPHA, SCALE, LOWEST = 0.0068359375, 0.294921875, 0.0849609375, -7616.0
HOLES = {EPS: "eps", ALPHA: "alpha", SCALE: "scale", LOWEST: "lowest"}


class Replacement(NamedTuple):
    """`op(*arrays, **choice, **numbers)` computes `formula(*arrays, **choice)`.

    `numbers` are those that the model has in the formula's holes. `candidates(aval, part)` yields
    (the shapes of the arrays, choice) for a result like `aval`, where part is the list of equations
    before it. Arrays after the first `whole` ones may have 1 where the formula has more.
    """

    needs: frozenset  # primitives without which the formula cannot be there
    formula: Callable
    op: Callable
    candidates: Callable
    whole: int = 9


def like_result(aval, part):
    """One array like the result."""
    if is_float(aval.dtype):
        yield [aval], {}


def like_wide_result(aval, part):
    """`like_result` for functions that JAX has in float32 and float64 only."""
    if aval.dtype in (jnp.float32, jnp.float64):
        yield [aval], {}


# Activations.


def activation(needs, formula, op=None):
    return Replacement(frozenset(needs.split()), formula, op, like_result)


def gelus():
    half = 0.5**0.5

    def tanh(x, cubic):
        return jnp.tanh((2 / jnp.pi) ** 0.5 * (x + cubic))

    exact = [
        lambda x: jax.nn.gelu(x, approximate=False),
        lambda x: 0.5 * x * (1 + lax.erf(x * half)),
        lambda x: 0.5 * (x * (1 + lax.erf(x * half))),
        lambda x: x * (0.5 * (1 + lax.erf(x * half))),
    ]
    approximate = []
    for cubic in (
        lambda x: 0.044715 * x**3,
        lambda x: 0.044715 * (x * x * x),
        lambda x: 0.044715 * x * x * x,
    ):
        approximate += [
            lambda x, cubic=cubic: 0.5 * x * (1 + tanh(x, cubic(x))),
            lambda x, cubic=cubic: x * (0.5 * (1 + tanh(x, cubic(x)))),
        ]
    yield from (activation("mul", formula, ours.gelu) for formula in exact)
    by_cdf = activation("mul", lambda x: x * normal.cdf(x), ours.gelu)
    yield by_cdf._replace(candidates=like_wide_result)
    yield from (activation("tanh mul", formula, ours.gelu_tanh) for formula in approximate)


def leaky_relu(x, *, alpha):
    return ours.leaky_relu(x, float(alpha))


def elu(x, *, alpha=1.0):
    return ours.elu(x, float(alpha))


ACTIVATIONS = [
    *gelus(),
    activation("max", lambda x: jnp.maximum(x, 0), ours.relu),
    activation("max min", jax.nn.relu6, foreign_ops.relu6),
    activation(
        "clamp", lambda x: lax.clamp(x.dtype.type(0), x, x.dtype.type(6)), foreign_ops.relu6
    ),
    activation("max min", lambda x: jnp.clip(x, 0, 6), foreign_ops.relu6),
    activation("max min", jax.nn.hard_sigmoid, ours.hard_sigmoid),
    activation("max min", jax.nn.hard_swish, ours.hard_swish),
    activation("logistic", jax.nn.silu, ours.silu),
    activation("exp", lambda x: 1 / (1 + jnp.exp(-x)), ours.sigmoid),
    activation("exp", lambda x: x / (1 + jnp.exp(-x)), ours.silu),
    activation("log1p exp", jax.nn.softplus, ours.softplus),
    activation("log1p exp tanh", lambda x: x * jnp.tanh(jax.nn.softplus(x)), ours.mish),
    activation("select_n", lambda x: jax.nn.leaky_relu(x, ALPHA), leaky_relu),
    activation("select_n", lambda x: jnp.where(x > 0, x, ALPHA * x), leaky_relu),
    activation("expm1", lambda x: jax.nn.elu(x, ALPHA), elu),
    activation("expm1", jax.nn.elu, elu),
    activation("expm1", jax.nn.selu, foreign_ops.selu),
    activation("expm1", lambda x: jnp.where(x > 0, x, ALPHA * jnp.expm1(x)), elu),
    activation("expm1", lambda x: jnp.where(x > 0, x, jnp.expm1(x)), elu),
    activation("abs", jax.nn.soft_sign, foreign_ops.soft_sign),
    activation("select_n", jax.nn.hard_tanh, foreign_ops.hard_tanh),
    activation("max min", lambda x: jnp.clip(x, -1, 1), foreign_ops.hard_tanh),
]


# Softmax and what belongs to it, along any axis.


def axes_of_result(aval, part):
    if is_float(aval.dtype):
        yield from (([aval], {"axis": axis}) for axis in range(-1, -1 - len(aval.shape), -1))


def plain_softmax(x, axis):
    y = jnp.exp(x)
    return y / y.sum(axis, keepdims=True)


def from_logsumexp(x, axis):
    return x - jax.nn.logsumexp(x, axis, keepdims=True)


def softmax(x, axis):
    return ours.softmax(x) if axis == -1 else foreign_ops.softmax_along(x, axis=axis)


def log_softmax(x, axis):
    return ours.log_softmax(x) if axis == -1 else foreign_ops.log_softmax_along(x, axis=axis)


def reduced_arrays(aval, part):
    """The arrays of the model whose maximum along one axis has the shape of the result."""
    for eqn in part:
        if eqn.primitive.name == "reduce_max" and eqn.outvars[0].aval == aval:
            yield [eqn.invars[0].aval], {"axis": tuple(map(int, eqn.params["axes"]))}


EXP = frozenset({"exp", "reduce_sum"})
SOFTMAX = [
    *(
        Replacement(EXP, formula, softmax, axes_of_result)
        for formula in (jax.nn.softmax, plain_softmax)
    ),
    Replacement(EXP | {"log"}, jax.nn.logsumexp, foreign_ops.logsumexp, reduced_arrays),
    *(
        Replacement(EXP | {"log"}, formula, log_softmax, axes_of_result)
        for formula in (jax.nn.log_softmax, from_logsumexp)
    ),
]
