"""Resuming: which run, from which of its checkpoints, and what is left to train."""

import logging
import math
import os
import shutil
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import NamedTuple

from file_io import check_links, inside, locked, read_json
from training.checkpoint.keeper import LOGS
from training.checkpoint.storage import (
    Checkpoint,
    checkpoints,
    files,
    lost,
    newest,
    read_all,
    remove_leftovers,
)
from training.devices.processes import (
    check_alike,
    check_visible,
    from_first,
    is_first,
    together,
)
from training.runs import folder as run_folder
from training.runs.changes import changes
from training.runs.folder import FINISHED, flat
from utils import WINDOWS, Damaged, RunError, UserError, first_line, quoted, relative_path

logger = logging.getLogger("main")


class OpenedRun(NamedTuple):
    """A run's folder, locked for this process."""

    folder: Path
    checkpoint: Checkpoint | None  # the one to resume from; None if the run has none yet
    lock: "Lock | None"  # None in all processes except process 0
    skipped: list  # messages that say what is wrong with newer checkpoints
    branches: bool = False  # whether a new run begins from the checkpoint

    def unlock(self):
        """Let other processes train this run."""
        if self.lock:
            self.lock.close()


class Locked(RunError):
    """Another process trains in this folder."""


class Lock:
    """Keeps other processes from training in a folder, until it is closed or this process ends."""

    def __init__(self, folder):
        check_links(folder)
        try:
            self.handle = locked(folder, wait=0.5)  # a report locks it for a moment
        except BlockingIOError:
            raise Locked(
                f"{folder}: another process is training this run; wait for it, or stop it first"
            ) from None
        if not WINDOWS:  # a child that outlives this process does not train
            os.register_at_fork(after_in_child=self.close)

    def close(self):
        if self.handle is not None:
            os.close(self.handle)
        self.handle = None


def unfinished(base, title, run_name=None):
    """(the OpenedRun of the latest unfinished run of this title, None), or (None, why there is
    none). With a name it is the run of that name, also if it is finished."""
    name = escape(run_name) if run_name else "*"
    described = (Path(base) / title).glob(f"{name}/environment.json")
    folders = [path.parent for path in described if (path.parent / "config.json").exists()]
    folders = [path for path in folders if not path.is_symlink()]  # it may lead anywhere
    reasons = []
    for folder in sorted(folders, key=begun, reverse=True):
        if (folder / FINISHED).exists() and not run_name:
            reasons.append(f"{folder} is finished")
            continue
        try:
            return open_run(folder), None
        except Locked:
            reasons.append(f"{folder} is being trained by another process")
    if reasons:
        return None, f"No unfinished run of {title} ({reasons[0]})"
    return None, f"No run of {title} to resume"


def begun(folder):
    """When a run was begun, to compare runs."""
    return (folder / "environment.json").stat().st_mtime_ns


def run_folder_of(named, option="--resume"):
    """The folder of a run; the user may name the folder or one of its checkpoints."""
    named = Path(named)
    folder = named.parent if named.name.startswith("checkpoint-") else named
    if not named.exists():
        kind = "checkpoint" if folder != named else "folder"
        present = [path.name for paths in checkpoints(folder).values() for path in paths]
        auto = ", or use --resume auto" if option == "--resume" else ""
        hint = f"name a run, as saved/<title>/<run>{auto}"
        if folder != named and present:
            hint = f"{folder} has {', '.join(present)}"
        raise UserError(f"{option} {named}: there is no such {kind}; {hint}")
    if not (folder / "config.json").exists():
        described = [*folder.glob("*/environment.json"), *folder.parent.glob("environment.json")]
        near = sorted({path.parent for path in described} - {Path()}, key=begun)
        runs = [place for place in near if (place / "config.json").exists()]
        hint = f"; did you mean {quoted(runs[-1])}?" if runs else ""
        raise UserError(
            f"{option} {named}: is not the folder of a run: it has no config.json{hint}"
        )
    return folder


