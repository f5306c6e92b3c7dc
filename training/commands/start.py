"""A run of the command line, from the parts of a config to an exit code: check them by their
shapes, open a new or existing run folder, train, and close the folder."""

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from data_loader.base import class_names, loaded, tokenizer_json
from data_loader.loader import held_out
from training import processes
from training.base import Parts, TrainState, has_frozen
from training.checkpoint import run_folder
from training.checkpoint.pretrained import check_arguments
from training.checkpoint.resume import (
    OpenedRun,
    branched,
    changes,
    cut_logs,
    nothing_left,
    open_at,
    open_by_first,
    open_run,
    unfinished,
)
from training.checkpoint.trees import check_fits
from training.commands.shape_check import check_classes, check_shapes, count
from training.devices.sharding import Plan
from training.devices.signals import end_at_signals
from training.fit import train_recipe
from training.observers import check_callbacks
from training.preprocess import bound, fitted, recorded_statistics, with_statistics
from training.processes import check_alike, from_first, is_first, several, together
from training.recipe import Recipe, compose
from training.run import Run
from training.sets import split_sets
from training.watching.console import be_silent, check_logging, set_up_logging
from utils import DONE, STOPPED, UserError, format_bytes, peak_of_process, shown_if_slow

logger = logging.getLogger("main")


def checked_recipe(parts: Parts, resumed: bool = False) -> tuple[Recipe, TrainState]:
    """(the Recipe of a config's parts, its TrainState as specs), after checking that they fit."""
    assert parts.config is not None
    try:
        check_arguments(parts.config)
        recipe = compose(parts, Plan.on_paper(parts.mesh, parts.sharding))
        check_callbacks(recipe, parts.data)
        template = check_shapes(recipe, parts.data.example, sizes_of(parts), resumed)
        check_classes(parts, recipe, template)
        return recipe, template
    except UserError as error:
        raise UserError(f"{parts.source}: {error}") from error


def sizes_of(parts: Parts) -> dict[str, int]:
    """{set: number of examples}, where a validation set may be held out of the training set."""
    sizes = dict(parts.data.sizes)
    count = held_out(sizes["train"], parts.loader.val_size)
    return sizes | ({"train": sizes["train"] - count, "val": count} if count else {})


def train(
    parts: Parts,
    root: Path,
    named: str | None = None,
    override: bool = False,
    temporary: str | Path | None = None,
    observers: Sequence[Any] = (),
) -> int:
    """Begin a run, or resume the one that is named (a folder, a checkpoint, or auto), train it, and
    return the exit code. `temporary` is a folder to delete when the process ends early; `observers`
    are added to those of every run."""
    if parts.beyond:
        raise UserError("\n".join(parts.beyond))
    with ExitStack() as at_end:

        def hold(opened: OpenedRun, is_new: bool) -> None:
            """Unlock the run at the end, however it ends, and delete the folder of a new run that
            has not begun."""
            if is_new:
                at_end.push(partial(delete_if_refused, opened.folder))
            at_end.callback(opened.unlock)
            if not several():  # until the loop handles signals; with several processes, JAX does
                end_at_signals(opened.folder, temporary, is_new)

        existing, why_new = open_named(parts, named or parts.resume)
        is_new = existing is None
        if existing:
            hold(existing, is_new=False)
        check_alike(run_folder.flat(parts.config))
        check_logging(root)
        if not is_first():
            be_silent()
        with shown_if_slow("Checking that all parts of the config fit", early=True):
            recipe, template = checked_recipe(parts, resumed=not is_new)
        recipe.plan.on_devices()
        options = parts.training
        if existing and (end := from_first(lambda: nothing_left(existing, options, override))):
            if is_first():
                print(end)
            return DONE
        as_built, opened = parts, existing
        if opened is None:
            opened = new_run(parts, root, why_new)
            hold(opened, is_new=True)
        parts, sets, record = with_data(opened, parts, recipe)
        with together():
            changed = [] if is_new else changes(opened, record, override)
            opened = opened.overridden() if override else opened
            if opened.checkpoint:
                check_fits(opened.checkpoint, [template] * parts.training.replicas)
        former = opened.folder
        if opened.branches:
            opened, record = branched(opened, parts.run_name, record)
            hold(opened, is_new=True)
        if parts is not as_built:  # preprocessing has its statistics now
            recipe = compose(parts, recipe.plan)

        def begin() -> None:
            """All is checked: describe the run in its folder, and log its first lines."""
            with together():
                if is_first():
                    assert parts.own_files is not None
                    described = record, sets, root, parts.own_files()
                    if is_new:
                        run_folder.describe(opened.folder, *described)
                    else:
                        begin_again(opened, former, changed, *described)
            announce(parts, sets, opened, template)

        done = train_in_folder(opened, recipe, sets, record, observers, begin)
    code = STOPPED if done.signal and done.cut_short else DONE
    if not done.published:  # a tracker is stuck, and the interpreter would wait for it at its end
        logging.shutdown()
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        os._exit(code)
    return code


