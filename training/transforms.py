"""Transforms of gradients, chains of them, and optimizers for groups of params."""

import re

import jax
import jax.numpy as jnp

from training.base import Optimizer, Schedule
from utils import (
    NonNegative,
    Positive,
    UserError,
    checked,
    map_named,
    match_rules,
    named_leaves,
    regex,
)

NO_DECAY = r"(.*/)?(bias|scale)"


def scale(factor, tree):
    """A tree times a number; the leaves keep their dtypes, whatever the dtype of the number."""
    return jax.tree.map(lambda x: (factor * x).astype(x.dtype), tree)


def stateless(change):
    """An optimizer without state, made from change(grads, params) -> updates."""
    return Optimizer(
        lambda params: {}, lambda grads, state, params=None: (change(grads, params), state)
    )


def add_decay(grads, params, weight_decay, exclude, include=".*"):
    """Add weight_decay * param to the leaves that `include` matches and `exclude` does not."""

    def decayed(name, g, p):
        decays = re.fullmatch(include, name) and not re.fullmatch(exclude, name)
        return g + weight_decay * p if decays else g

    return map_named(decayed, grads, params)


def matching(init, *rules):
    """`init`, but it raises when the regex of a rule (regex, default) matches no name. Only the
    default itself and the empty regex may match none."""
    required = [(rule, None) for rule, default in rules if rule not in ("", default)]

    def checked_init(params):
        match_rules(required, named_leaves(params))
        return init(params)

    return checked_init


def partition(label, optimizers):
    """Update each leaf by optimizers[key], where label({name: leaf}) -> {name: key}. Each optimizer
    sees its leaves as a flat dict {name: leaf}."""

    def split(tree, keys):
        parts = {key: {} for key in optimizers}
        for name, leaf in named_leaves(tree).items():
            parts[keys[name]][name] = leaf
        return parts

    def init(params):
        parts = split(params, label(named_leaves(params)))
        return {key: optimizer.init(parts[key]) for key, optimizer in optimizers.items()}

    def update(grads, state, params=None):
        keys = label(named_leaves(grads))
        g, p = split(grads, keys), split(params, keys)
        updates, states = {}, {}
        for key, optimizer in optimizers.items():
            part, states[key] = optimizer.update(g[key], state[key], p[key])
            updates |= part
        return map_named(lambda name, _: updates[name], grads), states

    return Optimizer(init, update)


@checked
def clip_by_global_norm(max_norm: Positive) -> Optimizer:
    """Scale all gradients together, so that their joint norm is at most `max_norm`."""

    def clip(grads, params):
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        return scale(jnp.minimum(1.0, max_norm / norm), grads)

    return stateless(clip)


@checked
def clip_by_value(limit: Positive) -> Optimizer:
    """Clip every element of the gradients to [-limit, limit]."""
    return stateless(lambda grads, _: jax.tree.map(lambda g: jnp.clip(g, -limit, limit), grads))


@checked
def decayed_weights(
    weight_decay: NonNegative, include: str = ".*", exclude: str = NO_DECAY
) -> Optimizer:
    """Add weight_decay * param to the gradients: an L2 penalty, if placed before an optimizer."""
    regex(include=include, exclude=exclude)
    decay = stateless(lambda g, params: add_decay(g, params, weight_decay, exclude, include))
    return Optimizer(matching(decay.init, (include, ".*"), (exclude, NO_DECAY)), decay.update)


def frozen() -> Optimizer:
    """Params that never change."""
    return stateless(lambda grads, params: jax.tree.map(jnp.zeros_like, grads))


@checked
def scaled(optimizer: Optimizer, rate: Positive) -> Optimizer:
    """The updates of an optimizer, multiplied by `rate`."""

    def update(grads, state, params=None):
        updates, state = optimizer.update(grads, state, params)
        return scale(rate, updates), state

    return Optimizer(optimizer.init, update)


def groups(rules: tuple[tuple[str, Optimizer], ...]) -> Optimizer:
    """Update each param by the optimizer of the first rule whose regex matches its whole name.
    A param that no rule matches is an error."""
    if not rules:
        raise ValueError("rules: must hold at least one [regex, optimizer], got none")
    for rule, _ in rules:
        regex(rules=rule)

    def label(leaves):
        keys = match_rules([(rule, str(i)) for i, (rule, _) in enumerate(rules)], leaves)
        if unmatched := ", ".join(name for name, key in keys.items() if key is None):
            fix = "end the rules with ['.*', an optimizer]"
            raise UserError(f"groups: no rule matches {unmatched}; {fix}")
        return keys

    return partition(label, {str(i): optimizer for i, (_, optimizer) in enumerate(rules)})


def chain(*optimizers: Optimizer):
    """Apply optimizers one after another. Not a part: in a config, a list is a chain."""
    if not optimizers:
        raise ValueError("optimizers: a chain must hold at least one, got none")

    def update(updates, states, params=None):
        new_states = []
        for optimizer, state in zip(optimizers, states, strict=True):
            updates, state = optimizer.update(updates, state, params)
            new_states.append(state)
        return updates, new_states

    return Optimizer(lambda params: [optimizer.init(params) for optimizer in optimizers], update)


def scheduled(optimizer: Optimizer, schedule: Schedule) -> Optimizer:
    """The updates of an optimizer, multiplied by schedule(number of updates before)."""

    def init(params):
        return {"step": jnp.zeros((), jnp.int32), "optimizer": optimizer.init(params)}

    def update(grads, state, params=None):
        step = state["step"]
        updates, inner = optimizer.update(grads, state["optimizer"], params)
        return scale(schedule(step), updates), {"step": step + 1, "optimizer": inner}

    return Optimizer(init, update)