def open_at(named, run_name):
    """The OpenedRun that `--resume` names: a folder, or a checkpoint in it. A new run begins from a
    checkpoint that is not the newest one, or if it shall have another name. The run of the
    checkpoint is not locked then, since nothing in it will change."""
    folder = run_folder_of(named)
    if Path(named) != folder:
        name = checkpoint_named(folder, named)
        is_newest = name == list(checkpoints(folder))[-1]
        own_name = read_json(folder / "config.json").get("run_name")
        if not is_newest or (run_name and run_name not in (own_name, folder.name)):
            check_links(folder)
            checkpoint = read_all(name, files(folder, name), whole=True)
            return OpenedRun(folder, checkpoint, None, [], branches=True)
    return open_run(folder, named)


def branched(opened, run_name, record):
    """The OpenedRun of a new run, beside the one from which it branches: a folder with the
    checkpoint and the logs so far. The name is written into the record of the new run."""
    former = opened.folder
    own_name = read_json(former / "config.json").get("run_name")
    record["config"]["run_name"] = run_name = None if run_name == own_name else run_name
    parent = Path(relative_path(former.absolute().parent))

    def begin():
        folder = run_folder.new_folder(parent.parent, parent.name, run_name)
        try:
            for log in LOGS:
                if inside(former, log).exists():
                    shutil.copyfile(former / log, folder / log)
            for path in files(former, opened.checkpoint.name):
                copy = shutil.copytree if path.is_dir() else shutil.copyfile
                copy(path, folder / path.name)
        except (OSError, shutil.Error) as error:
            shutil.rmtree(folder)
            why = getattr(error, "strerror", None) or first_line(error)
            raise RunError(f"{folder}: {former} cannot be copied: {why}") from error
        return str(folder)

    folder = Path(from_first(begin))
    check_visible(folder)
    return opened._replace(folder=folder, lock=Lock(folder) if is_first() else None)


def open_run(folder, named=None):
    """Lock a run's folder and find the checkpoint to resume from: the one that is named, or the
    newest valid one."""
    lock = Lock(folder)
    try:
        checkpoint, errors = chosen(folder, named)
    except BaseException:
        lock.close()
        raise
    return OpenedRun(folder, checkpoint, lock, errors)


def open_by_first(open_folder):
    """The OpenedRun that `open_folder` returns in process 0, or None. The other processes read the
    same checkpoint."""
    own = None

    def open_here():
        nonlocal own
        own = open_folder()
        return own and [str(own.folder), own.checkpoint and own.checkpoint.name, own.branches]

    names = from_first(open_here)
    if names is None or is_first():
        return own
    folder, name, branches = Path(names[0]), *names[1:]
    checkpoint = name and read_all(name, files(folder, name), whole=True, verified=True)
    return OpenedRun(folder, checkpoint, None, [], branches)


def chosen(folder, named):
    """(the checkpoint to resume from, messages that say what is wrong with newer ones)"""
    if named is None or Path(named) == folder:
        checkpoint, errors = newest(folder)
        if checkpoint is None and (folder / FINISHED).exists():
            errors.append(Damaged(f"{FINISHED} is there, so there was a checkpoint"))
        if checkpoint is None and (reasons := lost(folder, errors)):
            lines = "\n  ".join([f"{folder}: no checkpoint of this run can be resumed", *reasons])
            raise UserError(f"{lines}\nPut back what is missing, or begin a new run")
        return checkpoint, [f"{error}; skipped" for error in errors]
    name = checkpoint_named(folder, named)
    return read_all(name, files(folder, name), whole=True), []


def checkpoint_named(folder, named):
    """The name of the checkpoint that a path in a run's folder names."""
    name = Path(named).stem.split("-replica_")[0]
    if Path(named) not in files(folder, name):
        present = ", ".join(checkpoints(folder)) or "none"
        raise UserError(f"--resume {named}: is not a checkpoint; {folder} has {present}")
    return name


def tidied(opened):
    """Remove what an interrupted write left, and the log lines after the checkpoint. If the run
    starts over, move its former log away, and return a line that says so; else return None."""
    remove_leftovers(opened.folder)
    if opened.checkpoint:
        return run_folder.cut_back(opened.folder, opened.checkpoint.record["lengths"], LOGS)
    return run_folder.set_aside(opened.folder, LOGS, files(opened.folder, "checkpoint-*"))


