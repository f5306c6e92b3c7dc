"""The recipe of a run: everything that is computed, composed by one function and passed to whatever
needs it: the shape check, training, the searches for a learning rate and a batch size, `--evaluate`
and `--watch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, Never

import jax
from jax.stages import Traced
from jax.typing import ArrayLike
from jaxtyping import PyTree

from data_loader.base import has_items, read_example
from data_loader.loader import collate, collated, epoch_order, in_epoch
from model.base import Model
from training.base import (
    Augmented,
    Callback,
    Functions,
    Metric,
    Numbers,
    Objective,
    Optimizer,
    Parts,
    Preprocessed,
    Schedule,
    StepResult,
    Tracked,
    TrainState,
    Update,
    Weights,
    part_name,
    unchanged,
)
from training.contracts import (
    explained,
    guarded_model,
    guarded_objective,
    guarded_optimizer,
    guarded_update,
)
from training.metrics import NEEDS, MetricPlan, check_binary, check_ignored
from training.objective import augmented_by_epoch, inputs, is_marked, traced, with_precision
from training.observers import check_observers
from training.options import (
    CheckpointOptions,
    LoaderOptions,
    LoggingOptions,
    TrainingOptions,
    monitor_for,
)
from training.run import Reader
from training.transforms import NO_STEP, check_rate, kind_of
from training.update import gradient_update
from utils import UserError, made_by, parameters_of
from utils.forms import SEEDS, check_takes

if TYPE_CHECKING:
    from training.devices.sharding import Plan
    from training.engine import Trainer

# What the factory of an objective takes, and the function that it returns.
FACTORY_TAKES = ("model", "loss", "metrics", "preprocess", "augment")
OBJECTIVE_TAKES = ("params", "state", "batch", "key", "train")


class Recipe(NamedTuple):
    """What a run computes. `compose` makes it from the parts of a config or the arguments of
    `fit`."""

    model: Model  # it computes in float32; the objective applies training.precision
    objective: Objective
    optimizer: Optimizer
    make_update: Callable[..., Update]  # (unroll, steps in an epoch) -> Update
    has_own_update: bool  # whether it is not `gradient_update`
    metric_plan: MetricPlan  # what is measured besides the loss
    rates: Mapping[
        str, float | Schedule
    ]  # {name: learning rate, a number or a function of the step}
    seeds: tuple[int, ...]  # one for each replica
    varied_numbers: tuple[
        Numbers, ...
    ]  # for each replica its numbers of training.vary, {path: number}
    rebuild: Callable[
        [Numbers], Recipe
    ]  # (numbers) -> the Recipe with these numbers in place of the varied ones
    preprocess: tuple[Callable[..., Preprocessed], ...]
    augment: tuple[Callable[..., Augmented], ...]
    callbacks: tuple[Callback, ...]
    seed: int
    plan: Plan  # the devices, and what each of them holds
    loader: LoaderOptions
    training: TrainingOptions
    checkpoint: CheckpointOptions
    logging: LoggingOptions

    def with_numbers(self, numbers: Numbers) -> Recipe:
        """The recipe of a replica with these numbers, which may be inputs of a program."""
        return self.rebuild(numbers) if numbers else self

    def traced(self, weights: Weights, batch: PyTree, train: bool) -> Traced:
        """The objective, traced for a batch and (params, state) of these shapes."""

        def augmented(batch: PyTree) -> PyTree:
            with explained("augment does not fit the data"):
                return augmented_by_epoch(self.augment, 0, batch)

        batch = jax.eval_shape(augmented, batch) if train else batch
        return traced(self.objective, *weights, batch, train)

    def reader(self, trainer: Trainer | None = None) -> Reader:
        """The Reader of sums; for norms of single leaves it needs the names from the trainer."""
        leaves = trainer.leaf_names if trainer else ()
        return Reader(self.objective.finish, self.metric_plan.hidden, leaves)

    def sets_before_end(self, sets: Iterable[str]) -> list[str]:
        """The held-out sets that can be evaluated while a run trains."""
        at_end = self.sets_at_end(sets)
        return [name for name in sets if name != "train" and name not in at_end]

    def sets_in_epochs(self, sets: Iterable[str]) -> list[str]:
        """The held-out sets that are evaluated while a run trains, whatever observers ask for."""
        evaluates = self.training.eval_every or self.training.eval_initial
        return self.sets_before_end(sets) if evaluates else []

    def for_sets(self, sets: Iterable[str]) -> Recipe:
        """The recipe with checkpoint.monitor resolved to the name of a metric of these sets."""
        monitor = monitor_for(self.checkpoint.monitor, self.sets_monitored(sets), None)
        return self._replace(checkpoint=replace(self.checkpoint, monitor=monitor))

    def sets_monitored(self, sets: Iterable[str]) -> list[str]:
        """The held-out sets whose metrics an epoch can end with."""
        return self.sets_in_epochs(sets) if self.training.eval_every else []

    def sets_at_end(self, sets: Iterable[str]) -> list[str]:
        """The held-out sets that are evaluated once, after training."""
        return [name for name in sets if name == "test" and self.training.test_at == "end"]

    def first_examples(self, dataset: Any, count: int) -> list[PyTree] | None:
        """The first examples of the training set in the order of its first epoch: raw ones, or if
        there are augmentations, preprocessed and augmented ones; None if they cannot be read one by
        one."""
        if not has_items(dataset):
            return None
        order = {"seed": self.seed, "epoch": 1, "shuffle": self.loader.shuffle}
        rows, _ = epoch_order(len(dataset), self.loader.batch_size, **order)
        indices = rows.ravel()[: min(count, len(dataset))]
        dataset = in_epoch(dataset, self.seed, 1) if self.loader.shuffle else dataset
        examples = [read_example(dataset, int(i)) for i in indices]
        if not self.augment or not examples:
            return examples
        batch = collated(examples, self.loader.collate_fn or collate)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            return examples
        batch = augmented_by_epoch(self.augment, 0, batch)
        key = jax.random.fold_in(jax.random.key(self.seed), 0)
        augmented = jax.jit(lambda pair: inputs(self.preprocess, self.augment, key, *pair))
        pair = jax.device_get(augmented(tuple(batch)))
        return [jax.tree.map(lambda a, i=i: a[i], pair) for i in range(len(examples))]


def compose(parts: Parts, plan: Plan) -> Recipe:
    """The Recipe of `parts`, after checking what does not need the data."""
    seed, training = parts.seed, parts.training
    replicas, vary = training.replicas, training.vary or {}
    numbers = tuple({path: parts.vary[path][r] for path in parts.vary} for r in range(replicas))
    if seed + replicas > SEEDS:
        raise UserError(f"seed: leave room for {replicas} replicas below 2**32, got {seed}")
    if training.on_nonfinite == "rollback" and not parts.checkpoint.save_optimizer_state:
        raise UserError(
            "training.on_nonfinite: 'rollback' needs complete checkpoints; "
            "set checkpoint.save_optimizer_state to true"
        )
    check_observers(parts.callbacks)
    functions, metric_plan = plan_metrics(parts.metrics, parts.callbacks, parts.logging)
    check_ignored(parts.loss, functions)
    check_binary(parts.loss, functions)
    if kind_of(parts.optimizer) == "gradients":
        raise UserError(f"optimizer: {NO_STEP}")
    for callback in parts.callbacks:
        if getattr(callback, "lowers_rate", False):
            check_rate(parts.optimizer, f"callbacks: {type(callback).__name__}", "use a schedule")
    optimizer = guarded_optimizer(parts.optimizer)
    loss = missing_loss if parts.loss is None else parts.loss
    precise = with_precision(guarded_model(parts.model), training.precision)
    given = precise, loss, functions, parts.preprocess, parts.augment
    check_takes("objective", parts.objective, FACTORY_TAKES)
    objective = made_by("objective", parts.objective, *given)
    if not isinstance(objective, Objective):
        objective = Objective(objective, getattr(objective, "finish", unchanged))
    check_takes("objective: its function", objective.apply, OBJECTIVE_TAKES, objective.declared)
    objective = guarded_objective(objective)
    make_update = configured(parts.update, objective, optimizer, training, parts.augment)
    rates = rates_of_replicas(parts, numbers) if "learning_rate" in metric_plan.needs else {}
    seeds = vary.get("seed") or ([seed] * replicas if vary else range(seed, seed + replicas))
    return Recipe(
        model=parts.model,
        objective=objective,
        optimizer=optimizer,
        make_update=make_update,
        has_own_update=getattr(parts.update, "func", parts.update) is not gradient_update,
        metric_plan=metric_plan,
        rates=rates,
        seeds=tuple(seeds),
        varied_numbers=numbers,
        rebuild=lambda numbers: compose(parts.rebuild(parts, numbers), plan),
        preprocess=tuple(parts.preprocess),
        augment=tuple(parts.augment),
        callbacks=tuple(parts.callbacks),
        seed=seed,
        plan=plan,
        loader=parts.loader,
        training=training,
        checkpoint=parts.checkpoint,
        logging=parts.logging,
    )


def rates_of_replicas(parts: Parts, numbers: Sequence[Numbers]) -> Mapping[str, float | Schedule]:
    """The learning rates to log, under a name for each replica if their numbers differ."""
    if not any(numbers):
        return parts.rates
    rates = [parts.rebuild(parts, own).rates for own in numbers]
    return {f"{name}/{r}": rate for r, named in enumerate(rates) for name, rate in named.items()}


def configured(
    update: Callable[..., Update],
    objective: Objective,
    optimizer: Optimizer,
    training: TrainingOptions,
    augment: Functions,
) -> Callable[..., Update]:
    """make_update(unroll, steps), with the training options that the update takes. An option that
    is set although the update does not take it is an error."""
    accepted = parameters_of(update)
    check_takes("update", update, ("objective", "optimizer"))
    for name, default in (("accumulate", 1), ("ema", None)):
        if name not in accepted and getattr(training, name) != default:
            raise UserError(
                f"training.{name}: the update {part_name(update)!r} takes no {name!r}; "
                "leave it at its default"
            )

    by_epoch = [fn for fn in augment if is_marked(fn, "by_epoch")]

    def make_update(unroll: bool, steps: int | None = 1) -> Update:
        if by_epoch and steps is None:
            raise UserError(
                f"augment: {part_name(by_epoch[0])} needs to know how many batches an epoch has; "
                "give the data a __len__"
            )
        given = {"accumulate": training.accumulate, "ema": training.ema, "unroll": unroll}
        given = {name: value for name, value in given.items() if name in accepted}

        def made(objective: Objective) -> Update:
            return guarded_update(made_by("update", update, objective, optimizer, **given))

        first = made(objective)

        @wraps(first.step)
        def step(ts: TrainState, batch: PyTree, valid: ArrayLike) -> StepResult:
            own = made(objective._replace(step=ts.step)) if "step" in objective.declared else first
            if by_epoch and steps:
                batch = augmented_by_epoch(by_epoch, ts.step // steps, batch)
            return own.step(ts, batch, valid)

        return first._replace(step=step)

    return make_update


def plan_metrics(
    metrics: Mapping[str, Tracked], callbacks: Sequence[Any], logging: LoggingOptions
) -> tuple[dict[str, Callable[..., Metric]], MetricPlan]:
    """({label: function of one example}, MetricPlan) of everything that is measured. `metrics` are
    {label: Tracked}."""
    rules, hidden = dict(metrics), set()
    for callback in callbacks:
        for label, rule in getattr(callback, "metrics", {}).items():
            who = f"callbacks: {type(callback).__name__} measures {label!r}"
            if label in rules or label == "loss" or "/" in label:
                raise UserError(
                    f"{who}, a name that another metric has, or with a '/'; "
                    "is the callback in the list twice?"
                )
            if rule.freq == "STEP":
                raise UserError(
                    f"{who} with freq STEP, which is for logged metrics only; use freq EPOCH"
                )
            rules[label] = rule
            hidden.add(label)
    needs = {need for callback in callbacks for need in getattr(callback, "needs", ())}
    needs |= {need for need in NEEDS if getattr(logging, need, False)}
    per_step = logging.log_all or "per_step" in needs
    # A rule without a function is for what the objective returns by itself.
    functions = {label: rule.function for label, rule in rules.items() if rule.function}
    return functions, MetricPlan(rules, frozenset(hidden), frozenset(needs), per_step)


def missing_loss(output: PyTree, target: PyTree) -> Never:
    """The loss of a recipe without one."""
    raise UserError("loss: is missing, and the objective needs one, such as cross_entropy or mse")
