"""`fit` composes the parts of a run and trains them; it is all that a notebook needs."""

import inspect
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import numpy as np

from data_loader.base import Arrays, has_items, length
from data_loader.loader import split
from data_loader.nest import map_nest
from training import run_folder
from training.callbacks import check_hooks
from training.checkpoint.keeper import Keeper
from training.checkpoint.pretrained import pretrained_from
from training.checkpoint.probe import Probe, probe_input
from training.checkpoint.storage import check_format
from training.loop import Loop
from training.loss import cross_entropy
from training.metric_log import MetricLog, show_on_console
from training.metrics import accuracy
from training.objective import supervised, with_precision
from training.options import CheckpointOptions, LoaderOptions, TrainingOptions
from training.recovery import check_unchanged
from training.resume import holding
from training.run import Run
from training.runner import Runner
from training.transforms import scheduled
from training.update import gradient_update
from utils import UserError

EVERY_EPOCH = CheckpointOptions()


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
    log_every=50,
    folder=None,
    checkpoint=EVERY_EPOCH,
    record=None,
    resume=False,
    **options,
) -> Run:
    """Train a model on a dataset, a pair of arrays (x, y), or any iterable of batches, and return the finished Run.

    `metrics` is a list of functions or {name: function}, accuracy unless the loss is another one; `objective` and `update` are
    factories as in training/objective.py and training/update.py; `options` are the fields of LoaderOptions and TrainingOptions:
    epochs, batch_size, replicas, ... With a `folder` the run leaves metrics.jsonl and checkpoints there, as `checkpoint` says,
    each with the `record`; `resume=True` goes on from the newest good one there, if there is one, `resume="override"` also with
    other options or data.
    """
    if metrics is None:
        metrics = [accuracy] if loss is cross_entropy else []
    if log_every < 1:
        raise ValueError(f"log_every: must be at least 1, got {log_every}")
    loader, training = split_options(options)
    objective = compose(objective, model, loss, metrics, preprocess, augment, training.precision)
    optimizer = optimizer if schedule is None else scheduled(optimizer, schedule)
    make_update = configured(update, objective, optimizer, training)
    sets = datasets(train, val, test, loader)
    show_on_console()
    if not 0 <= seed <= 2**32 - training.replicas:
        raise UserError(f"seed: must be at least 0 and leave room for {training.replicas} replicas below 2**32, got {seed}")
    check_hooks(callbacks)
    checkpoint = CheckpointOptions(**checkpoint) if isinstance(checkpoint, dict) else checkpoint
    check_format(checkpoint.format)
    record = record or own_record(seed, loader, training, sets)
    if folder is None and (resume or training.on_nonfinite == "rollback"):
        raise UserError("fit: to resume, or to roll back, there must be checkpoints; give it a `folder`")
    with holding(folder, resume, record) as found:
        pretrained = None if found else pretrained_from(training.pretrained)
        engine = {"seed": seed, "replicas": training.replicas, "freeze": training.on_nonfinite != "skip"}
        with closing(Runner(model, objective, make_update, sets, loader, restore=pretrained, **engine)) as runner:
            probe = Probe(model, probe_input(runner.feeds["train"].shapes, preprocess))
            check_unchanged(runner, probe, pretrained, found)
            log, keeper = observers(folder, checkpoint, record, probe)
            return Loop(runner, objective, callbacks, training, log, log_every, keeper, found).run_all()


def observers(folder, checkpoint, record, probe):
    """(the metric log, the keeper) of a run; without a folder there is nothing to keep."""
    if folder is None:
        return MetricLog(), None
    log = MetricLog(Path(folder) / "metrics.jsonl", checkpoint.on_write_error == "go_on")
    return log, Keeper(folder, checkpoint, record, probe)


def own_record(seed, loader, training, sets):
    """What `fit` can tell of a run whose caller tells nothing: functions are not compared, so a collate_fn is left out."""
    config = {"seed": seed, "loader": vars(loader) | {"collate_fn": None}, "training": vars(training)}
    return run_folder.record(config, {}, {name: dataset for name, dataset in sets.items() if has_items(dataset)})


def compose(objective, model, loss, metrics, preprocess=(), augment=(), precision="float32"):
    """The objective over the model in its precision, with metrics under their names."""
    names = list(metrics) if isinstance(metrics, dict) else [part_name(fn) for fn in metrics]
    for i, name in enumerate(names):
        if name in ("loss", *names[:i]) or "/" in name:
            raise UserError(f"metrics: the name {name!r} is taken, or has a '/'; give {{name: function}} with other names")
    named = metrics if isinstance(metrics, dict) else dict(zip(names, metrics, strict=True))
    try:
        return objective(with_precision(model, precision), loss, named, preprocess, augment)
    except ValueError as error:
        raise UserError(f"objective.args.{error}") from error


def part_name(fn):
    """The name of a function, also under functools.partial."""
    return getattr(fn, "func", fn).__name__


def split_options(options):
    """(LoaderOptions, TrainingOptions) from one dict of their fields."""
    classes = (LoaderOptions, TrainingOptions)
    names = [{f.name for f in fields(cls)} for cls in classes]
    if unknown := options.keys() - names[0] - names[1]:
        raise TypeError(f"fit() has no option {', '.join(sorted(unknown))}; there are {', '.join(sorted(names[0] | names[1]))}")
    return tuple(cls(**{k: v for k, v in options.items() if k in own}) for cls, own in zip(classes, names, strict=True))


def configured(update, objective, optimizer, training):
    """make_update(unroll), with those training options that the update takes; one that is set but not taken is an error."""
    taken = inspect.signature(update).parameters
    for name, neutral in (("accumulate", 1), ("ema", None)):
        if name not in taken and getattr(training, name) != neutral:
            raise UserError(f"training.{name}: the update {part_name(update)!r} takes no {name!r}; leave it at its default")

    def make_update(unroll):
        given = {"accumulate": training.accumulate, "ema": training.ema, "unroll": unroll}
        return update(objective, optimizer, **{name: value for name, value in given.items() if name in taken})

    return make_update


def datasets(train, val, test, loader):
    """The sets of a run by name, with a validation set cut off the training set where `val_size` says so."""
    sets = {"train": as_dataset(train), "val": as_dataset(val), "test": as_dataset(test)}
    if loader.val_size:
        if val is not None:
            raise UserError("loader.val_size: the data brings its own validation set; leave val_size at 0")
        if not has_items(sets["train"]):
            raise UserError("loader.val_size: an iterable of batches cannot be split; leave val_size at 0")
        sets["train"], sets["val"] = split(sets["train"], loader.val_size, loader.split_seed)
    for name, dataset in sets.items():
        if dataset is not None and length(dataset) == 0:
            raise UserError(f"data: the {name} set is empty")
    return {name: dataset for name, dataset in sets.items() if dataset is not None}


def as_dataset(data):
    """A pair (x, y) of arrays, or of nests of them, as a dataset; anything else as it is."""
    if isinstance(data, tuple | list) and len(data) == 2:
        return Arrays(*map_nest(np.asanyarray, data))
    return data