def describe_again(opened, record, sets, root, own_files, override):
    """Describe a resumed run, and copy the code that trains from now on: evaluations and exports
    import the copies. A model that computes something else is refused elsewhere."""
    folder = opened.folder
    changed = run_folder.changed_code(folder, own_files)
    if opened.checkpoint is None or opened.branches:  # it starts over, or is another run
        run_folder.describe(folder, record, sets, root, own_files)
        return
    if changed:
        names = ", ".join(map(str, changed))
        message = "Your code has changed since the checkpoint: %s; the copies are replaced"
        logger.warning(message, names)
    if changed or override or not (folder / "model").exists():
        run_folder.copy_code(folder, root, own_files)
    run_folder.update(folder, record, root)


@contextmanager
def holding(folder, resume, record):
    """(the checkpoint that `fit` resumes from, or None; the function that prepares the folder, to
    be called before the run writes); the folder stays locked until the end of the `with` block."""
    if folder is None:
        yield None, lambda: None
        return
    check_alike(flat(record["config"]) | {"data": record["data"]})
    is_new = False

    def open_folder():
        nonlocal is_new
        if Path(folder).is_file():
            raise UserError(f"folder: {folder} is a file; name a folder")
        is_new = not Path(folder).exists()
        Path(folder).mkdir(parents=True, exist_ok=True)
        return open_run(Path(folder))

    def begin():
        if is_first() and resume:
            former = tidied(opened)
            for message in [*opened.skipped, *changed, *([former] if former else [])]:
                logger.warning(message)
            if opened.checkpoint:
                log_what_is_left(opened, record["config"]["training"]["epochs"])

    opened = open_by_first(open_folder)
    try:
        with together():
            if not resume and (opened.checkpoint or (opened.folder / "metrics.jsonl").exists()):
                epochs = f" of {epochs_of(opened.checkpoint)} epochs" if opened.checkpoint else ""
                raise UserError(
                    f"{folder}: holds a run{epochs} already, as when a cell runs again; "
                    "continue it (resume=True), name another folder, or delete this one: "
                    f"import shutil; shutil.rmtree({str(folder)!r})"
                )
            changed = changes(opened, record, resume == "override") if opened.checkpoint else []
        yield opened.checkpoint, begin
    finally:
        opened.unlock()
        with suppress(OSError):  # it is not empty, unless the run was refused
            if is_new:
                Path(folder).rmdir()


def epochs_of(checkpoint):
    """How many epochs were trained to their end before a checkpoint."""
    return checkpoint.record["epoch"] - bool(checkpoint.record["position"])


def log_what_is_left(opened, epochs):
    """Log from where a run of `fit` continues, or why there is nothing left to train."""
    folder, completed, checkpoint = opened.folder, epochs_of(opened.checkpoint), opened.checkpoint
    if epochs and completed >= epochs:
        what = "nothing is trained; raise `epochs` to continue it, or name another folder"
        logger.info("%s: has completed its %d epochs: %s", folder, completed, what)
    elif checkpoint.record["stopped"]:
        what = 'resume="override" continues nevertheless'
        logger.info("%s: a callback stopped it in epoch %d; %s", folder, completed, what)
    else:
        logger.info("%s: resuming after step %d", folder, checkpoint.record["step"])


def nothing_to_resume(opened, training, override):
    """Why there is nothing to resume, or None."""
    if opened.checkpoint is None:
        return None
    record, marked = opened.checkpoint.record, (opened.folder / FINISHED).exists()
    completed, epochs = epochs_of(opened.checkpoint), training.epochs or math.inf
    if completed > epochs or (completed == epochs and (marked or record["position"])):
        return (
            f"{opened.folder}: has completed {completed} epochs, and training.epochs is {epochs}; "
            "raise it to continue"
        )
    if marked and (why := nothing_left(record, training)):
        return f"{opened.folder}: {why}; raise it to continue"
    if marked and record["stopped"] and not override:
        return (
            f"{opened.folder}: a callback stopped it in epoch {record['epoch']}; "
            "add --override to continue nevertheless"
        )
    return None


def nothing_left(record, options):
    """Why a run that has ended after this record of a checkpoint has no budget left, or None."""
    step, seconds = record["step"], record["seconds"]
    if options.max_steps is not None and step >= options.max_steps:
        return f"has completed {step} steps, and training.max_steps is {options.max_steps}"
    if options.max_seconds is not None and seconds >= options.max_seconds:
        return f"trained for {seconds:.1f} s, and training.max_seconds is {options.max_seconds:g}"
    return None
