"""A run from its parts to its exit code: checked by shapes, begun in a folder of its own or gone on with, trained, closed."""

import gc
import logging
import os
import shutil
import time
from functools import partial

import jax
import numpy as np

from data_loader.base import Arrays, loaded
from data_loader.loader import held_out
from training.checkpoint.pretrained import pretrained_from
from training.checkpoint.storage import check_format
from training.devices.processes import check_alike, from_first, is_first, together
from training.devices.sharding import Plan, check_divides, mesh_on_paper
from training.evaluations import in_epochs
from training.feed import nbytes
from training.fit import compose, configured, engine_of, fit
from training.measures import check_monitors, check_phases, check_sets, measured_names, measures
from training.runs import folder as run_folder
from training.runs import recovery, resume
from training.runs.memory import peak_memory, told
from training.runs.shape_check import blueprint, count, trace_shapes
from training.runs.signals import TEMPORARY, end_at_signals
from training.watching.console import be_silent, set_up_logging
from training.watching.hooks import check_hooks
from utils import DONE, STOPPED, UserError

SHOWS_WITHIN = (
    30  # seconds that a network's file system may take until another host sees a new folder
)

logger = logging.getLogger("main")


def shapes(parts, resumed=False):
    """A TrainState of shapes, once the parts are known to fit the data and each other, and what is monitored to be measured."""
    try:
        check_hooks(parts.callbacks)
        functions, watch = measures(parts.metrics, parts.callbacks, parts.logging)
        check_phases(watch, sets_of(parts))
        check_sets(parts.callbacks, sets_of(parts))
        pieces = (parts.model, parts.loss, functions, parts.preprocess, parts.augment)
        objective = compose(parts.objective, *pieces, parts.training.precision)
        example, batch_size = parts.data.example, parts.loader.batch_size
        params, state, reported = trace_shapes(
            parts.model, objective, parts.optimizer, example, batch_size, watch
        )
        check_monitors(
            monitors(parts), measured_names(evaluated_sets(parts), reported, watch, parts.rates)
        )
        for part in [
            part for part in (parts.checkpoint, *parts.callbacks) if hasattr(part, "sign")
        ]:
            part.sign()
        check_format(parts.checkpoint.format)
        if parts.training.pretrained and not resumed:
            pretrained_from(parts.training.pretrained).check(params, state)
        plan = Plan(mesh_on_paper(parts.mesh)[0], parts.sharding)
        check_divides(batch_size, plan.mesh)
        plan.cuts(params)
        update = configured(parts.update, objective, parts.optimizer, parts.training)(unroll=False)
        return blueprint(objective, update, params, state, example, batch_size, watch)
    except UserError as error:
        raise UserError(f"{parts.source}: {error}") from error


def monitors(parts):
    """{place in the config: the metric that is monitored there}"""
    callbacks = {
        f"callbacks.{i}.args.monitor": getattr(c, "monitor", None)
        for i, c in enumerate(parts.callbacks)
    }
    return {"checkpoint.monitor": parts.checkpoint.monitor} | callbacks


def evaluated_sets(parts):
    """The sets that metrics are measured on while a run trains."""
    return [
        "train",
        *(in_epochs(sets_of(parts), parts.training) if parts.training.eval_every else []),
    ]


def sets_of(parts):
    """{set: how many examples} of a run, with what is held out of the training set."""
    sizes, held = dict(parts.data.sizes), held_out(parts.data.sizes["train"], parts.loader.val_size)
    return sizes | ({"train": sizes["train"] - held, "val": held} if held else {})


def train(parts, root, named=None, override=False):
    """Begin a run, or go on with the one that is named: a folder, a checkpoint, or auto."""
    named, why = named or parts.resume, None

    def chosen():
        nonlocal why
        if named == "auto":
            run, why = resume.unfinished(parts.checkpoint.dir, parts.title)
            return run
        return resume.opened(resume.run_folder_of(named), named) if named else None

    run = resume.in_all(chosen)
    check_alike(run_folder.flat(parts.config))
    template = shapes(parts, resumed=run is not None)
    if run is not None and (
        end := from_first(lambda: resume.at_its_end(run, parts.training.epochs, override))
    ):
        if is_first():
            print(end)
        return DONE
    engine = engine_ahead(parts)
    if run is None:
        return fit_in(*begun(parts, root, why), parts, template, engine)
    return fit_in(run, *taken_up(run, parts, root, template, override), parts, template, engine)


def engine_ahead(parts):
    """The engine of a run, which compiles while the data is loaded; None where the data is known not to lie on the device as a
    whole. Should it turn out so, `fit` makes another one."""
    sizes, example = sets_of(parts), parts.data.example
    if not isinstance(example, tuple | list) or len(example) != 2:
        return None
    order = [
        "train",
        *(name for name in sizes if name not in ("train", "test")),
        *({"test"} & sizes.keys()),
    ]
    sets = {name: Arrays(*jax.tree.map(partial(many, sizes[name]), example)) for name in order}
    if (
        parts.loader.collate_fn
        or parts.training.overfit_batches
        or sum(map(nbytes, sets.values())) > parts.loader.device_budget_mb * 2**20
    ):
        return None
    functions, watch = measures(parts.metrics, parts.callbacks, parts.logging)
    pieces = (parts.model, parts.loss, functions, parts.preprocess, parts.augment)
    objective = compose(parts.objective, *pieces, parts.training.precision)
    make_update = configured(parts.update, objective, parts.optimizer, parts.training)
    devices = {"mesh": parts.mesh, "sharding": parts.sharding}
    return engine_of(
        parts.model,
        objective,
        make_update,
        sets,
        parts.loader,
        parts.training,
        parts.seed,
        watch,
        devices,
    )


