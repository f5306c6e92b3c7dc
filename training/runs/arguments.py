"""The arguments of `fit`, checked as a config is, and made into a Recipe."""

import operator
from dataclasses import fields
from functools import partial
from types import SimpleNamespace

from data_loader.base import class_names, tokenizer_json
from training.base import Tracked
from training.checkpoint.record import described
from training.devices.options import MeshOptions
from training.devices.sharding import Plan
from training.loss import cross_entropy
from training.metrics import accuracy
from training.objective import cutmix, mixup, supervised
from training.observers import check_observers
from training.options import (
    CheckpointOptions,
    LoaderOptions,
    LoggingOptions,
    TrainingOptions,
)
from training.recipe import Recipe, compose
from training.runs import folder as run_folder
from training.runs.argument_checks import (
    check_list,
    check_part,
    check_schedule,
)
from training.transforms import scheduled
from training.update import gradient_update
from training.watching.metric_log import EVERY_50_STEPS
from utils import UserError, did_you_mean, parameters_of

SAVES_EVERY_EPOCH, ALL_DEVICES = CheckpointOptions(), MeshOptions()


def recipe_of(
    model,
    *,
    optimizer,
    loss=cross_entropy,
    metrics=None,
    schedule=None,
    preprocess=(),
    augment=(),
    objective=supervised,
    update=gradient_update,
    callbacks=(),
    seed=0,
    log=EVERY_50_STEPS,
    checkpoint=SAVES_EVERY_EPOCH,
    rates=None,
    mesh=ALL_DEVICES,
    sharding=None,
    ignored=None,
    **options,
) -> Recipe:
    """The Recipe of a model, from the arguments of `fit` that change what is computed. `ignored` is
    the label that loss and metrics do not count, unless they have their own `ignore_label`."""
    sections = {
        "loader": made_of(LoaderOptions, options),
        "training": made_of(TrainingOptions, options),
        "checkpoint": made_of(CheckpointOptions, checkpoint, "checkpoint"),
        "logging": made_of(LoggingOptions, log, "log"),
        "mesh": made_of(MeshOptions, mesh, "mesh"),
    }
    if options.get("vary"):
        raise UserError("vary: names numbers by their paths in a config; `fit` has none")
    if problems := [str(each) for each in sections.values() if isinstance(each, UserError)]:
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
    check_observers(callbacks)
    parts = SimpleNamespace(
        model=model,
        **functions,
        metrics=all_ignoring(ignored, metrics),
        preprocess=preprocess,
        augment=augment,
        optimizer=optimizer if schedule is None else scheduled(optimizer, schedule),
        callbacks=callbacks,
        rates=rates or {},
        vary={},
        seed=whole_number("seed", seed),
        **sections,
    )
    return compose(parts, Plan.on_paper(parts.mesh, sharding))


# Options.


def default_metrics(loss, objective):
    """Accuracy for what classifies, over the labels that count."""
    classifies = getattr(loss, "func", loss) is cross_entropy
    if not classifies or getattr(objective, "func", objective) not in (supervised, mixup, cutmix):
        return []
    ignored = getattr(loss, "keywords", {}).get("ignore_label")
    return [accuracy if ignored is None else partial(accuracy, ignore_label=ignored)]


def all_ignoring(label, metrics):
    """Metrics, in a dict or a list, that do not count a label."""
    if isinstance(metrics, dict):
        return {name: ignoring(label, metric) for name, metric in metrics.items()}
    return [ignoring(label, metric) for metric in metrics]


def ignoring(label, function):
    """A loss or a metric that does not count a label, if it can and has no other `ignore_label`."""
    if isinstance(function, Tracked):
        return function._replace(function=ignoring(label, function.function))
    if label is None or not callable(function):
        return function
    is_given = "ignore_label" in getattr(function, "keywords", {})
    can = "ignore_label" in parameters_of(function)
    return partial(function, ignore_label=label) if can and not is_given else function


def made_of(options, given, name=""):
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


def check_known(given, known):
    """Refuse arguments of other names, as Python does, with the most similar name."""
    if unknown := [name for name in given if name not in known]:
        hint = did_you_mean(unknown[0], known)
        end = hint or f"; there are {', '.join(sorted(known))}"
        raise TypeError(f"fit() got an unexpected keyword argument {unknown[0]!r}{end}")


def whole_number(name, value):
    try:
        return operator.index(value)
    except TypeError:
        raise UserError(f"{name}: must be a whole number, got {value!r}") from None


def own_record(recipe, sets, config=None):
    """The record of a run of `fit`: its options, the user's `config`, and what preprocesses its
    inputs. Other functions are not compared when a run is resumed, so a collate_fn is left out."""
    if config is not None and not isinstance(config, dict):
        fix = "pass vars(config)" if hasattr(config, "__dict__") else "pass {name: value}"
        raise UserError(f"config: must be a dict, got {type(config).__name__}; {fix}")
    loader = vars(recipe.loader) | {"collate_fn": None, "eval_collate_fn": None}
    own = {"seed": recipe.seed, "loader": loader, "training": vars(recipe.training)}
    for key in own.keys() & (config or {}).keys():
        if config[key] != own[key]:
            fix = f"pass the same as fit({key}=...)" if key == "seed" else "choose another key"
            raise UserError(f"config: {key!r} is the run's own, {own[key]!r}; {fix}")
    named = class_names(sets["train"]), tokenizer_json(sets["train"])
    record = run_folder.record(
        own | (config or {}), {}, sets, recipe.objective.fingerprints, *named
    )
    return record | {"written_by": "fit", "preprocess": described(recipe.preprocess)}
