"""From the parts of a config to an exit code: check by shapes, open the run's folder, new or
resumed, train, close."""

import logging
import os
import shutil
import time
from functools import partial

import jax
import numpy as np

from data_loader.base import Arrays, class_names, loaded, tokenizer_json
from data_loader.loader import held_out
from training.base import has_frozen
from training.checkpoint.pretrained import check_arguments
from training.devices.processes import check_alike, from_first, is_first, several, together
from training.devices.sharding import Plan
from training.devices.signals import end_at_signals
from training.feed import nbytes, stacks
from training.fit import split_sets, train_recipe
from training.preprocess import bound, fitted
from training.recipe import compose, recorded_statistics, with_statistics
from training.runs import folder as run_folder
from training.runs import recovery, resume
from training.runs.argument_checks import check_callbacks
from training.runs.shape_check import check_shapes, count
from training.trainer import Trainer
from training.watching.console import be_silent, check_logging, set_up_logging
from training.watching.hooks import check_hooks
from utils import DONE, STOPPED, UserError, format_bytes, peak_of_process, shown_if_slow

VISIBLE_WITHIN = (
    30  # seconds that a network file system may take to show a new folder to other hosts
)

logger = logging.getLogger("main")


def checked_recipe(parts, resumed=False):
    """(the Recipe of a config's parts, its TrainState as shapes), once everything is known to
    fit."""
    try:
        check_hooks(parts.callbacks)
        check_arguments(parts.config)
        recipe = compose(parts, Plan.on_paper(parts.mesh, parts.sharding))
        check_callbacks(recipe, parts.data)
        return recipe, check_shapes(recipe, parts.data.example, sizes_of(parts), resumed)
    except UserError as error:
        raise UserError(f"{parts.source}: {error}") from error


def sizes_of(parts):
    """{set: how many examples} of a run, with what is held out of the training set."""
    sizes = dict(parts.data.sizes)
    count = held_out(sizes["train"], parts.loader.val_size)
    return sizes | ({"train": sizes["train"] - count, "val": count} if count else {})


def train(parts, root, named=None, override=False, temporary=None, watchers=()):
    """Begin a run, or resume the one that is named: a folder, a checkpoint, or auto. `temporary` is
    a folder that is deleted with the process, `watchers` are some besides those of every run."""
    if parts.beyond:
        raise UserError("\n".join(parts.beyond))
    named, why_new = named or parts.resume, None

    def open_named():
        nonlocal why_new
        if named == "auto":
            run, why_new = resume.unfinished(parts.checkpoint.dir, parts.title, parts.run_name)
            return run
        return resume.opened(resume.run_folder_of(named), named) if named else None

    run = resume.opened_by_first(open_named)
    check_alike(run_folder.flat(parts.config))
    check_logging(root)
    with shown_if_slow("Checking that all parts of the config fit", early=True):
        recipe, template = checked_recipe(parts, resumed=run is not None)
    options = parts.training
    if run is not None and (end := from_first(lambda: resume.at_its_end(run, options, override))):
        if is_first():
            print(end)
        return DONE
    with shown_if_slow("Tracing the programs of the run", early=True):
        trainer, as_built = trainer_ahead(recipe, parts), parts
    if run is None:
        run, parts, sets, record = new_run(parts, recipe, root, why_new, temporary)
    else:
        checked = recipe, template
        parts, sets, record = resumed_run(run, parts, *checked, root, override, temporary)
    if parts is not as_built:  # preprocessing has its statistics now
        recipe = compose(parts, recipe.plan)
    announce(parts, sets, run, template)
    done = train_in_folder(run, recipe, sets, record, trainer, watchers)
    code = STOPPED if done.signal and done.cut_short else DONE
    if not done.published:  # a tracker is stuck, and the interpreter would wait for it at its end
        logging.shutdown()
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        os._exit(code)
    return code


