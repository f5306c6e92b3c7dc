"""What a run will be, from shapes alone: whether the parts fit the data and each other, and a table
of the model's parameters."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from data_loader.loader import batch_of_copies
from training.base import Parts, Phase, StepResult, TrainState
from training.checkpoint.pretrained import is_merged, pretrained_from
from training.checkpoint.storage import check_format
from training.contracts import check_metrics, explained
from training.devices.sharding import Plan, shard_bytes
from training.engine import as_inputs, first_state, first_weights
from training.loss import cross_entropy
from training.metrics import MetricPlan, accuracy, covers, f1, perplexity, phase_of, top_k_accuracy
from training.objective import outputs, values_of
from training.options import LoaderOptions
from training.recipe import Recipe
from training.run import check_names
from training.sets import SUPERVISED
from training.update import check_microbatches
from utils import UserError, format_bytes, named_leaves

# Losses and metrics that compare the outputs of a model with the number of a class.
OF_CLASSES = (cross_entropy, accuracy, top_k_accuracy, perplexity, f1)
SEED = jax.ShapeDtypeStruct((), jnp.uint32)


def check_shapes(
    recipe: Recipe, example: PyTree, sizes: Mapping[str, int], resumed: bool = False
) -> TrainState:
    """The TrainState of a recipe as shapes, once all parts are known to fit. `example` is one of
    the data's, `sizes` are {set: how many examples}."""
    batch, held_out = (shapes_of_batch(example, recipe.loader, name) for name in ("train", "test"))
    weights = jax.eval_shape(partial(first_weights, recipe.model), SEED)
    trained = values_of(recipe.traced(weights, batch, train=True))
    evaluated = values_of(recipe.traced(weights, held_out, train=False))
    check_metrics(recipe.metric_plan, trained, evaluated)
    check_phases(recipe.metric_plan, sizes)
    check_sets(recipe.callbacks, sizes)
    check_names(recipe, trained, sizes)
    check_format(recipe.checkpoint.format)
    if not resumed or is_merged(recipe.model):
        pretrained = pretrained_from(recipe.training.pretrained, recipe.model)
        if pretrained:
            pretrained.check(*weights)
    for name in ("train", "test"):
        size, option = recipe.loader.of(name).batch_size, recipe.loader.size_option(name)
        recipe.plan.check_batch(size, option)
    recipe.plan.cuts(weights[0])
    update = recipe.make_update(unroll=False)
    ts = jax.eval_shape(partial(first_state, update), *weights, SEED)
    check_microbatches(recipe.loader.batch_size, recipe.training.accumulate)
    if recipe.has_own_update:
        jax.eval_shape(update.step, ts, batch, 1)
    else:  # tracing its gradient would take a second
        jax.eval_shape(recipe.optimizer.update, ts.params, ts.opt, ts.params)
    if any(recipe.varied_numbers):
        check_varied_numbers(recipe, ts, batch)
    return ts


def check_varied_numbers(recipe: Recipe, ts: TrainState, batch: PyTree) -> None:
    """Refuse numbers of training.vary that cannot be inputs of the compiled programs: of the one
    that draws the first params, and of the step."""

    def step(numbers: dict[str, Any], ts: TrainState, batch: PyTree) -> StepResult:
        with explained("the parts cannot be made of them"):
            own = recipe.with_numbers(numbers)
        update = own.make_update(unroll=False)
        update.init(own.model.init(jax.random.key(0))[0])
        return update.step(ts, batch, 1)

    numbers = recipe.varied_numbers[0]
    try:
        jax.eval_shape(step, as_inputs(numbers), ts, batch)
    except UserError as error:
        names = ", ".join(numbers)
        raise UserError(
            f"training.vary: {names} cannot all differ within one program: {error}"
        ) from error


def shapes_of_batch(example: PyTree, loader: LoaderOptions, set_name: str) -> PyTree:
    """The shapes of a batch of a set, which its collate_fn makes of copies of one example."""
    copies = batch_of_copies(example, loader.batch_size, loader.of(set_name).collate_fn)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), copies)


def check_classes(parts: Parts, recipe: Recipe, template: TrainState) -> None:
    """Refuse a model with fewer outputs than its data has classes or tokens, where the loss or a
    metric compares them: it would be NaN, or never right, for a class without an output."""
    functions = [parts.loss, *(rule.function for rule in recipe.metric_plan.rules.values())]
    compares = any(getattr(function, "func", function) in OF_CLASSES for function in functions)
    if not compares or getattr(parts.objective, "func", parts.objective) not in SUPERVISED:
        return
    x, labels = shapes_of_batch(parts.data.example, recipe.loader, "train")
    classes, tokens = (getattr(parts.data, n, None) for n in ("num_classes", "vocab_size"))
    count, is_text = (tokens, True) if classes is None else (classes, False)
    made = partial(outputs, recipe.model, recipe.preprocess)
    output: Any = jax.eval_shape(made, template.params, template.state, x)
    shape = getattr(output, "shape", ())
    if isinstance(labels, dict) and "target" in labels:
        labels = labels["target"]
    if not count or not isinstance(labels, jax.ShapeDtypeStruct) or len(shape) <= 1 + is_text:
        return
    size = output.shape[-1]
    if size < count and shape[:-1] == labels.shape and jnp.issubdtype(labels.dtype, jnp.integer):
        what = "tokens: raise vocab_size" if is_text else "classes: raise num_classes"
        raise UserError(f"model: has {size} outputs for {count} {what}, or leave it out")


def check_phases(metric_plan: MetricPlan, sets: Iterable[str]) -> None:
    """Refuse a metric for a phase that no set of this run has."""
    phases: set[Phase] = {phase_of(name) for name in sets}
    for label, rule in metric_plan.rules.items():
        measured = any(covers(rule.phase, phase) for phase in phases)
        if label not in metric_plan.hidden and not measured:
            raise UserError(
                f"metrics: {label} is for the phase {rule.phase}, and no set is of that phase; "
                f"the sets are {', '.join(sets)}"
            )


def check_sets(callbacks: Sequence[Any], sets: Iterable[str]) -> None:
    """Refuse a callback's `sets` that do not exist."""
    held_out = [name for name in sets if name != "train"]
    for i, callback in enumerate(callbacks):
        for name in getattr(callback, "sets", None) or ():
            if name not in held_out:
                names = ", ".join(held_out) or "none"
                raise UserError(
                    f"callbacks.{i}.args.sets: no held-out set {name!r}; there are: {names}"
                )


def count(params: PyTree) -> int:
    """The number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def table_of_params(params: PyTree, plan: Plan) -> str:
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
