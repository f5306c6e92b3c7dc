"""What a run will be, from shapes alone: whether the model fits the data, and a table of its parameters."""

import difflib
import os
import traceback

import jax
import jax.numpy as jnp

from utils import UserError, format_bytes, named_leaves


def trace_shapes(model, objective, optimizer, example, batch_size):
    """(parameters as shapes, names of what is reported), once a batch went through model, loss and metrics as shapes alone."""
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
    attempt("optimizer: its state cannot be made", optimizer.init, params)
    step = lambda params, state, batch, key: objective(params, state, batch, key, True)  # noqa: E731
    what = f"model, loss or metrics do not fit the data, whose batches are ({forms(batch)})"
    losses, new_state, metrics = attempt(what, step, params, state, batch, key)
    if losses.shape != (batch_size,):
        raise UserError(f"objective: must give a loss for each of the {batch_size} examples, gave the shape {losses.shape}")
    if jax.tree.structure(new_state) != jax.tree.structure(state) or forms(new_state) != forms(state):
        raise UserError(f"model: apply changes the form of its state, from ({forms(state)}) to ({forms(new_state)})")
    return params, ["loss", *reported_names(objective, metrics)]


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
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
        where = f"{os.path.relpath(frames[-1].filename)}, line {frames[-1].lineno}, in {frames[-1].name}"
        raise UserError(f"{what}: {where}: {type(error).__name__}: {str(error).splitlines()[0]}") from error


def reported_names(objective, metrics):
    """What the metrics are called in the end; each must be one number, or a dict of them."""
    finish = getattr(objective, "finish", lambda means: means)
    means = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], jnp.float32), metrics)
    reported = named_leaves(attempt("metrics: the means cannot be finished", finish, means))
    for name, leaf in reported.items():
        if leaf.shape != ():
            raise UserError(f"metrics: {name} ends with shape {leaf.shape}; return a number, or give the function a `finish`")
    return [name.replace("/", "_") for name in reported]


def check_monitors(monitors, sets, reported):
    """Refuse {place: metric} whose metric will never be measured on these sets, before an hour is lost."""
    measured = [f"{name}_{metric}" for name in sets for metric in reported]
    for place, monitor in monitors.items():
        if monitor is not None and monitor not in measured:
            near = difflib.get_close_matches(monitor, measured, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{place}: {monitor!r} is not measured{hint} ({', '.join(measured)})")


def count(params):
    """The number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def table(params):
    """One line for each parameter leaf: path, shape, count and share of all."""
    total, leaves = count(params), named_leaves(params)
    width = max(map(len, leaves), default=4)
    lines = [f"{'path':<{width}}  {'shape':<18} {'count':>10}  share"]
    for name, leaf in leaves.items():
        lines.append(f"{name:<{width}}  {list(leaf.shape)!s:<18} {leaf.size:>10,}  {leaf.size / total:>5.1%}")
    size = format_bytes(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values()))
    return "\n".join([*lines, f"{'all':<{width}}  {'':<18} {total:>10,}  {size}"])
