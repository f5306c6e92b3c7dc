"""Checkpoints by name: a tree of arrays and a JSON record, in the format given by the suffix.

With several replicas, a checkpoint `checkpoint-epoch_3` has one file or folder per replica:
`checkpoint-epoch_3-replica_0.params` and so on.
"""

import importlib.util
import logging
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import jax

from file_io import remove
from training.base import key_data
from training.checkpoint import orbax_folder, safetensor_file
from training.checkpoint.record import check_record
from training.devices.processes import from_first, is_first
from utils import Damaged, UserError, named_leaves

logger = logging.getLogger("main")

SUFFIXES = {"safetensors": ".params", "orbax": ".orbax"}  # {format: suffix of its checkpoints}


class Incomplete(Damaged):
    """Files of some replicas are missing."""


class Interrupted(Incomplete):
    """The file of replica 0, which is written last, is missing: the process may have been killed
    before it had written it."""


class Checkpoint(NamedTuple):
    """A checkpoint in memory: the file, arrays and record of each replica."""

    name: str
    paths: list
    arrays: list
    records: list

    @property
    def record(self):
        """The record of the first replica, for the entries that all replicas share."""
        return self.records[0]


def save(path, tree, record):
    """Write a tree of arrays under the names of its leaves, and the record."""
    form(path).write(path, named_leaves(jax.tree.map(key_data, tree)), record)


def load(path, verified=False):
    """({name: array}, record) of a checkpoint, checked against its digest unless that was done
    (`verified`). The record of a safetensors file from another program is empty."""
    return form(path).read(path, verified)


def form(path):
    """The module that reads and writes the format of this path."""
    return orbax_folder if Path(path).suffix == SUFFIXES["orbax"] else safetensor_file


def form_for(name, processes=None):
    """The checkpoint format of this run: with several processes, only Orbax can write one."""
    if name != "auto":
        return name
    return "orbax" if (processes or jax.process_count()) > 1 else "safetensors"


def check_format(name, processes=None):
    """Refuse, before training starts, a format that cannot be written here."""
    if name == "safetensors" and (processes or jax.process_count()) > 1:
        why = "several processes cannot write one safetensors file together"
        raise UserError(f"checkpoint.format: {why}; use 'auto' or 'orbax'")
    if form_for(name, processes) == "orbax" and importlib.util.find_spec("orbax") is None:
        raise UserError(f"checkpoint.format: {orbax_folder.NOT_INSTALLED}")


def places(folder, name, replicas, suffix):
    """The path of each replica's file of a checkpoint."""
    ends = [f"-replica_{r}" for r in range(replicas)] if replicas > 1 else [""]
    return [Path(folder) / f"{name}{end}{suffix}" for end in ends]


def files(folder, name):
    """The existing files of a checkpoint, or of all those whose names match a pattern."""
    folder, found = Path(folder), set()
    for pattern in [f"{name}{end}{s}" for s in SUFFIXES.values() for end in ("", "-replica_*")]:
        found |= {*folder.glob(pattern)}
        # A process was killed while it replaced a folder: the former one is read (orbax_folder).
        found |= {path.with_name(path.stem[1:]) for path in folder.glob(f".{pattern}.former")}
    return sorted(found)


def checkpoints(folder):
    """{name: its files}, oldest first; a checkpoint with an unreadable record counts as newest."""
    paths_of = {}
    for path in files(folder, "checkpoint-*"):
        paths_of.setdefault(path.stem.split("-replica_")[0], []).append(path)
    return dict(sorted(paths_of.items(), key=lambda item: age(record_of(item[1][0]))))


def records(folder):
    """{name: record} of the checkpoints whose record can be read, oldest first; not verified."""
    record_by_name = {name: record_of(paths[0]) for name, paths in checkpoints(folder).items()}
    return {name: record for name, record in record_by_name.items() if record}


