"""`fit` trains a model from Python, as in a notebook; `train_recipe` assembles a run from its
recipe, for `fit` and for the command line alike."""

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Never

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from data_loader.base import class_names, tokenizer_json
from model.base import Model
from training.base import (
    LossFunction,
    Metric,
    Parts,
    Schedule,
    Sets,
    Tracked,
    Update,
    Weights,
    labelled,
    part_name,
)
from training.checkpoint import run_folder
from training.checkpoint.divergence import Divergence
from training.checkpoint.keeper import Keeper
from training.checkpoint.pretrained import (
    digest_of_frozen,
    fitted_to_data,
    is_merged,
    pretrained_from,
)
from training.checkpoint.probe import Probe, probe_input
from training.checkpoint.record import described
from training.checkpoint.resume import check_unchanged, holding, point_of
from training.checkpoint.storage import Checkpoint, check_format
from training.devices.options import MeshOptions
from training.devices.sharding import Plan
from training.devices.signals import Signals
from training.devices.utilisation import utilisation
from training.engine import Trainer
from training.kinds import KINDS, adapter_for, find, makes
from training.loop import Loop
from training.loss import cross_entropy
from training.metrics import accuracy
from training.objective import cutmix, mixup, supervised
from training.observers import Point, as_number, check_callbacks
from training.optimizers import sgd
from training.options import (
    CheckpointOptions,
    EvaluationEvery,
    LoaderOptions,
    LoggingOptions,
    PretrainedOptions,
    TrainingOptions,
    text_of,
)
from training.processes import is_first, several
from training.recipe import Recipe, compose
from training.run import Clock, LearningRates, Run, check_names, reported_names
from training.sets import check_iterators, check_pairs, datasets
from training.transforms import scheduled
from training.update import gradient_update
from training.watching.console import ProgressBar, show_on_console
from training.watching.metric_log import (
    EVERY_50_STEPS,
    FirstLines,
    Histograms,
    MetricLog,
    WaitingForData,
)
from training.watching.publish import About, PictureFiles, Publisher
from training.watching.view import View
from utils import UserError, did_you_mean, first_line, named_leaves, parameters_of, shown_if_slow
from utils.forms import Seed, form, local_path, misfits

logger = logging.getLogger("main")

SAVES_EVERY_EPOCH = CheckpointOptions()
ALL_DEVICES = MeshOptions()
# Arguments of `fit` that are not part of the recipe.
OF_THE_RUN = ("train", "test", "val", "folder", "resume", "config")
# Arguments of `evaluate` that are not part of the recipe.
EVALUATED = ("model", "params", "state", "data", "step")


