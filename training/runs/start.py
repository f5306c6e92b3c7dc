"""A run of the command line, from the parts of a config to an exit code: check them by their
shapes, open a new or existing run folder, train, and close the folder."""

import logging
import os
import shutil
from contextlib import ExitStack
from functools import partial

import jax

from data_loader.base import class_names, loaded, tokenizer_json
from data_loader.loader import held_out
from training.base import has_frozen
from training.checkpoint.pretrained import check_arguments
from training.devices import processes
from training.devices.processes import check_alike, from_first, is_first, several, together
from training.devices.sharding import Plan
from training.devices.signals import end_at_signals
from training.fit import train_recipe
from training.preprocess import bound, fitted, recorded_statistics, with_statistics
from training.recipe import compose
from training.runs import folder as run_folder
from training.runs import recovery, resume
from training.runs.argument_checks import check_classes
from training.runs.callback_checks import check_callbacks, check_hooks
from training.runs.changes import changes
from training.runs.sets import split_sets
from training.runs.shape_check import check_shapes, count
from training.watching.console import be_silent, check_logging, set_up_logging
from utils import DONE, STOPPED, UserError, format_bytes, peak_of_process, shown_if_slow

logger = logging.getLogger("main")


def checked_recipe(parts, resumed=False):
    """(the Recipe of a config's parts, its TrainState as specs), after checking that they fit."""
    try:
        check_hooks(parts.callbacks)
        check_arguments(parts.config)
        recipe = compose(parts, Plan.on_paper(parts.mesh, parts.sharding))
        check_callbacks(recipe, parts.data)
        template = check_shapes(recipe, parts.data.example, sizes_of(parts), resumed)
        check_classes(parts, recipe, template)
        return recipe, template
    except UserError as error:
        raise UserError(f"{parts.source}: {error}") from error


def sizes_of(parts):
    """{set: number of examples}, where a validation set may be held out of the training set."""
    sizes = dict(parts.data.sizes)
    count = held_out(sizes["train"], parts.loader.val_size)
    return sizes | ({"train": sizes["train"] - count, "val": count} if count else {})


def train(parts, root, named=None, override=False, temporary=None, watchers=()):
    """Begin a run, or resume the one that is named: a folder, a checkpoint, or auto. `temporary` is
    a folder to delete when the process ends early; `watchers` are added to those of every run."""
    if parts.beyond:
        raise UserError("\n".join(parts.beyond))
    with ExitStack() as at_end:
        opened, why_new = open_named(parts, named or parts.resume)
        if opened:
            at_end.callback(opened.unlock)
        check_alike(run_folder.flat(parts.config))
        check_logging(root)
        with shown_if_slow("Checking that all parts of the config fit", early=True):
            recipe, template = checked_recipe(parts, resumed=opened is not None)
        options = parts.training
        end = opened and from_first(lambda: resume.nothing_to_resume(opened, options, override))
        if end:
            if is_first():
                print(end)
            return DONE
        as_built = parts
        if opened is None:
            opened, parts, sets, record = new_run(parts, recipe, root, why_new, temporary)
            at_end.callback(opened.unlock)
        else:
            parts, sets, record = resumed_run(
                opened, parts, recipe, template, root, override, temporary
            )
        if parts is not as_built:  # preprocessing has its statistics now
            recipe = compose(parts, recipe.plan)
        announce(parts, sets, opened, template)
        done = train_in_folder(opened, recipe, sets, record, watchers)
    code = STOPPED if done.signal and done.cut_short else DONE
    if not done.published:  # a tracker is stuck, and the interpreter would wait for it at its end
        logging.shutdown()
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        os._exit(code)
    return code


def open_named(parts, named):
    """(the OpenedRun that is named, or None; why there is none, if `named` is "auto")"""
    why_new = None

    def open_here():
        nonlocal why_new
        if named == "auto":
            opened, why_new = resume.unfinished(parts.checkpoint.dir, parts.title, parts.run_name)
            return opened
        return resume.open_run(resume.run_folder_of(named), named) if named else None

    return resume.open_by_first(open_here), why_new


def new_run(parts, recipe, root, why_new, temporary):
    """(a new OpenedRun, the parts, the data, the record for checkpoints); `why_new` says why there
    was no run to resume."""
    new_folder = partial(run_folder.new_folder, parts.checkpoint.dir, parts.title, parts.run_name)
    opened = resume.open_by_first(lambda: resume.open_run(new_folder()))
    handle_signals(opened, temporary)
    begin_to_log(root, opened)
    if why_new:
        logger.info("%s: beginning a new one", why_new)
    try:
        parts, sets, record = with_data(opened, parts, recipe)
        with together():
            if is_first():
                run_folder.describe(opened.folder, record, sets, root, parts.own_files())
    except BaseException:
        opened.unlock()
        if is_first():
            shutil.rmtree(opened.folder)  # no step was taken
        raise
    return opened, parts, sets, record


