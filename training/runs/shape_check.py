"""What a run will be, from shapes alone: whether the parts fit the data and each other, and a table
of the model's parameters."""

import difflib

import jax
import jax.numpy as jnp

from data_loader.loader import batch_of_copies
from training.base import TrainState
from training.checkpoint.pretrained import is_merged, pretrained_from
from training.checkpoint.storage import check_format
from training.devices.sharding import shard_bytes
from training.metrics import covers, phase_of
from training.observers import reported_by
from training.options import monitor_for
from training.rows import per_leaf, plain
from training.runs.tracing import attempt, trace_numbers, trace_shapes, trace_update
from utils import UserError, format_bytes, named_leaves


def check_shapes(recipe, example, sizes, resumed=False):
    """The TrainState of a recipe as shapes, once all parts are known to fit. `example` is one of
    the data's, `sizes` are {set: how many examples}."""
    batches = [shapes_of_batch(example, recipe.loader, name) for name in ("train", "test")]
    return check_batches(recipe, *batches, sizes, resumed)


def check_batches(recipe, batch, held_out, sizes, resumed=False):
    """As `check_shapes`, for a batch of the training set and one of a held-out set, as shapes."""
    check_phases(recipe.metric_plan, sizes)
    check_sets(recipe.callbacks, sizes)
    params, state, metrics = trace_shapes(recipe, batch, held_out)
    reported = {"loss": ["loss"], **reported_names(recipe, metrics)}
    in_epochs = recipe.sets_monitored(sizes)
    monitors = {"checkpoint.monitor": recipe.for_sets(sizes).checkpoint.monitor}
    for i, callback in enumerate(recipe.callbacks):
        monitor = monitor_for(getattr(callback, "monitor", None), in_epochs, "test_loss")
        monitors[f"callbacks.{i}.args.monitor"] = monitor
    check_monitors(monitors, measured_names(["train", *in_epochs], reported, recipe))
    for part in (recipe.checkpoint, *recipe.callbacks):
        if hasattr(part, "sign"):
            part.sign()
    check_format(recipe.checkpoint.format)
    if not resumed or is_merged(recipe.model):
        pretrained = pretrained_from(recipe.training.pretrained, recipe.model)
        if pretrained:
            pretrained.check(params, state)
    for name in ("train", "test"):
        size, option = recipe.loader.of(name).batch_size, recipe.loader.size_option(name)
        recipe.plan.check_batch(size, option)
    recipe.plan.cuts(params)
    update = recipe.make_update(unroll=False)
    opt, ema = attempt("update: its state cannot be made", update.init, params)
    types = jnp.int32, jnp.uint32, jnp.bool, jnp.float32
    step, seed, halted, scale = (jax.ShapeDtypeStruct((), dtype) for dtype in types)
    ts = TrainState(step, seed, params, state, opt, ema, halted, scale)
    trace_update(update, ts, batch)
    if any(recipe.varied_numbers):
        trace_numbers(recipe, ts, batch)
    return ts


def shapes_of_batch(example, loader, set_name):
    """The shapes of a batch of a set, which its collate_fn makes of copies of one example. The
    batches of all sets have as many rows as in training, so that they can be compared."""
    copies = batch_of_copies(example, loader.batch_size, loader.of(set_name).collate_fn)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), copies)


def reported_names(recipe, metrics):
    """{label: the names under which it is reported}. Each must be one number, or a dict of them,
    unless it is for callbacks alone."""
    aside = recipe.metric_plan.aside
    metrics = {label: tree for label, tree in metrics.items() if not aside(label)}
    means = per_leaf(lambda a: jax.ShapeDtypeStruct(plain(a).shape[1:], jnp.float32), metrics)
    reported = {label: {} for label in metrics}
    finished = attempt("metrics: the means cannot be finished", recipe.objective.finish, means)
    for name, leaf in named_leaves(finished).items():
        reported.setdefault(name.split("/")[0], {})[name] = leaf
    for label, leaves in reported.items():
        if not jax.tree.leaves((leaves, metrics.get(label))):  # a `finish` may leave values out
            raise UserError(f"metrics: {label} returns nothing; return a number")
        for name, leaf in leaves.items():
            if leaf.shape != ():
                raise UserError(
                    f"metrics: {name} ends with shape {leaf.shape}; "
                    "return a number, give the function a `finish`, or use mode CONCAT"
                )
    names = {k: [name.replace("/", "_") for name in leaves] for k, leaves in reported.items()}
    flat = ["loss", *(name for group in names.values() for name in group)]
    if twice := {name for name in flat if flat.count(name) > 1}:
        raise UserError(
            f"metrics: {', '.join(sorted(twice))}: two of them have this name; "
            "give labels: {label: metric, ...}"
        )
    return names


