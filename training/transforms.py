"""Links of a chain, and what chooses parameters by name."""

import re

import jax
import jax.numpy as jnp

from training.base import Optimizer, Schedule
from training.ranges import nonnegative, positive, regex
from utils import UserError, map_named, match_rules, named_leaves

NO_DECAY = r"(.*/)?(bias|scale)"


def scale(factor, tree):
    """A tree times a number; the dtypes of the tree stay, whatever that of the number."""
    return jax.tree.map(lambda x: (factor * x).astype(x.dtype), tree)


def stateless(change):
    """An optimizer without state from change(grads, params) -> updates."""
    return Optimizer(
        lambda params: {}, lambda grads, state, params=None: (change(grads, params), state)
    )


def add_decay(grads, params, weight_decay, exclude, include=".*"):
    """weight_decay * parameter added to every leaf whose name `include` matches and `exclude` does not."""

    def decayed(name, g, p):
        return (
            g + weight_decay * p
            if re.fullmatch(include, name) and not re.fullmatch(exclude, name)
            else g
        )

    return map_named(decayed, grads, params)


def matching(init, *rules):
    """The same init, once every (regex, default) is known to match a name; the default, or an empty regex, may match none."""

    def checked(params):
        match_rules(
            [(rule, None) for rule, default in rules if rule not in ("", default)],
            named_leaves(params),
        )
        return init(params)

    return checked


def partition(label, optimizers):
    """One optimizer for each key of `optimizers`, over the leaves that label(tree) -> {name: key} gives it, as a flat dict."""

    def split(tree, keys):
        leaves = named_leaves(tree).items()
        return {
            key: {name: leaf for name, leaf in leaves if keys[name] == key} for key in optimizers
        }

    def init(params):
        parts = split(params, label(params))
        return {key: optimizer.init(parts[key]) for key, optimizer in optimizers.items()}

    def update(grads, state, params=None):
        keys = label(grads)
        g, p = split(grads, keys), split(params, keys)
        results = {
            key: optimizer.update(g[key], state[key], p[key])
            for key, optimizer in optimizers.items()
        }
        updates = {name: leaf for part, _ in results.values() for name, leaf in part.items()}
        return map_named(lambda name, _: updates[name], grads), {
            key: new for key, (_, new) in results.items()
        }

    return Optimizer(init, update)


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """All gradients scaled together, so that their joint norm is at most max_norm."""
    positive(max_norm=max_norm)

    def clip(grads, params):
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        return scale(jnp.minimum(1.0, max_norm / norm), grads)

    return stateless(clip)


def clip_by_value(limit: float) -> Optimizer:
    """Every element of the gradients brought into [-limit, limit]."""
    positive(limit=limit)
    return stateless(
        lambda grads, params: jax.tree.map(lambda g: jnp.clip(g, -limit, limit), grads)
    )


def decayed_weights(weight_decay: float, include: str = ".*", exclude: str = NO_DECAY) -> Optimizer:
    """weight_decay * parameter added to the gradients: an L2 penalty when it stands before an optimizer."""
    nonnegative(weight_decay=weight_decay)
    regex(include=include, exclude=exclude)
    link = stateless(lambda grads, params: add_decay(grads, params, weight_decay, exclude, include))
    return Optimizer(matching(link.init, (include, ".*"), (exclude, NO_DECAY)), link.update)


def frozen() -> Optimizer:
    """Parameters that never change."""
    return stateless(lambda grads, params: jax.tree.map(jnp.zeros_like, grads))


def scaled(optimizer: Optimizer, rate: float) -> Optimizer:
    """The updates of an optimizer times a rate of their own."""
    positive(rate=rate)

    def update(grads, state, params=None):
        updates, state = optimizer.update(grads, state, params)
        return scale(rate, updates), state

    return Optimizer(optimizer.init, update)


def groups(rules: tuple[tuple[str, Optimizer], ...]) -> Optimizer:
    """Each parameter changed by the optimizer of the first rule whose regex matches its whole name; every one needs a rule."""
    if not rules:
        raise ValueError("rules: must hold at least one [regex, optimizer], got none")
    for rule, _ in rules:
        regex(rules=rule)

    def label(tree):
        keys = match_rules(
            [(rule, str(i)) for i, (rule, _) in enumerate(rules)], named_leaves(tree)
        )
        if lost := [name for name, key in keys.items() if key is None]:
            raise UserError(
                f"groups: no rule matches {', '.join(lost)}; end the rules with ['.*', an optimizer]"
            )
        return keys

    return partition(label, {str(i): optimizer for i, (_, optimizer) in enumerate(rules)})


def chain(*optimizers: Optimizer):
    """Each optimizer changes the updates of the one before; not a part, since in a config a list is a chain."""
    if not optimizers:
        raise ValueError("optimizers: a chain must hold at least one, got none")

    def init(params):
        return [optimizer.init(params) for optimizer in optimizers]

    def update(updates, states, params=None):
        new_states = []
        for optimizer, state in zip(optimizers, states, strict=True):
            updates, state = optimizer.update(updates, state, params)
            new_states.append(state)
        return updates, new_states

    return Optimizer(init, update)


def scheduled(optimizer: Optimizer, schedule: Schedule) -> Optimizer:
    """The updates of an optimizer times schedule(number of updates so far)."""

    def init(params):
        return {"step": jnp.zeros((), jnp.int32), "optimizer": optimizer.init(params)}

    def update(grads, state, params=None):
        updates, inner = optimizer.update(grads, state["optimizer"], params)
        return scale(schedule(state["step"]), updates), {
            "step": state["step"] + 1,
            "optimizer": inner,
        }

    return Optimizer(init, update)
