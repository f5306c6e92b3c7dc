"""`fit` composes the parts of a run and trains them; it is all that a notebook needs."""

import inspect
import re
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import numpy as np

from data_loader.base import Arrays, has_items, length
from data_loader.loader import first_batches, split
from data_loader.nest import map_nest
from training.checkpoint.keeper import Keeper
from training.checkpoint.pretrained import pretrained_from
from training.checkpoint.probe import Probe, probe_input
from training.checkpoint.storage import check_format
from training.devices.options import MeshOptions
from training.devices.processes import is_first
from training.engine import Engine
from training.evaluations import at_the_end, in_epochs
from training.loop import Loop
from training.loss import cross_entropy
from training.measures import measures, part_name
from training.metrics import accuracy
from training.objective import supervised, with_precision
from training.options import CheckpointOptions, LoaderOptions, LoggingOptions, TrainingOptions
from training.rates import LearningRates
from training.readings import Reader
from training.run import Run
from training.runner import Runner
from training.runs import folder as run_folder
from training.runs.recovery import check_unchanged
from training.runs.resume import holding
from training.transforms import scheduled
from training.update import gradient_update
from training.watching.console import show_on_console
from training.watching.hooks import check_hooks
from training.watching.metric_log import MetricLog
from training.watching.publish import About, Publisher
from utils import UserError

EVERY_EPOCH = CheckpointOptions()
EVERY_50_STEPS = LoggingOptions()


def fit(
    model,
    train,
    test=None,
    val=None,
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
    folder=None,
    checkpoint=EVERY_EPOCH,
    record=None,
    resume=False,
    rates=None,
    engine=None,
    **options,
) -> Run:
    """Train a model on a dataset, a pair of arrays (x, y), or any iterable of batches, and return the finished Run.

    `metrics` is a list of functions or {name: function}, accuracy unless the loss is another one; one may be `tracked(...)` (see
    training/tally.py). `val` is one set or {name: set}. `objective` and `update` are factories as in training/objective.py and
    training/update.py; `options` are the fields of LoaderOptions and TrainingOptions: epochs, batch_size, replicas, ..., as well
    as `mesh` ({"fsdp": 4}) and `sharding`, as in training/devices/sharding.py. `log` and `checkpoint` are LoggingOptions and
    CheckpointOptions, or dicts of their fields; `rates` are learning rates to log, {name: number or function of the step}. With a
    `folder` the run leaves metrics.jsonl and checkpoints there, each with the `record`; `resume=True` goes on from the newest
    good one there, if there is one, `resume="override"` also with other options or data. `engine` is one made ahead of the
    data, by `engine_of`.
    """
    loader, training, devices = split_options(options)
    log, checkpoint = (
        made_of(LoggingOptions, "log", log),
        made_of(CheckpointOptions, "checkpoint", checkpoint),
    )
    metrics = default_metrics(loss) if metrics is None else metrics
    functions, watch = measures(metrics, callbacks, log)
    objective = compose(objective, model, loss, functions, preprocess, augment, training.precision)
    optimizer = optimizer if schedule is None else scheduled(optimizer, schedule)
    make_update = configured(update, objective, optimizer, training)
    sets = datasets(train, val, test, loader, training.overfit_batches)
    show_on_console()
    check_run(seed, training, callbacks, folder, resume, log.trackers, checkpoint.format)
    record = record or own_record(seed, loader, training, sets)
    with holding(folder, resume, record) as found:
        pretrained = None if found else pretrained_from(training.pretrained)
        if engine is None or not engine.suits(sets):
            engine = engine_of(
                model, objective, make_update, sets, loader, training, seed, watch, devices
            )
        with closing(
            Runner(model, objective, make_update, sets, loader, restore=pretrained, engine=engine)
        ) as runner:
            probe = Probe(model, probe_input(runner.feed.shapes, preprocess))
            check_unchanged(runner, probe, pretrained, found)
            lines, keeper = observers(folder, checkpoint, log, record, probe, found)
            seen = {
                "sets": sets,
                "folder": lines.folder(),
                "config": record["config"],
                "publish": lines.publish,
            }
            rates = LearningRates(rates if "learning_rate" in watch.needs else None, runner)
            reader = Reader(
                getattr(objective, "finish", Reader().finish), watch.hidden, runner.leaves
            )
            told = {"keeper": keeper, "found": found, "seen": seen, "rates": rates}
            return Loop(runner, reader, callbacks, training, lines, log, **told).run_all()


def made_of(options, name, given):
    """Options from a dict of their fields."""
    known = [field.name for field in fields(options)]
    if isinstance(given, dict) and (unknown := given.keys() - set(known)):
        raise UserError(f"{name}: no such key {', '.join(sorted(unknown))} ({', '.join(known)})")
    return options(**given) if isinstance(given, dict) else given