def all_written(paths):
    """Whether the file of replica 0, which is written last, is among these."""
    ends = [path.stem.partition("-replica_")[2] for path in paths]
    return "" in ends or "0" in ends


def record_of(path):
    """The record of a checkpoint, or None if it is not valid."""
    try:
        return check_record(path, form(path).read_record(path))
    except UserError:  # or the checkpoint was deleted in the meantime
        return None


def age(record):
    """The sort key of a checkpoint: its step; at the same step the end of an epoch comes last."""
    return (record["step"], record["position"] == 0) if record else (float("inf"), False)


def newest(folder):
    """(the newest valid checkpoint from which a run can resume, or None; errors of newer ones)"""
    errors = []
    for name, paths in reversed(checkpoints(folder).items()):
        try:
            return read_all(name, paths, whole=True), errors
        except Damaged as error:
            errors.append(error)
    return None, errors


def lost(folder, errors):
    """The evidence that a folder without a valid checkpoint had one, one line each. If there is
    none, the process was killed before it had written the first one. `errors` are those of the
    checkpoints in the folder."""
    lines = [str(error) for error in errors if not isinstance(error, Interrupted)]
    for name, record in records(folder).items():
        others = sorted({*record["regular"], *(best for best, _ in record["best"])} - {name})
        if others:
            lines.append(f"{name} was not the first one: there was {', '.join(others)}")
    return lines


def for_all(find):
    """The checkpoint that `find()` returns in process 0, or None; other processes read the same."""
    checkpoint = None

    def find_and_describe():
        nonlocal checkpoint
        checkpoint = find()
        return checkpoint and [checkpoint.name, *map(str, checkpoint.paths)]

    description = from_first(find_and_describe)
    if description is None or is_first():
        return checkpoint
    name, *paths = description
    return read_all(name, [Path(path) for path in paths], verified=True)


def read_all(name, paths, whole=False, verified=False):
    """Read all files of a checkpoint; `whole` requires everything that resuming a run needs."""
    if not paths:
        raise Damaged(f"{name}: no longer exists")
    read = [(path, *load(path, verified)) for path in paths]
    for path, _, record in read:
        check_record(path, record)
        if whole and not record["whole"]:
            why = "holds only weights (checkpoint.save_optimizer_state was false)"
            raise Damaged(f"{path}: {why}, so a run cannot resume from it")
    replicas = read[0][2]["replicas"]
    read.sort(key=lambda entry: entry[2]["replica"])
    numbers = [record["replica"] for *_, record in read]
    if replicas != len(read) or numbers != list(range(replicas)):
        kind = Incomplete if 0 in numbers else Interrupted
        gone = next((r for r in range(min(replicas, len(read) + 1)) if r not in numbers), "another")
        what = f"is one of {replicas} replicas, and the file of replica {gone} is missing"
        raise kind(f"{paths[0]}: {what}")
    return Checkpoint(name, *map(list, zip(*read, strict=True)))


def delete(path):
    """Delete a checkpoint and return whether that worked. A folder is renamed first, so that a
    partly deleted one is never found under its name."""
    try:
        if path.is_dir():
            hidden = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            path.rename(hidden)
            shutil.rmtree(hidden)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: cannot be deleted: %s", path, error.strerror)
        return False
    return True


# The evaluator's file is written by another process, which may be running.
LEFTOVER = r"\.checkpoint-.*\.tmp|\.(?!evaluator\.json).+\.\d+\.tmp"


def remove_leftovers(folder):
    """Remove what a process left that was killed while writing: files of atomic_file, and
    checkpoints that are folders."""
    folder = Path(folder)
    hidden = [*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")]
    leftovers = [path for path in hidden if re.fullmatch(LEFTOVER, path.name)]
    former = folder.glob(".checkpoint-*.former")
    leftovers += [path for path in former if path.with_name(path.stem[1:]).exists()]
    for path in leftovers:
        remove(path)
