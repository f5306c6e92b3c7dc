"""What a run will be, from shapes alone: whether the model fits the data, and a table of its parameters."""

import os
import traceback
from functools import partial

import jax
import jax.numpy as jnp

from training.base import TrainState
from training.devices.sharding import shard_bytes
from training.update import zero_sums
from utils import UserError, first_line, format_bytes, named_leaves


def trace_shapes(model, objective, optimizer, example, batch_size, watch):
    """(params, state, {label: what it is called}): shapes alone, once everything that a step calls was traced with them."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((batch_size, *a.shape), a.dtype), example)
    trees = attempt("model: the parameters cannot be made", model.init, key)
    if not isinstance(trees, tuple) or len(trees) != 2:
        raise UserError("model: init(key) must answer (params, state), with {} for no state")
    params, state = trees
    for name, leaf in named_leaves(params).items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(
                f"model: the parameter {name} is {leaf.dtype}; only floats can be trained, the rest belongs into state"
            )
    metrics = trace_objective(objective, params, state, batch, key, train=True)
    evaluated = trace_objective(objective, params, state, batch, key, train=False)
    if jax.tree.structure(metrics) != jax.tree.structure(evaluated) or forms(metrics) != forms(
        evaluated
    ):
        raise UserError(
            f"objective: the metrics of training ({forms(metrics)}) and evaluation ({forms(evaluated)}) differ"
        )
    trace_optimizer(optimizer, params)
    return params, state, {"loss": ["loss"], **reported_names(objective, metrics, watch)}


def blueprint(objective, update, params, state, example, batch_size, watch):
    """The TrainState that a run will have, as shapes."""
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((batch_size, *a.shape), a.dtype), example)
    opt, ema = attempt("update: its state cannot be made", update.init, params)
    sums = jax.eval_shape(lambda: zero_sums(objective, params, state, batch, watch=watch))
    number = partial(jax.ShapeDtypeStruct, ())
    return TrainState(
        number(jnp.int32), number(jnp.uint32), params, state, opt, ema, sums, number(jnp.float32)
    )


def trace_objective(objective, params, state, batch, key, *, train):
    """The shapes of the metrics of one batch; the loss must be a number for each example, the state must keep its form."""
    step = lambda params, state, batch, key: objective(params, state, batch, key, train)  # noqa: E731
    what = f"model, loss or metrics do not fit the data, whose batches are ({forms(batch)})"
    answer = attempt(what, step, params, state, batch, key)
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise UserError("objective: must answer (losses, state, metrics)")
    losses, new_state, metrics = answer
    size = jax.tree.leaves(batch)[0].shape[0]
    if getattr(losses, "shape", None) != (size,):
        raise UserError(
            f"loss: must be a number for each of the {size} examples of a batch, found {losses}"
        )
    if jax.tree.structure(new_state) != jax.tree.structure(state) or forms(new_state) != forms(
        state
    ):
        raise UserError(
            f"model: apply changes the form of its state, from ({forms(state)}) to ({forms(new_state)})"
        )
    return metrics


def trace_optimizer(optimizer, params):
    """Its updates must have the form of the parameters, its state must keep its own."""
    state = attempt("optimizer: its state cannot be made", optimizer.init, params)
    answer = attempt(
        "optimizer or schedule: the update fails", optimizer.update, params, state, params
    )
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise UserError("optimizer: update must answer (updates, state)")
    for what, new, old in (("updates", answer[0], params), ("state", answer[1], state)):
        if jax.tree.structure(new) != jax.tree.structure(old) or forms(new) != forms(old):
            raise UserError(
                f"optimizer or schedule: the form of the {what} is ({forms(new)}), expected ({forms(old)})"
            )


def forms(tree):
    """The types and shapes of a tree's leaves."""
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree))


def attempt(what, fn, *arguments):
    """The shapes of fn(*arguments); a failure tells what failed, where in the project's or the user's code, and why."""
    try:
        return jax.eval_shape(fn, *arguments)
    except UserError as error:
        raise UserError(f"{what}: {error}") from error
    except Exception as error:
        frames = [
            f
            for f in traceback.extract_tb(error.__traceback__)
            if "site-packages" not in f.filename
        ]
        where = f"{os.path.relpath(frames[-1].filename)}, line {frames[-1].lineno}, in {frames[-1].name}"
        raise UserError(f"{what}: {where}: {type(error).__name__}: {first_line(error)}") from error


def reported_names(objective, metrics, watch):
    """{label: what it is called in the end}; each must be one number, or a dict of them, unless it is for callbacks alone."""
    finish = getattr(objective, "finish", lambda means: means)
    metrics = {label: tree for label, tree in metrics.items() if not watch.aside(label)}
    means = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], jnp.float32), metrics)
    found = {label: {} for label in metrics}
    for name, leaf in named_leaves(
        attempt("metrics: the means cannot be finished", finish, means)
    ).items():
        found.setdefault(name.split("/")[0], {})[name] = leaf
    for label, leaves in found.items():
        if not leaves:
            raise UserError(f"metrics: {label} answers nothing; return a number")
        for name, leaf in leaves.items():
            if leaf.shape != ():
                mend = "return a number, give the function a `finish`, or say mode CONCAT"
                raise UserError(f"metrics: {name} ends with shape {leaf.shape}; {mend}")
    names = {label: [name.replace("/", "_") for name in leaves] for label, leaves in found.items()}
    flat = ["loss", *(name for called in names.values() for name in called)]
    if twice := {name for name in flat if flat.count(name) > 1}:
        raise UserError(
            f"metrics: {', '.join(sorted(twice))}: two of them have this name; give labels: {{label: metric, ...}}"
        )
    return names


def count(params):
    """The number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def table(params, plan):
    """One line for each parameter leaf: path, shape, count and share of all, how it is cut, and what a device holds of it."""
    leaves, cuts = named_leaves(params), plan.cuts(params)
    held = {name: shard_bytes(leaf, plan.place(cuts[name])) for name, leaf in leaves.items()}
    total, width = count(params), max(map(len, leaves), default=4)
    shown = {
        name: f"[{', '.join(axis or '-' for axis in cut)}]" if any(cut) else "whole"
        for name, cut in cuts.items()
    }
    wide = max([8, *map(len, shown.values())])
    lines = [
        f"{'path':<{width}}  {'shape':<18} {'count':>10}  share  {'sharding':<{wide}}  per device"
    ]
    for name, leaf in leaves.items():
        share, size = f"{leaf.size / total:>5.1%}", format_bytes(held[name])
        lines.append(
            f"{name:<{width}}  {list(leaf.shape)!s:<18} {leaf.size:>10,}  {share}  {shown[name]:<{wide}}  {size:>10}"
        )
    size, each = (
        format_bytes(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())),
        format_bytes(sum(held.values())),
    )
    return "\n".join(
        [*lines, f"{'all':<{width}}  {'':<18} {total:>10,}  {size:<{7 + wide}}  {each:>10}"]
    )