def resumed_run(opened, parts, recipe, template, root, override, temporary):
    """(the parts, the data, the record) of a resumed run, verified as unchanged unless --override
    was given."""
    handle_signals(opened, temporary)
    parts, sets, record = with_data(opened, parts, recipe)
    with together():
        changed = changes(opened, record, override)
        # Nothing in the folder was changed until here.
        recovery.check_fits(opened.checkpoint, template, parts.training.replicas)
        former = resume.tidied(opened) if is_first() else None
    begin_to_log(root, opened)
    if is_first():
        for message in [*opened.skipped, *run_folder.changes_of_environment(opened.folder, root)]:
            logger.warning(message)
        for change in [*changed, *([former] if former else [])]:
            logger.info(change)
        resume.describe_again(opened, record, sets, root, parts.own_files(), override)
    return parts, sets, record


def with_data(opened, parts, recipe):
    """(the parts, with the statistics of the training set that preprocessing needs; the data; the
    record). A resumed run keeps its statistics."""
    with together(), shown_if_slow(f"Reading the data: {data_name(parts)}", early=True):
        sets = loaded(parts.data, parts.loader)
    if parts.unfitted:
        checkpoint = opened.checkpoint
        statistics = checkpoint and recorded_statistics(parts, checkpoint.record["config"])
        if len(statistics or ()) < len(parts.unfitted):
            statistics = from_first(lambda: computed_statistics(parts, sets))
        parts = with_statistics(parts, statistics)
    return parts, sets, record_of(opened, parts, sets, recipe)


def data_name(parts):
    """The name of the data in the config."""
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


def handle_signals(opened, temporary):
    """End at signals until the loop handles them; with several processes, JAX handles them."""
    if not several():
        end_at_signals(opened.folder, temporary)


def begin_to_log(root, opened):
    """Log on the console and into the run's folder, but only in process 0."""
    if is_first():
        set_up_logging(root, opened.folder / "train.log")
    else:
        be_silent()


def record_of(opened, parts, sets, recipe):
    """The record for a run's checkpoints, after checking that all processes have the same data and
    see the run's folder."""
    with together(), shown_if_slow("Computing the fingerprint of the data", early=True):
        named = class_names(parts.data), tokenizer_json(parts.data)
        others = recipe.objective.fingerprints
        record = run_folder.record(parts.config, parts.facts, sets, others, *named)
    prints = record["data"].items()
    check_alike({f"data: the fingerprint of the {name} set": value for name, value in prints})
    processes.check_visible(opened.folder)
    return record


def announce(parts, sets, opened, template):
    """Log the first lines of a run."""
    logger.info("Start Training! [%s]", parts.title)
    frozen = count(template.state["frozen"]) if has_frozen(template.state) else 0
    others = f", and {frozen} that are frozen" if frozen else ""
    logger.info("The model has %d parameters%s", count(template.params), others)
    for name, size in sizes_of(parts).items():
        source = run_folder.source(sets.get(name, sets["train"]))
        logger.info("%s data: %d examples from %s", name.capitalize(), size, source)
    logger.info("Run folder: %s", opened.folder)
    if opened.checkpoint:
        step = opened.checkpoint.record["step"]
        logger.info("Resuming from %s, after step %d", opened.checkpoint.name, step)
    if not parts.checkpoint.save_optimizer_state:
        logger.warning(
            "checkpoint.save_optimizer_state is false: a run that is killed cannot be resumed"
        )


def train_in_folder(opened, recipe, sets, record, watchers=()):
    """Train, and write the files of a finished run into its folder."""
    interrupted = False
    try:
        sets = split_sets(sets, recipe.loader, recipe.training.overfit_batches)
        done = train_recipe(recipe, sets, opened.folder, record, opened.checkpoint, watchers)
        interrupted = bool(done.signal) and done.cut_short
        peak = peak_memory()
        shown = ", ".join(f"{where} {format_bytes(size)}" for where, size in peak.items())
        logger.info("Peak memory: %s", shown or "unknown")
        if not interrupted and is_first():
            run_folder.finish(opened.folder, done, peak)
    finally:
        opened.unlock()  # a report shows a run with a lock as unfinished
        wanted = recipe.logging.report and not interrupted and is_first()  # a signal leaves no time
        if wanted and (opened.folder / "metrics.jsonl").exists():
            write_report(opened.folder)
    return done


def write_report(folder):
    """Write the report of a run; an error in it does not fail the run."""
    from training.report import page

    try:
        logger.info("Report: %s", page.write_report([folder]))
    except Exception as error:  # the run itself went well
        logger.warning("%s: no report could be written: %s", folder, error)


def peak_memory():
    """{"host": the most bytes that this process has used, "device": the most on one device}, as far
    as the system and the backend report them."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if stat and "peak_bytes_in_use" in stat]
    found = {"host": peak_of_process(), "device": max(peaks, default=None)}
    return {where: size for where, size in found.items() if size}