def trainer_ahead(recipe, parts):
    """The Trainer, whose programs compile while the data is loaded; None if the data is known not
    to be on the device as a whole, or if preprocessing needs statistics of it. If it turns out
    so, another Trainer is made."""
    sizes, example = sizes_of(parts), parts.data.example
    if not getattr(parts.data, "resident", True):
        return None
    if not isinstance(example, tuple | list) or len(example) != 2:
        return None
    validation = [name for name in sizes if name not in ("train", "test")]
    order = ["train", *validation, *({"test"} & sizes.keys())]
    sets = {name: Arrays(*jax.tree.map(partial(many, sizes[name]), example)) for name in order}
    too_large = sum(map(nbytes, sets.values())) > parts.loader.device_budget_mb * 2**20
    stacked = all(stacks(parts.loader.of(name)) for name in sizes)
    if not stacked or parts.training.overfit_batches or too_large or parts.unfitted:
        return None
    return Trainer(recipe, sets)


def many(count, example):
    """The shape of so many examples."""
    return jax.ShapeDtypeStruct((count, *np.shape(example)), np.asarray(example).dtype)


def new_run(parts, recipe, root, why_new, temporary):
    """(a new run's folder, the parts, its data, the record for its checkpoints); `why_new` says why
    there was none to resume."""
    new_folder = partial(run_folder.new_folder, parts.checkpoint.dir, parts.title, parts.run_name)
    run = resume.opened_by_first(lambda: resume.opened(new_folder()))
    handle_signals(run, temporary)
    begin_to_log(root, run)
    if why_new:
        logger.info("%s: beginning a new one", why_new)
    try:
        parts, sets, record = with_data(run, parts, recipe)
        with together():
            if is_first():
                run_folder.describe(run.folder, record, sets, root, parts.own_files())
    except BaseException:
        if is_first():
            shutil.rmtree(run.folder)  # no step was taken
        raise
    return run, parts, sets, record


def resumed_run(run, parts, recipe, template, root, override, temporary):
    """(the parts, the data, the record) of a resumed run, once they are known to be the same as
    before, or insisted on."""
    handle_signals(run, temporary)
    parts, sets, record = with_data(run, parts, recipe)
    with together():
        changes = resume.changes(run, record, override)
        # Nothing in the folder was changed until here.
        recovery.check_fits(run.checkpoint, template, parts.training.replicas)
        former = resume.tidied(run) if is_first() else None
    begin_to_log(root, run)
    if is_first():
        for message in [*run.skipped, *run_folder.changes_of_environment(run.folder, root)]:
            logger.warning(message)
        for change in [*changes, *([former] if former else [])]:
            logger.info(change)
        run_folder.update(run.folder, record, root)
    return parts, sets, record


def with_data(run, parts, recipe):
    """(the parts, with statistics of the training set where preprocessing needs them; the data; the
    record). A resumed run keeps its statistics."""
    with together(), shown_if_slow(f"Reading the data: {data_name(parts)}", early=True):
        sets = loaded(parts.data, parts.loader)
    if parts.unfitted:
        statistics = run.checkpoint and recorded_statistics(parts, run.checkpoint.record["config"])
        if len(statistics or ()) < len(parts.unfitted):
            statistics = from_first(lambda: computed_statistics(parts, sets))
        parts = with_statistics(parts, statistics)
    return parts, sets, record_of(run, parts, sets, recipe)


def data_name(parts):
    """What the config calls its data."""
    node = parts.config.get("data")
    return node.get("name") if isinstance(node, dict) else node


def computed_statistics(parts, sets):
    """[[index in preprocess, {argument: value}], ...] from the training set."""
    logger.info("Computing statistics of the training set for preprocess")
    train_set = split_sets(sets, parts.loader, parts.training.overfit_batches)["train"]
    unknown = [
        bound(fn, dict.fromkeys(parts.unfitted[i])) if i in parts.unfitted else fn
        for i, fn in enumerate(parts.preprocess)
    ]
    done = fitted(unknown, train_set, parts.loader, parts.training.limit_batches)
    return [[i, {k: done[i].keywords[k] for k in names}] for i, names in parts.unfitted.items()]