# The signature repeats the fields of LoaderOptions and TrainingOptions, so that editors know them;
# a test compares them.
# fmt: off
def fit(
    model: Any, train: Any, test: Any = None, val: Any = None,
    *,
    optimizer: Any, schedule: Callable | None = None, loss: Callable | None = cross_entropy,
    metrics: Sequence[Any] | Mapping[str, Any] | None = None,
    preprocess: Sequence[Callable] = (), augment: Sequence[Callable] = (),
    objective: Callable = supervised, update: Callable = gradient_update,

    epochs: int | None = 10, max_steps: int | None = None, max_seconds: float | None = None,
    seed: int = 0, replicas: int = 1, accumulate: int = 1,
    precision: Literal["float32", "bfloat16"] = "float32", ema: float | None = None,
    eval_every: int | EvaluationEvery = 1, eval_initial: bool = False,
    test_at: Literal["epochs", "end"] = "epochs", limit_eval_batches: int | None = None,
    limit_batches: int | None = None, overfit_batches: int = 0,
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop", rollbacks: int = 3,
    detect_nans: bool = False, pretrained: str | PretrainedOptions | None = None,

    batch_size: int = 128, shuffle: bool = True, val_size: int | float = 0, split_seed: int = 0,
    collate_fn: Callable | None = None, eval_batch_size: int | None = None,
    eval_collate_fn: Callable | None = None, device_budget_mb: int = 2048, prefetch: int = 2,

    folder: str | PathLike | None = None, resume: bool | Literal["override"] = False,
    config: dict | None = None, callbacks: Sequence[Any] = (),
    log: LoggingOptions | dict = EVERY_50_STEPS, rates: Mapping[str, Any] | None = None,
    checkpoint: CheckpointOptions | dict = SAVES_EVERY_EPOCH,
    mesh: MeshOptions | dict = ALL_DEVICES, sharding: Any = None,
    **unknown: Never,
) -> Run:
    """Train a model on a dataset, a pair of arrays (x, y), or any iterable of batches, and return
    the finished Run.

    `val` is one set or {name: set}. `metrics` are functions, or {name: function}; by default
    accuracy, for a classifier with cross_entropy. One may be `tracked(...)` (training/base.py).
    `log`, `checkpoint` and `mesh` are dicts of the options in training/options.py.
    `rates` are learning rates to log, {name: number or function of the step}.

    With a `folder`, the run leaves metrics.jsonl and checkpoints there; `resume=True` continues
    from the newest good checkpoint, if there is one, `resume="override"` also with other options
    or data. `config` is a dict for the trackers and the checkpoints, such as {"width": 64}.
    A callback is an object with some of the methods of training/observers.py.
    """
    folder = None if folder is None else local_path("folder", folder)
    arguments = {name: as_number(value) for name, value in locals().items()}  # all of the above
    check_known(arguments.pop("unknown"), arguments)
    arguments["ignored"] = getattr(train, "ignore_label", None)
    recipe = recipe_of(**{k: v for k, v in arguments.items() if k not in OF_THE_RUN})
    check_pairs({"train": train, "test": test}, objective)
    sets = datasets(train, val, test, recipe.loader, overfit_batches)
    check_iterators(sets, recipe.training)
    check_run(recipe, folder, resume)
    check_callbacks(recipe, sets["train"])
    show_on_console()
    record = own_record(recipe, sets, config)
    with holding(folder, resume, record) as (begun, begin):
        return train_recipe(recipe, sets, folder, record, begun, begin=begin)
# fmt: on


fit.__doc__ = (
    f"{inspect.cleandoc(fit.__doc__ or '')}\n\n{text_of(TrainingOptions)}\n{text_of(LoaderOptions)}"
)


def evaluate(
    model: Model,
    params: PyTree,
    state: PyTree,
    data: Any,
    *,
    loss: LossFunction | None = cross_entropy,
    metrics: Sequence[Any] | Mapping[str, Any] | None = None,
    preprocess: Sequence[Callable] = (),
    objective: Callable = supervised,
    precision: Literal["float32", "bfloat16"] = "float32",
    batch_size: int = 128,
    collate_fn: Callable | None = None,
    seed: int = 0,
    device_budget_mb: int = 2048,
    prefetch: int = 2,
    step: int | None = None,
) -> dict[str, float]:
    """{"loss": ..., "accuracy": ...} of these weights, exactly as `fit` evaluates a test set. The
    arguments are those of `fit`; of a Run, or of what `load` returns, pass `params` and `state`.
    `step` is needed only for an objective that declares it: the steps trained before."""
    options = {name: value for name, value in locals().items() if name not in EVALUATED}
    ignored = getattr(data, "ignore_label", None)
    unused = sgd(lr=1.0)  # no step is taken
    recipe = recipe_of(model, optimizer=unused, ignored=ignored, **options)
    if data is None:
        raise UserError("data: is None; pass a dataset, as (x, y)")
    check_pairs({"data": data}, objective)
    if step is None and "step" in recipe.objective.declared:
        fix = "pass how many steps were trained, as step=run.step"
        raise UserError(f"step: the objective needs it; {fix}")
    sets = datasets(None, None, data, recipe.loader)
    with closing(Trainer(recipe, sets)) as trainer:
        reported_names(recipe, trainer.values["test"])
        check_weights(trainer.weight_specs, (params, state))
        weights = trainer.put_weights((params, state))
        sums = trainer.evaluate("test", weights=[weights], step=step or 0)
        assert sums is not None  # nothing stops it
        values = recipe.reader().values("test", sums)
    return {name.removeprefix("test_"): value for name, value in values.items()}