def delete_if_refused(
    folder: Path,
    kind: type[BaseException] | None,
    _error: BaseException | None,
    _trace: TracebackType | None,
) -> None:
    """At the end of a new run: delete its folder if the run has not begun, or if it was refused
    before it had logged or saved anything."""
    has_begun = (folder / "config.json").exists()
    written = (folder / "metrics.jsonl").exists() or any(folder.glob("checkpoint-*"))
    refused = not written and kind and issubclass(kind, UserError)
    if kind and is_first() and (refused or not has_begun):
        shutil.rmtree(folder)


def open_named(parts: Parts, named: str | None) -> tuple[OpenedRun | None, str | None]:
    """(the OpenedRun that is named, or None; why there is none, if `named` is "auto")"""
    why_new = None

    def open_here() -> OpenedRun | None:
        nonlocal why_new
        assert parts.title is not None
        if named == "auto":
            opened, why_new = unfinished(parts.checkpoint.dir, parts.title, parts.run_name)
            return opened
        return open_at(named, parts.run_name) if named else None

    return open_by_first(open_here), why_new


def new_run(parts: Parts, root: Path, why_new: str | None) -> OpenedRun:
    """A new OpenedRun, to which log lines are written; `why_new` says why there was no run to
    resume."""
    assert parts.title is not None
    new_folder = partial(run_folder.new_folder, parts.checkpoint.dir, parts.title, parts.run_name)
    opened = open_by_first(lambda: open_run(new_folder()))
    assert opened is not None
    if is_first():
        set_up_logging(root, opened.folder / "train.log")
    if why_new:
        logger.info("%s: beginning a new one", why_new)
    return opened


def begin_again(
    opened: OpenedRun,
    former: Path,
    changed: list[str],
    record: dict[str, Any],
    sets: dict[str, Any],
    root: Path,
    own_files: dict[Path, Path],
) -> None:
    """Change the folder of a resumed run for the first time, and log what has changed since the
    `former` one, from which a new run may branch."""
    lost = cut_logs(opened)
    set_up_logging(root, opened.folder / "train.log")
    if opened.branches and opened.checkpoint:
        logger.info("A new run begins from %s", opened.checkpoint.path)
    for message in [*opened.skipped, *run_folder.changes_of_environment(former, root)]:
        logger.warning(message)
    for change in [*changed, *([lost] if lost else [])]:
        logger.info(change)
    if opened.checkpoint is None or opened.branches:  # it starts over, or is another run
        run_folder.describe(opened.folder, record, sets, root, own_files)
        return
    if changed_code := run_folder.changed_code(opened.folder, own_files):
        names = ", ".join(map(str, changed_code))
        message = "Your code has changed since the checkpoint: %s; the copies are replaced"
        logger.warning(message, names)
    run_folder.update(opened.folder, record, root, own_files)


