"""Going on with a run: which one, from which of its checkpoints, and with what changed in its config."""

import json
import logging
import os
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from training.checkpoint.keeper import LOGS
from training.checkpoint.restore import probe_of
from training.checkpoint.storage import (
    Found,
    Incomplete,
    checkpoints,
    files,
    newest,
    read_all,
    remove_leftovers,
)
from training.devices.processes import check_alike, from_first, is_first, together
from training.runs.folder import FINISHED, cut_back, flat
from utils import RunError, UserError

# Keys that may differ when a run is gone on with.
FREE = (
    "training.epochs",
    "training.on_nonfinite",
    "training.rollbacks",
    "training.detect_nans",
    "checkpoint",
    "logging",
)
FREE += ("mesh", "sharding")
SILENT = ("resume", "$schema")  # they say nothing of the run

logger = logging.getLogger("main")


class Opened(NamedTuple):
    """A run's folder that is this process's alone."""

    folder: Path
    found: Found | None  # the checkpoint to go on from; None where the run has none yet
    lock: int | None  # None in the processes beside the first
    passed_over: list  # what is wrong with newer checkpoints


def unfinished(base, title):
    """(the latest run of this title that was begun and did not come to its end, taken, None), or (None, why there is none)"""
    folders = [
        path.parent
        for path in (Path(base) / title).glob("*/environment.json")
        if (path.parent / "config.json").exists()
    ]
    whys = []
    for folder in sorted(
        folders, key=lambda f: (f / "environment.json").stat().st_mtime_ns, reverse=True
    ):
        if (folder / FINISHED).exists():
            whys.append(f"{folder} is finished")
            continue
        try:
            return opened(folder), None
        except Locked:
            whys.append(f"{folder} is being trained by another process")
    return (
        None,
        f"No unfinished run of {title} ({whys[0]})" if whys else f"No run of {title} to go on with",
    )


def run_folder_of(named, option="--resume"):
    """The run's folder that the user names by itself, or by one of its checkpoints."""
    named = Path(named)
    folder = named.parent if named.name.startswith("checkpoint-") else named
    if not named.exists():
        there = (
            [path.name for paths in checkpoints(folder).values() for path in paths]
            if folder != named
            else []
        )
        auto = ", or say: --resume auto" if option == "--resume" else ""
        hint = (
            f"{folder} has {', '.join(there)}"
            if there
            else f"name a run, as saved/<title>/<run>{auto}"
        )
        raise UserError(
            f"{option} {named}: there is no such {'checkpoint' if folder != named else 'folder'}; {hint}"
        )
    if not (folder / "config.json").exists():
        runs = sorted(
            path.parent
            for path in [*folder.glob("*/config.json"), *folder.parent.glob("config.json")]
        )
        hint = f"; did you mean {runs[-1]}?" if runs else ""
        raise UserError(
            f"{option} {named}: is not the folder of a run: it has no config.json{hint}"
        )
    return folder


def opened(folder, named=None):
    """Take a run's folder and find the checkpoint to go on from: the one that is named, or the newest good one."""
    lock = locked(folder)
    try:
        found, wrong = chosen(folder, named)
    except BaseException:
        close(lock)
        raise
    return Opened(folder, found, lock, wrong)


def made_and_opened(folder):
    """The same of a folder that may not be there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    return opened(folder)


def in_all(make):
    """The Opened that `make` answers, or None: of several processes the first one takes the folder, and the others read the same
    checkpoint of it."""
    mine = None

    def tell():
        nonlocal mine
        mine = make()
        return mine and [str(mine.folder), mine.found and mine.found.name]

    told = from_first(tell)
    if told is None or is_first():
        return mine
    folder, name = Path(told[0]), told[1]
    return Opened(
        folder, name and read_all(name, files(folder, name), whole=True, verified=True), None, []
    )


def chosen(folder, named):
    """(the checkpoint, what is wrong with newer ones)"""
    if named is None or Path(named) == folder:
        found, wrong = newest(folder)
        if found is None and not all(isinstance(error, Incomplete) for error in wrong):
            told = "\n  ".join(map(str, wrong))
            raise UserError(f"{folder}: no checkpoint of this run can be gone on from\n  {told}")
        return found, [f"{error}; passed over" for error in wrong]
    name = Path(named).stem.split("-replica_")[0]
    if Path(named) not in files(folder, name):
        raise UserError(
            f"--resume {named}: is no checkpoint; {folder} has {', '.join(checkpoints(folder)) or 'none'}"
        )
    found, names = read_all(name, files(folder, name), whole=True), list(checkpoints(folder))
    if later := names[names.index(name) + 1 :]:
        raise UserError(
            f"--resume {named}: the run has later checkpoints; move them away first: {', '.join(later)}"
        )
    return found, []


class Locked(RunError):
    """Another process trains in this folder."""


def locked(folder):
    """Keep other processes from training in this folder, until this one ends in whatever way."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise Locked(
            f"{folder}: another process is training this run; wait for it, or stop it first"
        ) from None
    except OSError:  # a file system without locks
        pass
    HELD.add(handle)
    return handle