def check_weights(specs: Weights, weights: Weights) -> None:
    """Refuse a (params, state) that is not the model's."""
    for what, expected, given in zip(("params", "state"), specs, weights, strict=True):
        expected, given = (
            {name: np.shape(leaf) for name, leaf in named_leaves(tree).items()}
            for tree in (expected, given)
        )
        for name in {**expected, **given}:
            if (own := expected.get(name, "absent")) != (found := given.get(name, "absent")):
                fix = "pass the model with its own weights"
                raise UserError(f"{what}: {name} is {found}, and {own} in the model; {fix}")


def train_recipe(
    recipe: Recipe,
    sets: Sets,
    folder: Path | None = None,
    record: dict[str, Any] | None = None,
    checkpoint: Checkpoint | None = None,
    observers: Sequence[Any] = (),
    begin: Callable[[], None] = lambda: None,
) -> Run:
    """Train a recipe on {"train": dataset, "test": dataset, ...}, starting from the checkpoint if
    there is one, and return the finished Run. `begin` is called once all is checked, and before
    anything is written."""
    with shown_if_slow(
        "Tracing the programs of the run, and reading its first batches", early=True
    ):
        trainer = Trainer(recipe, sets)
    with closing(trainer):
        check_names(recipe, trainer.values["train"], sets)
        loop, start = assemble(recipe, trainer, sets, folder, record, checkpoint, observers, begin)
        return loop.train(start)


def assemble(
    recipe: Recipe,
    trainer: Trainer,
    sets: Sets,
    folder: Path | None = None,
    record: dict[str, Any] | None = None,
    checkpoint: Checkpoint | None = None,
    observers: Sequence[Any] = (),
    begin: Callable[[], None] = lambda: None,
) -> tuple[Loop, Point | None]:
    """(the Loop of a run with all of its observers, and its trainer started; the Point of the
    checkpoint, or None). `begin` is called before an observer may write."""
    recipe, training, record = recipe.for_sets(sets), recipe.training, record or {"config": {}}
    pretrained = None
    if not checkpoint or is_merged(recipe.model):  # no checkpoint holds frozen weights
        pretrained = pretrained_from(training.pretrained, recipe.model)
    with shown_if_slow("Preparing the first weights and the data on the device", early=True):
        fitted = None if pretrained or checkpoint else fitted_to_data(recipe, sets["train"])
        trainer.start(pretrained or fitted)
    record = record | digest_of_frozen(trainer.replica_states()[0].state)
    probe_spec = probe_input(trainer.feed.shapes, recipe.preprocess, recipe.model)
    model_with = lambda numbers: recipe.with_numbers(numbers).model  # noqa: E731
    probe = Probe(recipe.model, probe_spec, trainer.numbers, model_with)
    check_unchanged(trainer, probe, pretrained, checkpoint)
    start = point_of(checkpoint, trainer, folder) if checkpoint and folder else None
    jax.block_until_ready(trainer.states)  # an error such as too little memory appears only then
    begin()
    for name in trainer.evaluated_early:  # so that an error does not appear only after an epoch
        trainer.try_out(name)
    if pretrained:
        logger.info("%s %s", "With" if checkpoint else "Starting from", pretrained)
    run = Run(trainer, training.epochs, trainer.feed.steps, trainer.training_sums())
    reader, rates = recipe.reader(trainer), LearningRates(recipe.rates, trainer)
    own_folder = Path(folder) if folder and is_first() else None  # in the process that writes
    log = metric_log(recipe, own_folder, record, checkpoint)
    keeper = Keeper(folder, recipe.checkpoint, record, probe, checkpoint) if folder else None
    view = View(
        run, recipe, lambda: rates(run.step),
        sets=sets, folder=own_folder, config=record["config"], publish=log.publish,
        classes=record.get("classes"), tokenizer=record.get("tokenizer"),
    )  # fmt: skip
    histograms = log.publish.channels_for("histogram")
    monitor = recipe.checkpoint.monitor if keeper else None
    tokens = getattr(sets["train"], "tokens_per_example", None)
    clock = Clock(trainer, tokens, utilisation(trainer), training.max_seconds)
    draws = recipe.logging.histograms and (several() or histograms)
    team = [  # in the order in which they see the run
        *([keeper] if keeper else []),  # closed first, so that a signal cannot stop its write
        Divergence(trainer, training, keeper, log),
        FirstLines(recipe, trainer, monitor, bool(histograms)),
        *([ProgressBar()] if recipe.logging.progress_bar else []),
        log,
        *([Histograms(log.publish)] if draws else []),
        WaitingForData(clock, getattr(sets["train"], "advice", None)),
        *recipe.callbacks,
        *observers,
    ]
    best = partial(keeper.best, trainer) if keeper else None
    return Loop(run, recipe, team, view, reader, clock, rates, Signals(), best), start