def engine_of(model, objective, make_update, sets, loader, training, seed, watch, devices):
    """The Engine of a run by its options; Arrays of the sets may hold shapes, `devices` are its mesh and sharding."""
    options = {
        "replicas": training.replicas,
        "freeze": training.on_nonfinite != "skip",
        "limit": training.limit_batches,
    }
    tried = [*in_epochs(sets, training), *at_the_end(sets, training)]
    return Engine(
        model,
        objective,
        make_update,
        sets,
        loader,
        seed=seed,
        watch=watch,
        tried=tried,
        **options,
        **devices,
    )


def check_run(seed, training, callbacks, folder, resume, trackers, form):
    """Refuse what cannot be run."""
    check_format(form)
    if not 0 <= seed <= 2**32 - training.replicas:
        raise UserError(
            f"seed: must be at least 0 and leave room for {training.replicas} replicas below 2**32, got {seed}"
        )
    check_hooks(callbacks)
    if folder is None and (resume or training.on_nonfinite == "rollback"):
        raise UserError(
            "fit: to resume, or to roll back, there must be checkpoints; give it a `folder`"
        )
    if folder is None and trackers:
        raise UserError("fit: trackers write into the folder of a run; give it a `folder`")


def default_metrics(loss):
    """Accuracy for what classifies."""
    return [accuracy] if getattr(loss, "func", loss) is cross_entropy else []


def observers(folder, checkpoint, log, record, probe, found):
    """(the metric log with its trackers, the keeper) of a run; without a folder there is nothing to keep."""
    if folder is None:
        return MetricLog(), None
    if not is_first():
        return MetricLog(), Keeper(folder, checkpoint, record, probe)
    about = About(
        Path(folder),
        record["config"].get("title", Path(folder).name),
        record["config"],
        found.record["step"] if found else 0,
    )
    publish = Publisher(log.trackers, about)
    lines = MetricLog(Path(folder) / "metrics.jsonl", checkpoint.on_write_error == "go_on", publish)
    return lines, Keeper(folder, checkpoint, record, probe)


def own_record(seed, loader, training, sets):
    """What `fit` can tell of a run whose caller tells nothing: functions are not compared, so a collate_fn is left out."""
    config = {
        "seed": seed,
        "loader": vars(loader) | {"collate_fn": None},
        "training": vars(training),
    }
    return run_folder.record(
        config, {}, {name: dataset for name, dataset in sets.items() if has_items(dataset)}
    )


def compose(objective, model, loss, metrics, preprocess=(), augment=(), precision="float32"):
    """The objective over the model in its precision; `metrics` are {label: function}."""
    try:
        return objective(with_precision(model, precision), loss, metrics, preprocess, augment)
    except ValueError as error:
        raise UserError(f"objective.args.{error}") from error


def split_options(options):
    """(LoaderOptions, TrainingOptions, {"mesh": MeshOptions, "sharding": rules}) from one dict of their fields."""
    devices = {
        "mesh": made_of(MeshOptions, "mesh", options.pop("mesh", {})),
        "sharding": options.pop("sharding", None),
    }
    classes = (LoaderOptions, TrainingOptions)
    names = [{f.name for f in fields(cls)} for cls in classes]
    if unknown := options.keys() - names[0] - names[1]:
        known = sorted(names[0] | names[1] | devices.keys())
        raise TypeError(
            f"fit() has no option {', '.join(sorted(unknown))}; there are {', '.join(known)}"
        )
    return *(
        cls(**{k: v for k, v in options.items() if k in own})
        for cls, own in zip(classes, names, strict=True)
    ), devices


def configured(update, objective, optimizer, training):
    """make_update(unroll), with those training options that the update takes; one that is set but not taken is an error."""
    taken = inspect.signature(update).parameters
    for name, neutral in (("accumulate", 1), ("ema", None)):
        if name not in taken and getattr(training, name) != neutral:
            raise UserError(
                f"training.{name}: the update {part_name(update)!r} takes no {name!r}; leave it at its default"
            )

    def make_update(unroll):
        given = {"accumulate": training.accumulate, "ema": training.ema, "unroll": unroll}
        return update(
            objective, optimizer, **{name: value for name, value in given.items() if name in taken}
        )

    return make_update


def datasets(train, val, test, loader, overfit=0):
    """The sets of a run by name, with a validation set cut off the training set where `val_size` says so."""
    held_out = val if isinstance(val, dict) else {"val": val}
    check_names(held_out)
    sets = {"train": as_dataset(train)} | {
        name: as_dataset(data) for name, data in {**held_out, "test": test}.items()
    }
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
    for name, dataset in sets.items():
        if dataset is not None and length(dataset) == 0:
            raise UserError(f"data: the {name} set is empty")
    return {name: dataset for name, dataset in sets.items() if dataset is not None}


def check_names(sets):
    """Metrics are called <set>_<metric>."""
    for name in sets:
        if not re.fullmatch(r"[a-z0-9-]+", name) or name in ("train", "test"):
            raise UserError(
                f"data: a validation set cannot be called {name!r}; use small letters, digits and '-'"
            )


def as_dataset(data):
    """A pair (x, y) of arrays, or of nests of them, as a dataset; anything else as it is."""
    if isinstance(data, tuple | list) and len(data) == 2:
        return Arrays(*map_nest(np.asanyarray, data))
    return data
