"""`fit` trains a model from Python, as in a notebook; `train_recipe` assembles a run from its
recipe, for `fit` and for the command line alike."""

import re
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from data_loader.base import Arrays, has_items, length
from data_loader.loader import first_batches, split
from data_loader.nest import map_nest
from training.checkpoint.keeper import Keeper
from training.checkpoint.pretrained import pretrained_from
from training.checkpoint.probe import Probe, probe_input
from training.checkpoint.storage import check_format
from training.devices.options import MeshOptions
from training.devices.processes import agreed, is_first
from training.devices.sharding import Plan
from training.devices.signals import Signals
from training.loop import Loop
from training.loss import cross_entropy
from training.metrics import accuracy
from training.objective import supervised
from training.options import CheckpointOptions, LoaderOptions, LoggingOptions, TrainingOptions
from training.recipe import Recipe, compose
from training.run import Clock, LearningRates, Run
from training.runs import folder as run_folder
from training.runs.dry_run import DryRun
from training.runs.recovery import Divergence, best_weights, check_unchanged, point_of
from training.runs.resume import holding
from training.trainer import Trainer
from training.transforms import scheduled
from training.update import gradient_update
from training.watching.console import ProgressBar, show_on_console
from training.watching.hooks import Callbacks, check_hooks
from training.watching.metric_log import EVERY_50_STEPS, MetricLog
from training.watching.publish import About, Publisher
from training.watching.view import View
from utils import UserError

EVERY_EPOCH = CheckpointOptions()


def fit(
    model,
    train,
    test=None,
    val=None,
    *,
    folder=None,
    record=None,
    resume=False,
    watchers=(),
    **settings,
) -> Run:
    """Train a model on a dataset, a pair of arrays (x, y), or any iterable of batches, and return
    the finished Run.

    `val` is one set or {name: set}. With a `folder`, the run leaves metrics.jsonl and checkpoints
    there, each with the `record`; `resume=True` continues from the newest good checkpoint, if there
    is one, `resume="override"` also with other options or data. `watchers` are watchers besides
    those of the toolkit (training/watchers.py). All other arguments are those of `recipe_of`.
    """
    recipe = recipe_of(model, **settings)
    sets = datasets(train, val, test, recipe.loader, recipe.training.overfit_batches)
    show_on_console()
    check_folder(recipe, folder, resume)
    record = record or own_record(recipe, sets)
    with holding(folder, resume, record) as checkpoint:
        return train_recipe(recipe, sets, folder, record, checkpoint, watchers=watchers)


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
    checkpoint=EVERY_EPOCH,
    rates=None,
    **options,
) -> Recipe:
    """The Recipe of a model.

    `metrics` is a list of functions or {name: function}, accuracy unless the loss is another one;
    one may be `tracked(...)` (training/tally.py). `objective` and `update` are factories as in
    training/objective.py and training/update.py. `options` are the fields of LoaderOptions and
    TrainingOptions: epochs, batch_size, replicas, ..., as well as `mesh` ({"fsdp": 4}) and
    `sharding`. `log` and `checkpoint` are LoggingOptions and CheckpointOptions, or dicts of their
    fields; `rates` are learning rates to log, {name: number or function of the step}.
    """
    loader, training, mesh, sharding = split_options(options)
    check_hooks(callbacks)
    parts = SimpleNamespace(
        model=model,
        loss=loss,
        metrics=default_metrics(loss) if metrics is None else metrics,
        preprocess=preprocess,
        augment=augment,
        objective=objective,
        update=update,
        optimizer=optimizer if schedule is None else scheduled(optimizer, schedule),
        callbacks=callbacks,
        rates=rates or {},
        seed=seed,
        loader=loader,
        training=training,
        checkpoint=made_of(CheckpointOptions, "checkpoint", checkpoint),
        logging=made_of(LoggingOptions, "log", log),
    )
    return compose(parts, Plan.on_paper(mesh, sharding))


def train_recipe(
    recipe, sets, folder=None, record=None, checkpoint=None, *, trainer=None, watchers=()
) -> Run:
    """Train a recipe on {"train": dataset, "test": dataset, ...}, from a checkpoint on if there is
    one, and return the finished Run. `trainer` is one that was made ahead of the data."""
    if trainer is not None and not trainer.suits(sets):
        trainer.close()
        trainer = None
    trainer = trainer or Trainer(recipe, sets)
    with closing(trainer):
        loop = assemble(recipe, trainer, sets, folder, record, checkpoint, watchers)
        try:
            start = checkpoint and point_of(checkpoint, trainer, folder)
        except BaseException:
            loop.close()  # its trackers have started
            raise
        return loop.train(start)