def metric_log(
    recipe: Recipe, folder: Path | None, record: dict[str, Any], checkpoint: Checkpoint | None
) -> MetricLog:
    """The MetricLog of a run, with its trackers."""
    options, publish = recipe.logging, None
    if folder:
        config, step = record["config"], checkpoint.record["step"] if checkpoint else 0
        about = About(folder, config.get("title", folder.name), config, step)
        drawn = [PictureFiles()] if recipe.callbacks else []
        publish = Publisher([*options.trackers, *drawn], about)
    keep_going = recipe.checkpoint.on_write_error == "go_on"
    return MetricLog(folder, options, publish, keep_going=keep_going)


def check_run(recipe: Recipe, folder: Path | None, resume: object) -> None:
    """Refuse options of `fit` that contradict each other, and a format that cannot be written."""
    check_format(recipe.checkpoint.format)
    if resume not in (False, True, "override"):
        raise UserError(f'resume: must be False, True or "override", got {resume!r}')
    if folder is None and (resume or recipe.training.on_nonfinite == "rollback"):
        raise UserError(
            "fit: to resume, or to roll back, there must be checkpoints; give it a `folder`"
        )
    if folder is None and any(getattr(each, "restore_best", False) for each in recipe.callbacks):
        raise UserError(
            "callbacks: restore_best takes the weights from a checkpoint; give fit a `folder`"
        )
    if folder is None and recipe.logging.trackers:
        raise UserError("fit: trackers write into the folder of a run; give it a `folder`")


def recipe_of(
    model: Model,
    *,
    optimizer: Any,
    loss: LossFunction | None = cross_entropy,
    metrics: Sequence[Any] | Mapping[str, Any] | None = None,
    schedule: Schedule | None = None,
    preprocess: Sequence[Callable] = (),
    augment: Sequence[Callable] = (),
    objective: Callable = supervised,
    update: Callable[..., Update] = gradient_update,
    callbacks: Sequence[Any] = (),
    seed: int = 0,
    log: LoggingOptions | dict = EVERY_50_STEPS,
    checkpoint: CheckpointOptions | dict = SAVES_EVERY_EPOCH,
    rates: Mapping[str, Any] | None = None,
    mesh: MeshOptions | dict = ALL_DEVICES,
    sharding: Any = None,
    ignored: int | None = None,
    **options: Any,
) -> Recipe:
    """The Recipe of a model, from the arguments of `fit` that change what is computed. `ignored` is
    the label that loss and metrics do not count, unless they have their own `ignore_label`."""
    sections = {
        "loader": options_from(LoaderOptions, options),
        "training": options_from(TrainingOptions, options),
        "checkpoint": options_from(CheckpointOptions, checkpoint, "checkpoint"),
        "logging": options_from(LoggingOptions, log, "log"),
        "mesh": options_from(MeshOptions, mesh, "mesh"),
    }
    problems = [str(each) for each in sections.values() if isinstance(each, UserError)]
    problems += misfits({"seed": form(Seed)}, {"seed": seed})
    if problems:
        raise UserError("\n".join(problems))
    loss = ignoring(ignored, loss)
    metrics = default_metrics(loss, objective) if metrics is None else metrics
    functions = {"loss": loss, "objective": objective, "update": update}
    for kind, part in {"model": model, "optimizer": optimizer, **functions}.items():
        if kind != "loss" or loss is not None:  # the user's own objective may need no loss
            check_part(kind, part)
    if schedule is not None:
        check_schedule(schedule)
    lists = {"preprocess": preprocess, "augment": augment, "callbacks": callbacks}
    lists["metrics"] = metrics.values() if isinstance(metrics, dict) else metrics
    lists["trackers"] = sections["logging"].trackers
    for kind, listed in lists.items():
        check_list(kind, listed)
    parts = Parts(
        model=model,
        **functions,
        metrics={
            label: rule._replace(function=ignoring(ignored, rule.function))
            for label, rule in labelled(metrics).items()
        },
        preprocess=tuple(preprocess),
        augment=tuple(augment),
        optimizer=optimizer if schedule is None else scheduled(optimizer, schedule),
        callbacks=tuple(callbacks),
        rates=rates or {},
        seed=int(seed),
        sharding=sharding,
        **sections,
    )
    return compose(parts, Plan.on_paper(parts.mesh, sharding))


