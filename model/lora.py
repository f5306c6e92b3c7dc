"""LoRA (Hu et al., 2021) and DoRA: train small factors added to the frozen weights of any model.

A chosen leaf W (..., in, out) becomes W + scale * a @ b, with the factors a (..., in, rank) and
b (rank, out), so a kernel (H, W, in, out) of a convolution counts as a matrix of H * W * in rows.
Stacked blocks have factors of their own each. The params are {name of a leaf: {"a": ..., "b": ...}}
and {name: leaf} of what is trained whole; all other weights are {name: leaf} in state["frozen"].
"""

import difflib
import math
import re
from collections.abc import Collection
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from model.base import Model
from model.layers.initializers import uniform_with_variance
from utils import is_stacked, named_leaves
from utils.forms import Count, Positive, checked


@checked
def lora(
    base: Model,
    leaves: tuple[str, ...],
    rank: Count = 8,
    alpha: Positive | None = None,
    rank_stabilized: bool = False,
    dora: bool = False,
    whole: tuple[str, ...] = (),
) -> Model:
    """Train factors of `rank` for the weights of `base` that the regexes `leaves` match, and the
    weights that `whole` matches, such as a new head; all others stay as `training.pretrained` has
    them. The product of two factors counts `alpha / rank` times, `alpha` being `rank` by default,
    or with `rank_stabilized` `alpha / sqrt(rank)` times (Kalajdzievski, 2023). `dora` also trains
    the length of each column of a weight, apart from its direction (Liu et al., 2024)."""
    shapes, plain_state = jax.eval_shape(base.init, jax.random.key(0))
    structure, shapes = jax.tree.structure(shapes), named_leaves(shapes)
    if not isinstance(plain_state, dict):
        raise ValueError(f"base: its state must be a dict, got {type(plain_state).__name__}")
    trained = matching("whole", whole, shapes)
    chosen = [name for name in matching("leaves", leaves, shapes) if name not in trained]
    check_chosen({name: shapes[name].shape for name in chosen}, rank)
    scale = (alpha or rank) / (math.sqrt(rank) if rank_stabilized else rank)

    def init(key: Array) -> tuple[PyTree, PyTree]:
        params, state = base.init(key)
        params, keys = (
            named_leaves(params),
            jax.random.split(jax.random.fold_in(key, 1), len(chosen)),
        )
        factors = {
            name: factors_init(own, params[name], rank, is_stacked(name), dora)
            for name, own in zip(chosen, keys, strict=True)
        }
        frozen = {name: leaf for name, leaf in params.items() if name not in trained}
        return factors | {name: params[name] for name in trained}, state | {"frozen": frozen}

    def merge(params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """(params, state) of the base with the factors in its weights."""
        dtype = jax.tree.leaves(params)[0].dtype  # of `training.precision`
        frozen = {name: weight.astype(dtype) for name, weight in state["frozen"].items()}
        for name in chosen:  # the sum of the two is rounded only once
            change = scale * product(params[name], is_stacked(name))
            weight = state["frozen"][name] + change
            if dora:  # the length counts as a constant in the gradient, as in the paper
                length = jax.lax.stop_gradient(lengths(weight, is_stacked(name)))
                weight = weight * (params[name]["length"] / jnp.maximum(length, 1e-12))
            frozen[name] = weight.astype(dtype)
        merged = frozen | {name: params[name] for name in trained}
        plain_state = {key: value for key, value in state.items() if key != "frozen"}
        return jax.tree.unflatten(structure, [merged[name] for name in shapes]), plain_state

    def apply(
        params: PyTree, state: PyTree, x: PyTree, *, train: bool = False, key: Array | None = None
    ) -> tuple[PyTree, PyTree]:
        output, plain_state = base.apply(*merge(params, state), x, train=train, key=key)
        return output, plain_state | {"frozen": state["frozen"]}

    start = partial(with_lengths, chosen) if dora else None
    exact = base.exact_inputs
    return Model(init, apply, base.cache, base, merge, start, base.inputs, exact_inputs=exact)


def check_chosen(shapes: dict[str, tuple[int, ...]], rank: int) -> None:
    """Refuse weights {name: shape} that cannot have factors, and a rank that none of them has."""
    if not shapes:
        raise ValueError("leaves: must name at least one leaf that is not trained whole")
    highest = {}
    for name, shape in shapes.items():
        own = shape[is_stacked(name) :]
        if len(own) < 2:
            why = f"{name} {shape} is not a matrix; name it in `whole`, or match fewer"
            raise ValueError(f"leaves: {why}")
        highest[name] = min(math.prod(own[:-1]), own[-1])
    largest = max(highest, key=lambda name: highest[name])
    if rank > highest[largest]:
        why = f"the highest rank that a weight can have is that of {largest} {shapes[largest]}"
        raise ValueError(f"rank: must be at most {highest[largest]}, got {rank}; {why}")


def factors_init(
    key: Array, weight: Float[Array, "*axes out_dim"], rank: int, stacked: bool, dora: bool
) -> dict[str, Array]:
    """Factors whose product is 0: `a` is drawn like a linear layer of PyTorch, `b` is 0."""
    if stacked:
        each = partial(factors_init, rank=rank, stacked=False, dora=dora)
        return jax.vmap(each)(jax.random.split(key, len(weight)), weight)
    *axes, out = weight.shape
    a = uniform_with_variance(key, (*axes, rank), 1 / (3 * math.prod(axes)))
    factors = {"a": a.astype(weight.dtype), "b": jnp.zeros((rank, out), weight.dtype)}
    return factors | ({"length": lengths(weight, False)} if dora else {})


def lengths(weight: Float[Array, "*axes out_dim"], stacked: bool) -> Float[Array, "*ones out_dim"]:
    """The Euclidean length of each column (..., in, out) of a leaf, with axes of size 1."""
    axes = tuple(range(stacked, weight.ndim - 1))
    return jnp.sqrt(jnp.sum(weight**2, axes, keepdims=True))


def with_lengths(names: list[str], params: PyTree, state: PyTree) -> PyTree:
    """The params with the lengths of the weights that were loaded, with which DoRA begins."""
    own = {name: lengths(state["frozen"][name], is_stacked(name)) for name in names}
    return params | {name: params[name] | {"length": own[name]} for name in names}


def product(factors: dict[str, Array], stacked: bool) -> Float[Array, "*axes out_dim"]:
    """The change of a leaf, without its scale."""
    multiply = partial(jnp.tensordot, axes=1)
    return (jax.vmap(multiply) if stacked else multiply)(factors["a"], factors["b"])


def matching(argument: str, regexes: tuple[str, ...], names: Collection[str]) -> list[str]:
    """The names that the regexes match, each of which must match one."""
    for regex in regexes:
        try:
            if any(re.fullmatch(regex, name) for name in names):
                continue
        except re.error as error:
            raise ValueError(f"{argument}: {regex!r} is an invalid regex: {error}") from error
        near = difflib.get_close_matches(regex, names, n=4, cutoff=0.5) or list(names)[:4]
        raise ValueError(f"{argument}: {regex!r} matches no name; near ones are {', '.join(near)}")
    return [name for name in names if any(re.fullmatch(regex, name) for regex in regexes)]
