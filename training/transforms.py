"""Transforms of gradients, chains of them, and optimizers for groups of params."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from training.base import Number, Optimizer, Schedule
from utils import UserError, is_stacked, map_named, match_rules, named_leaves
from utils.forms import Count, NonNegative, Positive, PositiveShare, checked, regex

NO_DECAY = r"(.*/)?(bias|scale)"
BLOCKS = r"blocks/(\d+)(?:-(\d+))?/.*"  # a leaf of one block, or of several that are stacked
LAST = r"(norm|last|hidden|head)/.*"
NO_STEP = "takes no step, as it only changes gradients; end a chain with an optimizer, such as sgd"


def scale(factor: ArrayLike, tree: PyTree) -> PyTree:
    """A tree times a number; the leaves keep their dtypes, whatever the dtype of the number."""
    return jax.tree.map(lambda x: (factor * x).astype(x.dtype), tree)


def of_blocks(fn: Callable[..., Array]) -> Callable[..., Array]:
    """fn(leaf, ...) as a function of (name, leaf, ...) that treats stacked blocks one by one."""
    return lambda name, *leaves: (jax.vmap(fn) if is_stacked(name) else fn)(*leaves)


def stateless(
    change: Callable[[PyTree, PyTree], PyTree], kind: str = ""
) -> Annotated[Optimizer, "no part"]:
    """An optimizer without state, made from change(grads, params) -> updates."""
    return Optimizer(
        lambda params: {}, lambda grads, state, params=None: (change(grads, params), state), kind
    )


def kind_of(optimizer: Optimizer) -> str:
    """Optimizer.kind, also of an optimizer of Optax."""
    return getattr(optimizer, "kind", "")


def check_may_change(optimizer: Optimizer, by: str) -> None:
    """Refuse to change the updates of an optimizer that moves params back, such as lookahead."""
    if kind_of(optimizer) == "return":
        fix = f"write lookahead({by}(...)), not {by}(lookahead(...))"
        raise ValueError(f"optimizer: {by} would shorten the way back of lookahead; {fix}")


def check_rate(optimizer: Optimizer, by: str, fix: str) -> None:
    """Refuse to multiply all updates of a run with an optimizer that moves params back."""
    if kind_of(optimizer) == "return":
        raise UserError(f"{by} multiplies all updates, also the way back of lookahead; {fix}")


def strongest(kinds: Sequence[str], other: str) -> str:
    """The kind of several optimizers together; `other` if none of them takes a step."""
    return next((kind for kind in ("return", "step") if kind in kinds), other)


def add_decay(
    grads: PyTree, params: PyTree, weight_decay: Number, exclude: str, include: str = ".*"
) -> PyTree:
    """Add weight_decay * param to the leaves that `include` matches and `exclude` does not."""

    def decayed(name: str, g: Array, p: Array) -> Array:
        decays = re.fullmatch(include, name) and not re.fullmatch(exclude, name)
        return g + weight_decay * p if decays else g

    return map_named(decayed, grads, params)


def matching(
    init: Callable[[PyTree], PyTree], *rules: tuple[str, str]
) -> Callable[[PyTree], PyTree]:
    """An `init` that raises if the regex of a rule (regex, default) matches no name. Only the
    default itself and the empty regex may match no name."""
    required = [(rule, None) for rule, default in rules if rule not in ("", default)]

    def checked_init(params: PyTree) -> PyTree:
        match_rules(required, named_leaves(params))
        return init(params)

    return checked_init


def partition(
    label: Callable[[dict[str, Array]], dict[str, str]], optimizers: dict[str, Optimizer]
) -> Annotated[Optimizer, "no part"]:
    """Update each leaf by optimizers[key], where label({name: leaf}) -> {name: key}. Each optimizer
    sees its leaves as a flat dict {name: leaf}."""

    def split(tree: PyTree, keys: dict[str, str]) -> dict[str, dict[str, Array]]:
        parts = {key: {} for key in optimizers}
        for name, leaf in named_leaves(tree).items():
            parts[keys[name]][name] = leaf
        return parts

    def init(params: PyTree) -> PyTree:
        parts = split(params, label(named_leaves(params)))
        return {key: optimizer.init(parts[key]) for key, optimizer in optimizers.items()}

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        keys = label(named_leaves(grads))
        g, p = split(grads, keys), split(params, keys)
        updates, states = {}, {}
        for key, optimizer in optimizers.items():
            part, states[key] = optimizer.update(g[key], state[key], p[key])
            updates |= part
        return map_named(lambda name, _: updates[name], grads), states

    return Optimizer(init, update, strongest(list(map(kind_of, optimizers.values())), ""))


@checked
def clip_by_global_norm(max_norm: Positive) -> Optimizer:
    """Scale all gradients together, so that their joint norm is at most `max_norm`."""

    def clip(grads: PyTree, params: PyTree) -> PyTree:
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        return scale(jnp.minimum(1.0, max_norm / norm), grads)

    return stateless(clip, "gradients")


@checked
def clip_by_value(limit: Positive) -> Optimizer:
    """Clip every element of the gradients to [-limit, limit]."""
    clip = lambda grads, _: jax.tree.map(lambda g: jnp.clip(g, -limit, limit), grads)  # noqa: E731
    return stateless(clip, "gradients")


@checked
def decayed_weights(
    weight_decay: NonNegative, include: str = ".*", exclude: str = NO_DECAY
) -> Optimizer:
    """Add weight_decay * param to the gradients: an L2 penalty, if placed before an optimizer."""
    regex(include=include, exclude=exclude)
    decay = stateless(lambda g, params: add_decay(g, params, weight_decay, exclude, include))
    init = matching(decay.init, (include, ".*"), (exclude, NO_DECAY))
    return Optimizer(init, decay.update, "gradients")


def frozen() -> Optimizer:
    """Params that never change."""
    return stateless(lambda grads, params: jax.tree.map(jnp.zeros_like, grads))


@checked
def scaled(optimizer: Optimizer, rate: Positive) -> Optimizer:
    """The updates of an optimizer, multiplied by `rate`."""
    check_may_change(optimizer, "scaled")

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        updates, state = optimizer.update(grads, state, params)
        return scale(rate, updates), state

    return Optimizer(optimizer.init, update, kind_of(optimizer))


@checked
def lookahead(
    optimizer: Optimizer,
    every: Count = 5,
    share: PositiveShare = 0.5,
    schedule: Schedule | None = None,
) -> Optimizer:
    """An optimizer with slow params. After `every` steps, these move by a `share` of the way to the
    optimizer's params, which are then set to them (Zhang et al., 2019). The schedule multiplies the
    share: if it falls, the slow params become an average over more and more steps.

    No callback may lower the rate: this would shorten the way back to the slow params, too."""
    if kind_of(optimizer) == "return":
        raise ValueError("optimizer: is or contains a lookahead already; keep one of the two")

    def init(params: PyTree) -> PyTree:
        step = jnp.zeros((), jnp.int32)
        return {"step": step, "slow": params, "optimizer": optimizer.init(params)}

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, inner = optimizer.update(grads, state["optimizer"], params)
        step = state["step"] + 1
        factor = share if schedule is None else share * schedule(step)
        taken = jnp.where(step % every == 0, factor, 0)

        def moved(slow: Array, p: Array, u: Array) -> Array:
            return slow + (taken * (p + u - slow)).astype(slow.dtype)

        slow = jax.tree.map(moved, state["slow"], params, updates)
        go_back = step % every == 0
        updates = jax.tree.map(lambda s, p, u: jnp.where(go_back, s - p, u), slow, params, updates)
        return updates, {"step": step, "slow": slow, "optimizer": inner}

    return Optimizer(init, update, "return" if kind_of(optimizer) != "gradients" else "gradients")


@checked
def layer_decay(optimizer: Optimizer, decay: PositiveShare, last: str = LAST) -> Optimizer:
    """The updates of an optimizer, smaller by the factor `decay` for each layer further from the
    output (Bao et al., 2021). The layers are the blocks, by their numbers; leaves that the regex
    `last` matches come after them, and all other leaves before them."""
    regex(last=last)
    check_may_change(optimizer, "layer_decay")

    def init(params: PyTree) -> PyTree:
        if not blocks_of(named_leaves(params)):
            raise UserError("layer_decay: no param is in a block, as blocks/0/norm/scale is")
        return optimizer.init(params)

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        updates, state = optimizer.update(grads, state, params)
        blocks = blocks_of(named_leaves(updates))
        count = max(numbers[-1] for numbers in blocks.values()) + 1

        def scaled_leaf(name: str, u: Array) -> Array:
            if re.fullmatch(last, name):
                return u
            rates = decay ** (count - np.array(blocks.get(name, [-1]), float))
            rates = rates.reshape(-1, *(1,) * (u.ndim - 1)) if len(rates) > 1 else rates[0]
            return (u * rates).astype(u.dtype)

        return map_named(scaled_leaf, updates), state

    return Optimizer(matching(init, (last, LAST)), update, kind_of(optimizer))


def blocks_of(names: Iterable[str]) -> dict[str, range]:
    """{name of a leaf: the numbers of its blocks} of the leaves in a block or stacked blocks."""
    matches = {name: re.fullmatch(BLOCKS, name) for name in names}
    return {n: range(int(m[1]), int(m[2] or m[1]) + 1) for n, m in matches.items() if m}


def groups(rules: tuple[tuple[str, Optimizer], ...]) -> Optimizer:
    """Update each param by the optimizer of the first rule whose regex matches its whole name.
    A param that no rule matches is an error."""
    if not rules:
        raise ValueError("rules: must hold at least one [regex, optimizer], got none")
    for pair in rules:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], str) or not hasattr(pair[1], "init"):
            form = 'groups([["head/.*", adamw(lr=0.01)], [".*", frozen()]])'
            raise ValueError(f"rules: {pair!r} is not [regex, optimizer]; pass pairs, as {form}")
        rule, optimizer = pair
        regex(rules=rule)
        if kind_of(optimizer) == "gradients":
            raise ValueError(f"rules: {rule!r}: {NO_STEP}")

    def label(leaves: dict[str, Array]) -> dict[str, str]:
        keys = match_rules([(rule, str(i)) for i, (rule, _) in enumerate(rules)], leaves)
        if unmatched := ", ".join(name for name, key in keys.items() if key is None):
            fix = "end the rules with ['.*', an optimizer]"
            raise UserError(f"groups: no rule matches {unmatched}; {fix}")
        return {name: str(key) for name, key in keys.items()}

    return partition(label, {str(i): optimizer for i, (_, optimizer) in enumerate(rules)})


def chain(*optimizers: Optimizer) -> Annotated[Optimizer, "no part"]:
    """Apply optimizers one after another. Not a part: in a config, a list is a chain."""
    if not optimizers:
        raise ValueError("optimizers: a chain must hold at least one, got none")
    kinds = list(map(kind_of, optimizers))
    if problem := misplaced(kinds, [f"optimizer {i}" for i in range(len(kinds))]):
        raise ValueError(f"optimizers: {problem[1]}")

    def update(
        updates: PyTree, states: Sequence[PyTree], params: PyTree | None = None
    ) -> tuple[PyTree, list[PyTree]]:
        new_states = []
        for optimizer, state in zip(optimizers, states, strict=True):
            updates, state = optimizer.update(updates, state, params)
            new_states.append(state)
        return updates, new_states

    kind = strongest(kinds, "" if "" in kinds else "gradients")
    init = lambda params: [optimizer.init(params) for optimizer in optimizers]  # noqa: E731
    return Optimizer(init, update, kind)


def misplaced(kinds: Sequence[str], names: Sequence[str]) -> tuple[int, str] | None:
    """(the index of a part of a chain whose place must be a mistake, why), or None. Besides the
    kinds of Optimizer, there is "rate", for a part that has a learning rate."""
    kinds = ["step" if kind == "return" else kind for kind in kinds]
    for i, kind in enumerate(kinds):
        before = [j for j in range(i) if kinds[j] in ("step", "rate")]
        after = [later for later in kinds[i + 1 :] if later in ("step", "rate")]
        if kind == "gradients" and before and not after:
            name = names[before[-1]]
            why = f"{names[i]} changes gradients, but {name} has turned them into updates already"
            return i, f"{why}; put it before {name}"
        if kind == "step" and "step" in kinds[:i]:
            name = names[kinds.index("step")]
            why = f"{names[i]} would take the updates of {name} for gradients, and go uphill"
            return i, f"{why}; keep one of the two"
    return None


def scheduled(optimizer: Optimizer, schedule: Schedule) -> Optimizer:
    """The updates of an optimizer, multiplied by schedule(number of updates before)."""
    check_may_change(optimizer, "scheduled")

    def init(params: PyTree) -> PyTree:
        return {"step": jnp.zeros((), jnp.int32), "optimizer": optimizer.init(params)}

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        step = state["step"]
        updates, inner = optimizer.update(grads, state["optimizer"], params)
        return scale(schedule(step), updates), {"step": step + 1, "optimizer": inner}

    return Optimizer(init, update, kind_of(optimizer))