# Options.


def default_metrics(loss: LossFunction | None, objective: Callable) -> list[Callable[..., Metric]]:
    """Accuracy for what classifies, over the labels that count."""
    classifies = getattr(loss, "func", loss) is cross_entropy
    if not classifies or getattr(objective, "func", objective) not in (supervised, mixup, cutmix):
        return []
    ignored = getattr(loss, "keywords", {}).get("ignore_label")
    return [accuracy if ignored is None else partial(accuracy, ignore_label=ignored)]


def ignoring(label: int | None, function: Any) -> Any:
    """A loss or a metric that does not count a label, if it can and has no other `ignore_label`."""
    if label is None or not callable(function):
        return function
    is_given = "ignore_label" in getattr(function, "keywords", {})
    can = "ignore_label" in parameters_of(function)
    return partial(function, ignore_label=label) if can and not is_given else function


def options_from(options: type, given: object, name: str = "") -> Any:
    """Options from a dict of their fields, or the UserError that says what is wrong; without a
    name, of the arguments of `fit` those that are among them."""
    if isinstance(given, options):
        return given
    known = [field.name for field in fields(options)]
    if not isinstance(given, dict):
        return UserError(f"{name}: must be a dict of {', '.join(known)}, got {given!r}")
    if not name:
        given = {key: value for key, value in given.items() if key in known}
    if unknown := [key for key in given if key not in known]:
        hint = did_you_mean(unknown[0], known)
        return UserError(f"{name}: no such key {unknown[0]!r}{hint} ({', '.join(known)})")
    try:
        return options(**given)
    except ValueError as error:
        lines = [f"{name}.{line}".lstrip(".") for line in str(error).splitlines()]
        return UserError("\n".join(lines))


def check_known(given: Iterable[str], known: Collection[str]) -> None:
    """Refuse arguments of other names, as Python does, with the most similar name."""
    if unknown := [name for name in given if name not in known]:
        hint = did_you_mean(unknown[0], known)
        end = hint or f"; there are {', '.join(sorted(known))}"
        raise TypeError(f"fit() got an unexpected keyword argument {unknown[0]!r}{end}")