def many(count, example):
    """The shape of so many examples."""
    return jax.ShapeDtypeStruct((count, *np.shape(example)), np.asarray(example).dtype)


def begun(parts, root, why):
    """A new run: its folder, its data, and the record for its checkpoints. `why` tells that there was none to go on with."""
    run = resume.in_all(
        lambda: resume.opened(run_folder.new_folder(parts.checkpoint.dir, parts.title))
    )
    end_at_signals(run.folder)
    begin_to_tell(root, run)
    if why:
        logger.info("%s: beginning a new one", why)
    try:
        with together():
            sets = loaded(parts.data)
        record = record_of(run, parts, sets)
        with together():
            if is_first():
                run_folder.describe(run.folder, record, sets, root)
    except BaseException:
        if is_first():
            shutil.rmtree(run.folder)  # nothing has run
        raise
    return run, sets, record


def record_of(run, parts, sets):
    """What a run's checkpoints tell of it, once its data is known to be the same in all processes, and its folder to be seen."""
    with together():
        record = run_folder.record(parts.config, parts.facts, sets)
    check_alike(
        {
            f"data: the fingerprint of the {name} set": found
            for name, found in record["data"].items()
        }
    )
    with together():
        if not seen(run.folder):
            raise UserError(
                f"checkpoint.dir: {run.folder}: process {jax.process_index()} does not see this folder of process 0; name one "
                "that all hosts share"
            )
    return record


def seen(folder):
    """Whether a folder is there, for which a file system over the network takes its time."""
    until = time.monotonic() + SHOWS_WITHIN
    while not folder.is_dir() and time.monotonic() < until:
        time.sleep(0.2)
    return folder.is_dir()


def begin_to_tell(root, run):
    """Log lines on the console and in the run's folder, of one process alone."""
    if is_first():
        set_up_logging(root, run.folder / "train.log")
    else:
        be_silent()


def taken_up(run, parts, root, template, override):
    """The data and the record of a run that is gone on with, once they are known to be the same as then, or insisted on."""
    end_at_signals(run.folder)
    with together():
        sets = loaded(parts.data)
    record = record_of(run, parts, sets)
    with together():
        changes = resume.changes(run, record, override)
        recovery.check_fits(
            run.found, template, parts.training.replicas
        )  # nothing in the folder was touched so far
        if is_first():
            resume.tidied(run)
    begin_to_tell(root, run)
    if not is_first():
        return sets, record
    for message in [*run.passed_over, *run_folder.changes_of_environment(run.folder, root)]:
        logger.warning(message)
    for change in changes:
        logger.info(change)
    run_folder.update(run.folder, record, root)
    return sets, record


def fit_in(run, sets, record, parts, template, engine):
    """Train in a run's folder."""
    announce(parts, sets, run, template.params)
    gc.enable()
    stopped = False
    try:
        done = fitted(parts, sets, run, record, engine)
        stopped = bool(done.signal) and done.cut_short
        logger.info("Peak memory: %s", told(peak := peak_memory()))
        if not stopped and is_first():
            run_folder.finish(run.folder, done, peak)
    finally:
        resume.close(run.lock)  # else the run would look as if it went on
        wanted = parts.logging.report and not stopped and is_first()  # a signal leaves no time
        if wanted and (run.folder / "metrics.jsonl").exists():
            report(run.folder)
    return close(done, STOPPED if stopped else DONE)


def fitted(parts, sets, run, record, engine):
    """The finished Run of the parts."""
    return fit(
        parts.model,
        sets["train"],
        sets.get("test"),
        {name: dataset for name, dataset in sets.items() if name not in ("train", "test")},
        loss=parts.loss,
        metrics=parts.metrics,
        optimizer=parts.optimizer,
        preprocess=parts.preprocess,
        augment=parts.augment,
        objective=parts.objective,
        update=parts.update,
        callbacks=parts.callbacks,
        seed=parts.seed,
        log=parts.logging,
        folder=run.folder,
        checkpoint=parts.checkpoint,
        record=record,
        resume=run,
        rates=parts.rates,
        engine=engine,
        mesh=parts.mesh,
        sharding=parts.sharding,
        **vars(parts.loader),
        **vars(parts.training),
    )


def report(folder):
    """The page of a run; what goes wrong with it is no reason to fail."""
    from training.report.page import write_report

    try:
        logger.info("Report: %s", write_report([folder]))
    except Exception as error:  # the run itself went well
        logger.warning("%s: no report could be written: %s", folder, error)


def close(done, code):
    """The exit code; where a tracker is stuck, the process ends at once, since the interpreter would wait for it."""
    if not done.published:
        logging.shutdown()
        for temporary in TEMPORARY:
            shutil.rmtree(temporary, ignore_errors=True)
        os._exit(code)
    return code


def announce(parts, sets, run, params):
    """The first lines of a run."""
    logger.info("Start Training! [%s]", parts.title)
    logger.info("The model has %d parameters", count(params))
    for name, size in sets_of(parts).items():
        source = run_folder.source(sets.get(name, sets["train"]))
        logger.info("%s data: %d examples from %s", name.capitalize(), size, source)
    logger.info("Run folder: %s", run.folder)
    if run.found:
        logger.info("Going on from %s, after step %d", run.found.name, run.found.record["step"])
    if not parts.checkpoint.save_optimizer_state:
        logger.warning(
            "checkpoint.save_optimizer_state is false: a run that is killed cannot be gone on with"
        )