def check_phases(metric_plan, sets):
    """Refuse a metric for a phase that no set of this run has."""
    phases = {phase_of(name) for name in sets}
    for label, rule in metric_plan.rules.items():
        measured = any(covers(rule.phase, phase) for phase in phases)
        if label not in metric_plan.hidden and not measured:
            raise UserError(
                f"metrics: {label} is for the phase {rule.phase}, and no set is of that phase; "
                f"the sets are {', '.join(sets)}"
            )


def check_sets(callbacks, sets):
    """Refuse a callback's `sets` that do not exist."""
    held_out = [name for name in sets if name != "train"]
    for i, callback in enumerate(callbacks):
        for name in getattr(callback, "sets", None) or ():
            if name not in held_out:
                names = ", ".join(held_out) or "none"
                raise UserError(
                    f"callbacks.{i}.args.sets: no held-out set {name!r}; there are: {names}"
                )


def measured_names(sets, reported, recipe):
    """All names under which something is measured at the end of an epoch."""
    metric_plan, names = recipe.metric_plan, []
    for set_name in sets:
        labels = metric_plan.modes(reported, phase_of(set_name), "EPOCH")
        names += [f"{set_name}_{name}" for label in labels for name in reported[label]]
    norms = [norm for norm in ("gradient_norm", "parameter_norm") if norm in metric_plan.needs]
    own = [name for c in recipe.callbacks for name in reported_by(c, sets)]
    return [*names, *own, *norms, *recipe.rates]


def check_monitors(monitors, measured):
    """Refuse {place in the config: metric} whose metric is never measured. The hint names metrics
    of the same set only, since the training loss, say, cannot replace the test loss."""
    for where, monitor in monitors.items():
        if monitor is None or monitor in measured:
            continue
        set_name = monitor.split("_")[0]
        sets = {name.split("_")[0] for name in measured}
        hint = ""
        if set_name in ("val", "test") and set_name not in sets:
            hint = f"; no epoch evaluates a set {set_name!r}"
            hint += " (loader.val_size holds out a validation set)"
        else:
            meant = difflib.get_close_matches(set_name, sets, n=1)
            same = [name for name in measured if [name.split("_")[0]] == meant]
            if near := difflib.get_close_matches(monitor, same, n=1):
                hint = f"; did you mean {near[0]!r}?"
        raise UserError(f"{where}: {monitor!r} is not measured{hint} ({', '.join(measured)})")


def count(params):
    """The number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def table(params, plan):
    """One line for each leaf of the params: path, shape, count and share of all, its sharding, and
    the bytes that each device holds."""
    leaves, cuts = named_leaves(params), plan.cuts(params)
    held = {name: shard_bytes(leaf, plan.sharding(cuts[name])) for name, leaf in leaves.items()}
    total, width = count(params), max(map(len, leaves), default=4)
    shown = {
        name: f"[{', '.join(axis or '-' for axis in cut)}]" if any(cut) else "whole"
        for name, cut in cuts.items()
    }
    wide = max([8, *map(len, shown.values())])
    head = (
        f"{'path':<{width}}  {'shape':<18} {'count':>10}  share  {'sharding':<{wide}}  per device"
    )
    lines = [head]
    for name, leaf in leaves.items():
        share, size = f"{leaf.size / total:>5.1%}", format_bytes(held[name])
        lines.append(
            f"{name:<{width}}  {list(leaf.shape)!s:<18} {leaf.size:>10,}  {share}  "
            f"{shown[name]:<{wide}}  {size:>10}"
        )
    size = format_bytes(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values()))
    each = format_bytes(sum(held.values()))
    lines.append(f"{'all':<{width}}  {'':<18} {total:>10,}  {size:<{7 + wide}}  {each:>10}")
    return "\n".join(lines)