def own_record(recipe: Recipe, sets: Sets, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """The record of a run of `fit`: its options, the user's `config`, and what preprocesses its
    inputs. Other functions are not compared when a run is resumed, so a collate_fn is left out."""
    if config is not None and not isinstance(config, dict):
        fix = "pass vars(config)" if hasattr(config, "__dict__") else "pass {name: value}"
        raise UserError(f"config: must be a dict, got {type(config).__name__}; {fix}")
    loader = vars(recipe.loader) | {"collate_fn": None, "eval_collate_fn": None}
    own = {"seed": recipe.seed, "loader": loader, "training": vars(recipe.training)}
    config = config or {}
    for key in own.keys() & config.keys():
        if config[key] != own[key]:
            fix = f"pass the same as fit({key}=...)" if key == "seed" else "choose another key"
            raise UserError(f"config: {key!r} is the run's own, {own[key]!r}; {fix}")
    named = class_names(sets["train"]), tokenizer_json(sets["train"])
    record = run_folder.record(own | config, {}, sets, recipe.objective.fingerprints, *named)
    return record | {"written_by": "fit", "preprocess": described(recipe.preprocess)}


# The parts.


def check_part(kind: str, value: Any) -> None:
    """Refuse an argument that is not a part of this kind: a name, as a config has it, a function
    that has yet to be called, or anything else."""
    check_named(kind, value)
    cls = value if isinstance(value, type) else type(value)
    if kind == "model" and adapter_for(cls):
        fix = "wrap it: docs/other_libraries.md"
        raise UserError(f"model: {cls.__name__} is of another library; {fix}")
    needed = KINDS[kind].attributes
    missing = [name for name in needed if not hasattr(value, name) or value is cls]
    if not KINDS[kind].given and (missing or makes(value, kind)):
        if isinstance(value, list | tuple) and kind == "optimizer":
            fix = "chain them: chain(...) of training.transforms"
            raise UserError(f"optimizer: must be one optimizer, got {len(value)}; {fix}")
        if callable(value) and hasattr(value, "__name__"):
            raise UserError(uncalled(kind, value))
        fix = f"pass what a function in {' or '.join(KINDS[kind].homes)} returns"
        name = type(value).__name__
        raise UserError(f"{kind}: {name} has no {' and '.join(missing)}; {fix}")
    if KINDS[kind].given and not callable(value) and not isinstance(value, Tracked):
        raise UserError(f"{kind}: {value!r} is not a function; pass the function itself")


def check_schedule(schedule: Schedule) -> None:
    """Refuse an argument that is not a function from the step to a number."""
    check_part("schedule", schedule)
    try:
        value = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:  # the user's own, or a factory that was not called
        if hasattr(schedule, "__name__") and required(schedule) != required(lambda step: step):
            raise UserError(uncalled("schedule", schedule)) from error
        why = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"schedule: fails on a step: {why}") from error
    if getattr(value, "shape", None) != ():
        raise UserError(f"schedule: must return one number for a step, got {value}")
    first = float(jax.jit(schedule)(0))
    if not 0 <= first <= 1 + 1e-6:
        why = "it multiplies the optimizer's rate, so it must be from 0 to 1"
        raise UserError(f"schedule: returns {first:g} for the first step; {why}")


def check_list(kind: str, values: Any) -> None:
    """Refuse an argument that is not a list of parts."""
    if isinstance(values, str | dict) or not np.iterable(values) or isinstance(values, type):
        check_named(kind, values)
        name = part_name(values) if inspect.isfunction(values) else "..."
        raise UserError(f"{kind}: must be a list, got {values!r}; put it in brackets: [{name}]")
    for value in values:
        check_part(kind, value)


def check_named(kind: str, value: Any) -> None:
    """Refuse the name of a part, which is how a config refers to it."""
    name = value.get("name") if isinstance(value, dict) else value
    if not isinstance(name, str):
        return
    parts = find(kind)[0]
    near = [name] if name in parts else get_close_matches(name.lower(), parts, n=1)
    if not near:
        raise UserError(f"{kind}: {name!r} is only a name, and no part's: {', '.join(parts)}")
    part = parts[near[0]]
    hint = "" if near == [name] else f" (did you mean {near[0]!r}?)"
    use = part.__name__ if KINDS[kind].given else call_of(part)
    raise UserError(
        f"{kind}: {name!r} is only a name{hint}; pass the object: "
        f"from {part.__module__} import {part.__name__}, then {use}"
    )


def call_of(function: Callable) -> str:
    """The text of a call with the arguments that have no default."""
    return f"{function.__name__}({', '.join(required(function))})"


def required(function: Callable) -> list[str]:
    """The names of the arguments that have no default."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = parameters_of(function).values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def uncalled(kind: str, factory: Callable) -> str:
    """The message about a function that was passed instead of its result."""
    name = factory.__name__
    return f"{kind}: {name} is a function that makes one; call it: {call_of(factory)}"