def handle_signals(run, temporary):
    """End at signals until the loop handles them; with several processes JAX does."""
    if not several():
        end_at_signals(run.folder, temporary)


def begin_to_log(root, run):
    """Log on the console and into the run's folder, in one process only."""
    if is_first():
        set_up_logging(root, run.folder / "train.log")
    else:
        be_silent()


def record_of(run, parts, sets, recipe):
    """The record for a run's checkpoints, once the data is known to be the same in all processes,
    and its folder to be visible to them."""
    with together(), shown_if_slow("Computing the fingerprint of the data", early=True):
        named = class_names(parts.data), tokenizer_json(parts.data)
        others = recipe.objective.fingerprints
        record = run_folder.record(parts.config, parts.facts, sets, others, *named)
    prints = record["data"].items()
    check_alike({f"data: the fingerprint of the {name} set": value for name, value in prints})
    with together():
        if not becomes_visible(run.folder):
            raise UserError(
                f"checkpoint.dir: {run.folder}: process {jax.process_index()} does not see this "
                "folder of process 0; name one that all hosts share"
            )
    return record


def becomes_visible(folder):
    """Whether a folder exists; a network file system may take a while to show it."""
    until = time.monotonic() + VISIBLE_WITHIN
    while not folder.is_dir() and time.monotonic() < until:
        time.sleep(0.2)
    return folder.is_dir()


def announce(parts, sets, run, template):
    """The first lines of a run."""
    logger.info("Start Training! [%s]", parts.title)
    frozen = count(template.state["frozen"]) if has_frozen(template.state) else 0
    others = f", and {frozen} that are frozen" if frozen else ""
    logger.info("The model has %d parameters%s", count(template.params), others)
    for name, size in sizes_of(parts).items():
        source = run_folder.source(sets.get(name, sets["train"]))
        logger.info("%s data: %d examples from %s", name.capitalize(), size, source)
    logger.info("Run folder: %s", run.folder)
    if run.checkpoint:
        step = run.checkpoint.record["step"]
        logger.info("Resuming from %s, after step %d", run.checkpoint.name, step)
    if not parts.checkpoint.save_optimizer_state:
        logger.warning(
            "checkpoint.save_optimizer_state is false: a run that is killed cannot be resumed"
        )


def train_in_folder(run, recipe, sets, record, trainer, watchers=()):
    """Train, and leave in the run's folder what a finished run leaves."""
    interrupted = False
    try:
        sets = split_sets(sets, recipe.loader, recipe.training.overfit_batches)
        own = {"trainer": trainer, "watchers": watchers}
        done = train_recipe(recipe, sets, run.folder, record, run.checkpoint, **own)
        interrupted = bool(done.signal) and done.cut_short
        peak = peak_memory()
        shown = ", ".join(f"{where} {format_bytes(size)}" for where, size in peak.items())
        logger.info("Peak memory: %s", shown or "unknown")
        if not interrupted and is_first():
            run_folder.finish(run.folder, done, peak)
    finally:
        if run.lock:
            run.lock.close()  # before the report, which would else show the run as unfinished
        wanted = recipe.logging.report and not interrupted and is_first()  # a signal leaves no time
        if wanted and (run.folder / "metrics.jsonl").exists():
            write_report(run.folder)
    return done


def write_report(folder):
    """The page of a run; an error in it does not fail the run."""
    from training.report import page

    try:
        logger.info("Report: %s", page.write_report([folder]))
    except Exception as error:  # the run itself went well
        logger.warning("%s: no report could be written: %s", folder, error)


def peak_memory():
    """{"host": the most bytes that this process needed, "device": those of the fullest device}, as
    far as the system and the backend report them."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if stat and "peak_bytes_in_use" in stat]
    found = {"host": peak_of_process(), "device": max(peaks, default=None)}
    return {where: size for where, size in found.items() if size}