HELD = set()  # locks of this process
os.register_at_fork(
    after_in_child=lambda: [close(handle) for handle in list(HELD)]
)  # a child that lives on does not train


def close(handle):
    """Give a lock back."""
    if handle in HELD:
        HELD.remove(handle)
        os.close(handle)


def tidied(run):
    """Remove what an interrupted write left, and log lines after the checkpoint."""
    remove_leftovers(run.folder)
    cut_back(run.folder, run.found.record["lengths"] if run.found else {}, LOGS)


@contextmanager
def holding(folder, resume, record):
    """The checkpoint to go on from, if there is one; the folder belongs to this run alone as long as this is open."""
    if folder is None or isinstance(resume, Opened):  # the caller holds it
        yield resume.found if resume else None
        return
    check_alike(flat(record["config"]) | {"data": record["data"]})
    run = in_all(lambda: made_and_opened(Path(folder)))
    try:
        with together():
            if not resume and (run.found or (run.folder / "metrics.jsonl").exists()):
                raise UserError(
                    f"{folder}: holds a run; go on with it (resume=True), or name another folder"
                )
            changed = changes(run, record, resume == "override") if run.found else []
        if is_first() and resume:
            tidied(run)
            for message in [*run.passed_over, *changed]:
                logger.warning(message)
        yield run.found
    finally:
        close(run.lock)


def at_its_end(run, epochs, override):
    """Why there is nothing to go on with, or None."""
    if run.found is None:
        return None
    record, marked = run.found.record, (run.folder / FINISHED).exists()
    whole = record["epoch"] - bool(record["position"])
    if whole > epochs or (whole == epochs and (marked or record["position"])):
        return f"{run.folder}: has its {whole} epochs, and training.epochs is {epochs}; raise it to go on"
    if marked and record["stopped"] and not override:
        return f"{run.folder}: a callback stopped it in epoch {record['epoch']}; say --override to go on all the same"
    return None


def changes(run, record, override=False):
    """What changed in config, facts and data since a run's checkpoint, a line each; what must not is refused, unless the user
    insists, which also overrules a callback that stopped the run."""
    if run.found is None:
        return ["There is no checkpoint yet, so the run starts over"]
    try:
        free, other = differences(run.found.record, record)
    except RecursionError as error:
        raise UserError(
            f"{run.found.paths[0]}: the config in it is nested too deeply to be one"
        ) from error
    if other and not override:
        lines = "\n  ".join(line.removeprefix("Changed: ") for line in told(other))
        raise UserError(
            f"{run.folder}: this is not the config, or not the data, that the run was trained with\n  {lines}\n"
            'Bring it back, begin a new run, or say --override (fit: resume="override") to go on with what is new; '
            f"{', '.join(FREE)} may always change"
        )
    if override:
        for each, arrays in zip(run.found.records, run.found.arrays, strict=True):
            each["stopped"] = False
            for name in probe_of(arrays):
                del arrays[name]
    return told(free | other)


def differences(old, new):
    """({path: (old, new)} of what may differ, the same of what may not) between two records."""
    old, new = (
        flat({**r["config"], "facts": r["facts"], "fingerprint of the data": r["data"]})
        for r in (old, new)
    )
    free, other = {}, {}
    for path in [
        path
        for path in {**old, **new}
        if old.get(path, ABSENT) != new.get(path, ABSENT) and path not in SILENT
    ]:
        may = any(path == key or path.startswith(f"{key}.") for key in (*FREE, "facts.total_steps"))
        (free if may else other)[path] = (old.get(path, ABSENT), new.get(path, ABSENT))
    return free, other


ABSENT = "(absent)"


def told(changed):
    """Differences in words, a line each."""
    shown = {
        path: [v if v is ABSENT else json.dumps(v) for v in pair] for path, pair in changed.items()
    }
    return [f"Changed: {path}: {old} -> {new}" for path, (old, new) in shown.items()]