def assemble(recipe, trainer, sets, folder=None, record=None, checkpoint=None, watchers=()) -> Loop:
    """The Loop of a run with all of its watchers, and its trainer started."""
    training, record = recipe.training, record or {"config": {}}
    pretrained = None if checkpoint else pretrained_from(training.pretrained)
    trainer.start(sets, pretrained)
    probe = Probe(recipe.model, probe_input(trainer.feed.shapes, recipe.preprocess))
    check_unchanged(trainer, probe, pretrained, checkpoint)
    run = Run(trainer, training.epochs, trainer.feed.steps)
    reader, rates = recipe.reader(trainer), LearningRates(recipe.rates, trainer)
    own_folder = Path(folder) if folder and is_first() else None  # in the process that writes
    log = metric_log(recipe, own_folder, record, checkpoint)
    keeper = Keeper(folder, recipe.checkpoint, record, probe) if folder else None
    seen = {"sets": sets, "folder": own_folder, "config": record["config"]}
    view = View(run, lambda: rates(run.step), publish=log.publish, **seen)
    histograms = log.publish.channels_for("histogram")
    monitor = recipe.checkpoint.monitor if keeper else None
    team = [  # in the order in which they see the run
        Signals(),
        *([keeper] if keeper else []),
        Divergence(trainer, training, keeper, log),
        DryRun(recipe, trainer, reader, rates, monitor, histograms),
        *([ProgressBar()] if recipe.logging.progress_bar else []),
        log,
        Callbacks(recipe.callbacks, view),
        *watchers,
    ]
    best = (lambda: best_weights(keeper, trainer)) if keeper else None
    return Loop(run, recipe, team, reader, Clock(trainer), rates, best=best, agree=agreed)


def metric_log(recipe, folder, record, checkpoint):
    """The MetricLog of a run, with its trackers."""
    options, publish = recipe.logging, None
    if folder:
        config, step = record["config"], checkpoint.record["step"] if checkpoint else 0
        about = About(folder, config.get("title", folder.name), config, step)
        publish = Publisher(options.trackers, about)
    keep_going = recipe.checkpoint.on_write_error == "go_on"
    return MetricLog(folder, options, publish, keep_going=keep_going, ring=recipe.watch.ring)


def check_folder(recipe, folder, resume):
    """Refuse what cannot be done without the folder of a run."""
    check_format(recipe.checkpoint.format)
    if folder is None and (resume or recipe.training.on_nonfinite == "rollback"):
        raise UserError(
            "fit: to resume, or to roll back, there must be checkpoints; give it a `folder`"
        )
    if folder is None and recipe.logging.trackers:
        raise UserError("fit: trackers write into the folder of a run; give it a `folder`")


def own_record(recipe, sets):
    """The record of a run whose caller gives none: functions are not compared, so a collate_fn is
    left out."""
    loader = vars(recipe.loader) | {"collate_fn": None}
    config = {"seed": recipe.seed, "loader": loader, "training": vars(recipe.training)}
    with_items = {name: dataset for name, dataset in sets.items() if has_items(dataset)}
    return run_folder.record(config, {}, with_items)


def default_metrics(loss):
    """Accuracy for what classifies."""
    return [accuracy] if getattr(loss, "func", loss) is cross_entropy else []


def made_of(options, name, given):
    """Options from a dict of their fields."""
    if not isinstance(given, dict):
        return given
    known = [field.name for field in fields(options)]
    if unknown := given.keys() - set(known):
        names = ", ".join(sorted(unknown))
        raise UserError(f"{name}: no such key {names} ({', '.join(known)})")
    return options(**given)


def split_options(options):
    """(LoaderOptions, TrainingOptions, MeshOptions, sharding) from one dict of their fields."""
    mesh, sharding = (
        made_of(MeshOptions, "mesh", options.pop("mesh", {})),
        options.pop("sharding", None),
    )
    classes = (LoaderOptions, TrainingOptions)
    names = [{f.name for f in fields(cls)} for cls in classes]
    if unknown := options.keys() - names[0] - names[1]:
        known = ", ".join(sorted(names[0] | names[1] | {"mesh", "sharding"}))
        raise TypeError(f"fit() has no option {', '.join(sorted(unknown))}; there are {known}")
    loader, training = (
        cls(**{name: value for name, value in options.items() if name in own})
        for cls, own in zip(classes, names, strict=True)
    )
    return loader, training, mesh, sharding


def datasets(train, val, test, loader, overfit=0):
    """The sets of a run by name, with a validation set split off where `val_size` says so."""
    held_out = val if isinstance(val, dict) else {"val": val}
    check_names(held_out)
    sets = {"train": as_dataset(train)}
    sets |= {name: as_dataset(data) for name, data in {**held_out, "test": test}.items()}
    if loader.val_size:
        if "val" in held_out and held_out["val"] is not None:
            raise UserError(
                "loader.val_size: the data brings its own validation set; leave val_size at 0"
            )
        if not has_items(sets["train"]):
            raise UserError(
                "loader.val_size: an iterable of batches cannot be split; leave val_size at 0"
            )
        sets["train"], sets["val"] = split(sets["train"], loader.val_size, loader.split_seed)
    if overfit:
        sets["train"] = first_batches(sets["train"], overfit, loader.batch_size)
    sets = {name: dataset for name, dataset in sets.items() if dataset is not None}
    for name, dataset in sets.items():
        if length(dataset) == 0:
            raise UserError(f"data: the {name} set is empty")
    return sets


def split_sets(sets, loader, overfit=0):
    """The sets of a run from those that a Data loads."""
    validation = {name: sets[name] for name in sets if name not in ("train", "test")}
    return datasets(sets["train"], validation, sets.get("test"), loader, overfit)


def check_names(sets):
    """Metrics are called <set>_<metric>."""
    for name in sets:
        if not re.fullmatch(r"[a-z0-9-]+", name) or name in ("train", "test"):
            raise UserError(
                f"data: a validation set cannot be called {name!r}; "
                "use small letters, digits and '-'"
            )


def as_dataset(data):
    """A pair (x, y) of arrays, or of nests of them, as a dataset; anything else unchanged."""
    if isinstance(data, tuple | list) and len(data) == 2:
        return Arrays(*map_nest(np.asanyarray, data))
    return data
