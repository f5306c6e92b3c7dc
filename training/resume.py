"""Going on with a run: which one, from which of its checkpoints, and with what changed in its config."""

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from training.checkpoint.keeper import LOGS
from training.checkpoint.restore import probe_of
from training.checkpoint.storage import Found, checkpoints, files, newest, read_all, remove_leftovers
from training.run_folder import FINISHED, cut_back
from utils import UserError

FREE = ("training.epochs", "checkpoint", "logging", "resume", "$schema")  # keys that may differ when a run is gone on with


class Opened(NamedTuple):
    """A run's folder that is this process's alone."""

    folder: Path
    found: Found | None  # the checkpoint to go on from; None where the run has none yet
    lock: int | None
    passed_over: list  # what is wrong with newer checkpoints


def unfinished(base, title):
    """The folder of the latest run of this title that was begun, did not come to its end, and is not being trained now."""
    folders = [path.parent for path in (Path(base) / title).glob("*/environment.json")]
    for folder in sorted(folders, key=lambda f: (f / "environment.json").stat().st_mtime_ns, reverse=True):
        if (folder / "config.json").exists() and not (folder / FINISHED).exists() and not is_locked(folder):
            return folder
    return None


def run_folder_of(named):
    """The run's folder that the user names by itself, or by one of its checkpoints."""
    named = Path(named)
    folder = named.parent if named.name.startswith("checkpoint-") else named
    if not named.exists():
        raise UserError(f"--resume {named}: there is no such folder; name a run, as saved/<title>/<run>, or say: --resume auto")
    if not (folder / "config.json").exists():
        runs = sorted(path.parent.name for path in folder.glob("*/config.json"))
        hint = f"; did you mean {folder / runs[-1]}?" if runs else ""
        raise UserError(f"--resume {named}: is not the folder of a run: it has no config.json{hint}")
    return folder


def opened(folder, named=None):
    """Take a run's folder and find the checkpoint to go on from: the one that is named, or the newest good one."""
    lock = locked(folder)
    try:
        found, wrong = chosen(folder, named)
    except BaseException:
        os.close(lock)
        raise
    return Opened(folder, found, lock, wrong)


def chosen(folder, named):
    """(the checkpoint, what is wrong with newer ones)"""
    if named is None or Path(named) == folder:
        found, wrong = newest(folder)
        if found is None and wrong:
            told = "\n  ".join(wrong)
            raise UserError(f"{folder}: no checkpoint of this run can be gone on from\n  {told}")
        return found, wrong
    name = Path(named).stem.split("-replica_")[0]
    found, names = read_all(name, files(folder, name), whole=True), list(checkpoints(folder))
    if later := names[names.index(name) + 1 :]:
        raise UserError(f"--resume {named}: the run has later checkpoints; move them away first: {', '.join(later)}")
    return found, []


def locked(folder):
    """Keep other processes from training in this folder, until this one ends in whatever way."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"{folder}: another process is training this run; wait for it, or stop it first") from None
    except OSError:  # a file system without locks
        pass
    return handle


def is_locked(folder):
    """Whether another process is training in this folder."""
    try:
        os.close(locked(folder))
    except UserError:
        return True
    return False


def tidied(run):
    """Remove what an interrupted write left, and log lines after the checkpoint."""
    remove_leftovers(run.folder)
    cut_back(run.folder, run.found.record["lengths"] if run.found else {}, LOGS)


@contextmanager
def holding(folder, resume):
    """The checkpoint to go on from, if there is one; the folder belongs to this run alone as long as this is open."""
    if folder is None or isinstance(resume, Opened):  # the caller holds it
        yield resume.found if resume else None
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    run = opened(Path(folder))
    try:
        if resume:
            tidied(run)
        elif run.found:
            raise UserError(f"{folder}: holds the checkpoints of a run; go on with it (resume=True), or name another folder")
        yield run.found
    finally:
        os.close(run.lock)


def at_its_end(run, epochs, override):
    """Why there is nothing to go on with, or None."""
    if run.found is None or run.found.record["position"] or not (run.folder / FINISHED).exists():
        return None
    record = run.found.record
    if record["epoch"] >= epochs:
        return f"{run.folder}: is finished, {record['epoch']} of {epochs} epochs; raise training.epochs to go on"
    if record["stopped"] and not override:
        return f"{run.folder}: a callback stopped it after epoch {record['epoch']}; say --override to go on all the same"
    return None


def changes(run, record, override=False):
    """What changed in config, facts and data since a run's checkpoint, a line each; what must not is refused, unless the user
    insists, which also overrules a callback that stopped the run."""
    free, other = differences(run.found.record, record)
    if other and not override:
        lines = "\n  ".join(told(other))
        raise UserError(
            f"{run.folder}: this is not the config, or not the data, that the run was trained with\n  {lines}\n"
            "Bring it back, begin a new run, or say --override to go on with what is new; "
            f"{', '.join(FREE[:-1])} may always change"
        )
    if override:
        for each, arrays in zip(run.found.records, run.found.arrays, strict=True):
            each["stopped"] = False
            for name in probe_of(arrays):
                del arrays[name]
    return told(free | other)


def differences(old, new):
    """({path: (old, new)} of what may differ, the same of what may not) between two records."""
    old, new = (flat({**r["config"], "facts": r["facts"], "fingerprint of the data": r["data"]}) for r in (old, new))
    free, other = {}, {}
    for path in [path for path in {**old, **new} if old.get(path, ABSENT) != new.get(path, ABSENT)]:
        may = any(path == key or path.startswith(f"{key}.") for key in (*FREE, "facts.total_steps"))
        (free if may else other)[path] = (old.get(path, ABSENT), new.get(path, ABSENT))
    return free, other


ABSENT = "(absent)"


def told(changed):
    """Differences in words, a line each."""
    shown = {path: [v if v is ABSENT else json.dumps(v) for v in pair] for path, pair in changed.items()}
    return [f"{path}: {old} -> {new}" for path, (old, new) in shown.items()]


def flat(value, path=""):
    """{path.to.key: value} of nested objects and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items:
        return {path: value}
    return {k: v for key, inner in items for k, v in flat(inner, f"{path}.{key}".lstrip(".")).items()}