def with_data(
    opened: OpenedRun, parts: Parts, recipe: Recipe
) -> tuple[Parts, dict[str, Any], dict[str, Any]]:
    """(the parts, with the statistics of the training set that preprocessing needs; the data; the
    record for the checkpoints), after checking that all processes have the same data and see the
    run's folder. A resumed run keeps its statistics."""
    assert parts.config is not None
    with (
        together(),
        shown_if_slow(f"Reading the data: {parts.config['data']['name']}", early=True),
    ):
        sets = loaded(parts.data, parts.loader)
    if parts.unfitted:
        checkpoint = opened.checkpoint
        statistics = recorded_statistics(parts, checkpoint.record["config"]) if checkpoint else []
        if len(statistics) < len(parts.unfitted):
            statistics = from_first(lambda: computed_statistics(parts, sets))
        parts = with_statistics(parts, statistics)
    assert parts.config is not None
    with together(), shown_if_slow("Computing the fingerprint of the data", early=True):
        named = class_names(parts.data), tokenizer_json(parts.data)
        others = recipe.objective.fingerprints
        record = run_folder.record(parts.config, parts.facts, sets, others, *named)
    prints = record["data"].items()
    check_alike({f"data: the fingerprint of the {name} set": value for name, value in prints})
    processes.check_visible(opened.folder)
    return parts, sets, record


def computed_statistics(parts: Parts, sets: dict[str, Any]) -> list:
    """[[index in preprocess, {argument: value}], ...] from the training set."""
    logger.info("Computing statistics of the training set for preprocess")
    train_set = split_sets(sets, parts.loader, parts.training.overfit_batches)["train"]
    unknown = [
        bound(fn, dict.fromkeys(parts.unfitted[i])) if i in parts.unfitted else fn
        for i, fn in enumerate(parts.preprocess)
    ]
    done = fitted(unknown, train_set, parts.loader, parts.training.limit_batches)
    values = [getattr(function, "keywords", {}) for function in done]
    return [[i, {k: values[i][k] for k in names}] for i, names in parts.unfitted.items()]


def announce(parts: Parts, sets: dict[str, Any], opened: OpenedRun, template: TrainState) -> None:
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


def train_in_folder(
    opened: OpenedRun,
    recipe: Recipe,
    sets: dict[str, Any],
    record: dict[str, Any],
    observers: Sequence[Any],
    begin: Callable[[], None],
) -> Run:
    """Train, and write the files of a finished run into its folder. `begin` is called before
    anything is written."""
    has_begun = interrupted = False

    def begin_here() -> None:
        nonlocal has_begun
        begin()
        has_begun = True

    try:
        sets = split_sets(sets, recipe.loader, recipe.training.overfit_batches)
        own = {"observers": observers, "begin": begin_here}
        done = train_recipe(recipe, sets, opened.folder, record, opened.checkpoint, **own)
        interrupted = bool(done.signal) and done.cut_short
        peak = peak_memory()
        shown = ", ".join(f"{where} {format_bytes(size)}" for where, size in peak.items())
        logger.info("Peak memory: %s", shown or "unknown")
        if not interrupted and is_first():
            run_folder.finish(opened.folder, done, peak)
    finally:
        opened.unlock()  # a report shows a run with a lock as unfinished
        wanted = recipe.logging.report and has_begun and is_first()
        wanted = wanted and not interrupted  # a signal leaves no time
        if wanted and (opened.folder / "metrics.jsonl").exists():
            write_report(opened.folder)
    return done


def write_report(folder: Path) -> None:
    """Write the report of a run; an error in it does not fail the run."""
    from training.report import page

    try:
        logger.info("Report: %s", page.write_report([folder]))
    except Exception as error:  # the run itself went well
        logger.warning("%s: no report could be written: %s", folder, error)


def peak_memory() -> dict[str, int]:
    """{"host": the most bytes that this process has used, "device": the most on one device}, as far
    as the system and the backend report them."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if stat and "peak_bytes_in_use" in stat]
    found = {"host": peak_of_process(), "device": max(peaks, default=None)}
    return {where: size for where, size in found.items() if size}
