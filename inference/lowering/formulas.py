"""The functions of other libraries that the tables have as one op, for `recognize`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike
from jaxtyping import Array

from inference.lowering.value import Aval
from model.layers import activations as ours
from model.layers.norm import by_statistics, group_norm, layer_norm, rms_norm, standardize
from model.layers.op import op

Choice: TypeAlias = dict[str, Any]

# Ops for which model/layers has no layer.


@op(any_rank=True)
def relu6(x: Array) -> Array:
    return jax.nn.relu6(x)


@op(any_rank=True)
def selu(x: Array) -> Array:
    return jax.nn.selu(x)


@op(any_rank=True)
def soft_sign(x: Array) -> Array:
    return jax.nn.soft_sign(x)


@op(any_rank=True)
def hard_tanh(x: Array) -> Array:
    return jax.nn.hard_tanh(x)


@op
def logsumexp(x: Array, *, axes: tuple[int, ...]) -> Array:
    return jax.nn.logsumexp(x, axes)


@op
def softmax_along(x: Array, *, axis: int) -> Array:
    return jax.nn.softmax(x, axis)


@op
def log_softmax_along(x: Array, *, axis: int) -> Array:
    return jax.nn.log_softmax(x, axis)


@op
def weighted_mean(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    bias: Array | None = None,
    *,
    causal: bool,
    scale: float,
    lowest: float | None,
) -> Array:
    """Attention without its projections, for arrays of (batch, position, head, feature).

    The mask and the bias broadcast to (batch, head, position of q, position of k); the score of a
    masked position is `lowest`.
    """
    scores = scale * jnp.einsum("bthc,bshc->bhts", q, k)
    if bias is not None:
        scores = scores + bias
    if causal:
        past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mask = past if mask is None else past & mask
    if mask is not None:
        assert lowest is not None
        scores = jnp.where(mask, scores, lowest)
    return jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(scores), v)


# Functions of one array and of weights: a number for each of its channels.


class Formula(NamedTuple):
    """`op(x, **weights, **number, **choice)`.

    `number` names an argument whose value is one of the numbers in the model, and
    `choices(aval of x, equations)` are the other arguments that are possible for equations of a
    model. `definition` computes the same as `op` in a form that has no marks.
    """

    op: Callable
    weights: tuple = ()
    number: str = ""
    choices: Callable = lambda aval, eqns: [{}]
    definition: Callable | None = None


def reduced_axes(aval: Aval, eqns: Sequence[JaxprEqn]) -> list[Choice]:
    """The axes over which the equations reduce an array like x."""
    names = {"reduce_sum", "reduce_max"}
    found = {tuple(x.params["axes"]) for x in eqns if x.primitive.name in names}
    return [{"axes": tuple(map(int, axes))} for axes in found]


def reduced_axis(aval: Aval, eqns: Sequence[JaxprEqn]) -> list[Choice]:
    """The same for a single axis, counted from the last one."""
    axes = [choice["axes"] for choice in reduced_axes(aval, eqns)]
    return [{"axis": axis[0] - len(aval.shape)} for axis in axes if len(axis) == 1]


def params_of(x: Array, scale: ArrayLike = 1, bias: ArrayLike = 0) -> dict[str, Array]:
    """The params of a norm that has perhaps no scale or bias."""
    weights = {"scale": scale, "bias": bias}
    return {
        name: jnp.broadcast_to(jnp.asarray(value, x.dtype), x.shape[-1:])
        for name, value in weights.items()
    }


def channels_at_any_axis(function: Callable[..., Array]) -> Callable[..., Array]:
    """The function of an x with the channels last, for x with the channels at `axis`."""

    def moved(x: Array, *args: Array, axis: int, **kwargs: Any) -> Array:
        return jnp.moveaxis(function(jnp.moveaxis(x, axis, -1), *args, **kwargs), -1, axis)

    return moved


def either_axis(aval: Aval, eqns: Sequence[JaxprEqn]) -> list[Choice]:
    return [{"axis": -1}, {"axis": 1}] if len(aval.shape) > 2 else [{"axis": -1}]


@channels_at_any_axis
def affine(
    x: Array, mean: Array, std: ArrayLike = 1, inverse: ArrayLike = 1, **weights: Array
) -> Array:
    """Batch normalization with given statistics."""
    params = params_of(x, **weights)
    params["scale"] = params["scale"] * inverse / std
    return by_statistics(params, {"mean": mean, "var": jnp.ones_like(mean)}, x, eps=0.0)


def root_mean_square(x: Array, eps: Any, **weights: Array) -> Array:
    return rms_norm({"scale": params_of(x, **weights)["scale"]}, x, eps=eps)


def standardized(x: Array, eps: Any, axes: tuple[int, ...], **weights: Array) -> Array:
    """Over the features or over the pixels."""
    params = params_of(x, **weights)
    if axes == (x.ndim - 1,):
        return layer_norm(params, x, eps=eps)
    return group_norm(params, x, groups=x.shape[-1], eps=eps)


def standardized_axes(aval: Aval, eqns: Sequence[JaxprEqn]) -> list[Choice]:
    rank = len(aval.shape)
    known = ((rank - 1,), tuple(range(1, rank - 1)))
    return [choice for choice in reduced_axes(aval, eqns) if choice["axes"] in known]


def definition_of_standardized(
    x: Array, eps: Any, axes: tuple[int, ...], scale: ArrayLike = 1, bias: ArrayLike = 0
) -> Array:
    return standardize(x, axes, eps) * scale + bias


@channels_at_any_axis
def by_groups(x: Array, eps: Any, groups: int, **weights: Array) -> Array:
    return group_norm(params_of(x, **weights), x, groups=groups, eps=eps)


@channels_at_any_axis
def definition_of_by_groups(x: Array, eps: Any, groups: int, scale: Array, bias: Array) -> Array:
    grouped = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    y = standardize(grouped, (*range(1, x.ndim - 1), x.ndim), eps)
    return y.reshape(x.shape) * scale + bias


def groups_of_channels(aval: Aval, eqns: Sequence[JaxprEqn]) -> Iterator[Choice]:
    """The ways to split the last axis or the second one."""
    for shape in {x.params["new_sizes"] for x in eqns if x.primitive.name == "reshape"}:
        if len(shape) == len(aval.shape) + 1 > 3:
            yield {"axis": -1, "groups": shape[-2]}
            yield {"axis": 1, "groups": shape[1]}


WEIGHTS = ((), ("scale",), ("bias",), ("scale", "bias"))
ACTIVATIONS = [
    *(ours.relu, relu6, hard_tanh, ours.hard_sigmoid, ours.hard_swish, ours.gelu, ours.gelu_tanh),
    *(ours.sigmoid, ours.silu, ours.softplus, ours.mish, selu, soft_sign),
]
ELEMENTWISE = [
    *map(Formula, ACTIVATIONS),
    Formula(ours.elu, number="alpha"),
    Formula(ours.leaky_relu, number="slope"),
    *(
        Formula(affine, ("mean", factor, *weights), choices=either_axis)
        for factor in ("std", "inverse")
        for weights in WEIGHTS
    ),
]
REDUCING = [
    Formula(softmax_along, choices=reduced_axis),
    Formula(log_softmax_along, choices=reduced_axis),
    Formula(logsumexp, choices=reduced_axes),
    *(Formula(root_mean_square, weights, "eps") for weights in WEIGHTS[:2]),
    *(
        Formula(standardized, weights, "eps", standardized_axes, definition_of_standardized)
        for weights in WEIGHTS
    ),
]
GROUPS = [Formula(by_groups, WEIGHTS[-1], "eps", groups_of_channels, definition_of_by_groups)]
