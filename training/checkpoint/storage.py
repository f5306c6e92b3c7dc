"""Checkpoints by name: a tree of arrays and a JSON record in one file or folder, whichever format its suffix says.

A checkpoint `checkpoint-epoch_3` of several replicas is as many files, `checkpoint-epoch_3-replica_0.params` and so on.
"""

import importlib
import importlib.util
import logging
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import jax

from training.checkpoint.record import check_record
from training.devices.processes import from_first, is_first
from utils import Damaged, UserError, named_leaves

logger = logging.getLogger("main")

SUFFIXES = {"safetensors": ".params", "orbax": ".orbax"}  # format: what its checkpoints are called


class Incomplete(Damaged):
    """Files of some replicas only: the process was killed between them, which a run's very first checkpoint may be."""


class Found(NamedTuple):
    """A checkpoint read whole: the files, arrays and record of each replica."""

    name: str
    paths: list
    arrays: list
    records: list

    @property
    def record(self):
        """What all replicas have in common."""
        return self.records[0]


def save(path, tree, record):
    """Write a tree of arrays under its names, and the record."""
    form(path).write(path, named_leaves(jax.tree.map(without_key_type, tree)), record)


def load(path, verified=False):
    """({name: array}, record) of a checkpoint, verified unless it is already; the record is empty in a safetensors file that
    others wrote."""
    return form(path).read(path, verified)


def form(path):
    """The module that reads and writes such a checkpoint."""
    name = "orbax_folder" if Path(path).suffix == SUFFIXES["orbax"] else "safetensor_file"
    return importlib.import_module(f"training.checkpoint.{name}")


def form_for(name, processes=None):
    """The form of the checkpoints of this run: several processes can only write one together with Orbax."""
    return (
        ("orbax" if (processes or jax.process_count()) > 1 else "safetensors")
        if name == "auto"
        else name
    )


def check_format(name, processes=None):
    """Refuse a format whose library is not there, or that cannot be written here, before anything was trained."""
    if name == "safetensors" and (processes or jax.process_count()) > 1:
        raise UserError(
            "checkpoint.format: several processes write no safetensors file together; say 'auto' or 'orbax'"
        )
    if form_for(name, processes) == "orbax" and importlib.util.find_spec("orbax") is None:
        raise UserError(
            "checkpoint.format: Orbax is not installed: run `pip install -r training/requirements.txt`"
        )


def without_key_type(leaf):
    """The numbers of a random key, as some optimizers hold one."""
    is_key = hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def places(folder, name, replicas, suffix):
    """The path of each replica's file of a checkpoint."""
    ends = [f"-replica_{r}" for r in range(replicas)] if replicas > 1 else [""]
    return [Path(folder) / f"{name}{end}{suffix}" for end in ends]


def files(folder, name):
    """The files of a checkpoint that are there."""
    return sorted(
        p
        for s in SUFFIXES.values()
        for end in ("", "-replica_*")
        for p in Path(folder).glob(f"{name}{end}{s}")
    )


def checkpoints(folder):
    """{name: its files} of the checkpoints in a folder, the oldest first; one whose record is unreadable counts as the newest."""
    found = {}
    for path in sorted(
        p for suffix in SUFFIXES.values() for p in Path(folder).glob(f"checkpoint-*{suffix}")
    ):
        found.setdefault(path.stem.split("-replica_")[0], []).append(path)
    return dict(sorted(found.items(), key=lambda item: age(record_of(item[1][0]))))


def records(folder):
    """{name: record} of the checkpoints whose record can be read, the oldest first; not verified."""
    found = {name: record_of(paths[0]) for name, paths in checkpoints(folder).items()}
    return {name: record for name, record in found.items() if record}


def record_of(path):
    """The record of a checkpoint, or None where it is not sound."""
    try:
        record = form(path).read_record(path)
        check_record(path, record)
    except UserError:  # or it was deleted meanwhile
        return None
    return record


def age(record):
    """What sorts checkpoints: their step, and within it the end of an epoch, which comes after its evaluation, last."""
    return (record["step"], record["position"] == 0) if record else (float("inf"), False)


def newest(folder):
    """(the newest good checkpoint of a folder that a run can go on from, or None; the errors of those passed over)"""
    wrong = []
    for name, paths in reversed(checkpoints(folder).items()):
        try:
            return read_all(name, paths, whole=True), wrong
        except Damaged as error:
            wrong.append(error)
    return None, wrong


def for_all(find):
    """The checkpoint that `find` answers in process 0, or None; the other processes read the same."""
    found = None

    def tell():
        nonlocal found
        found = find()
        return found and [found.name, *map(str, found.paths)]

    told = from_first(tell)
    return (
        found
        if told is None or is_first()
        else read_all(told[0], [Path(path) for path in told[1:]], verified=True)
    )


def read_all(name, paths, whole=False, verified=False):
    """The files of a checkpoint of a run; `whole` asks for all that a run needs to go on."""
    if not paths:
        raise Damaged(f"{name}: is not there any more")
    read = [load(path, verified) for path in paths]
    for path, (_, record) in zip(paths, read, strict=True):
        check_record(path, record)
        if whole and not record["whole"]:
            raise Damaged(
                f"{path}: holds weights alone (checkpoint.save_optimizer_state was false), so no run can go on from it"
            )
    replicas = read[0][1]["replicas"]
    if replicas != len(read) or sorted(record["replica"] for _, record in read) != list(
        range(replicas)
    ):
        raise Incomplete(
            f"{paths[0]}: is one of {replicas} replicas, and not all of them are there"
        )
    read = sorted(zip(paths, read, strict=True), key=lambda item: item[1][1]["replica"])
    return Found(
        name,
        [path for path, _ in read],
        [arrays for _, (arrays, _) in read],
        [record for _, (_, record) in read],
    )


def delete(path):
    """Remove a checkpoint, a folder so that no half of it is ever seen under its name; whether that went well."""
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


LEFTOVERS = (
    ".checkpoint-*.tmp",
    *(f".{name}.json.*.tmp" for name in ("config", "environment", "finished")),
)


def remove_leftovers(folder):
    """Remove what a process that was killed while writing left behind."""
    former = [
        path
        for path in Path(folder).glob(".checkpoint-*.former")
        if path.with_name(path.stem[1:]).exists()
    ]
    for path in [*(path for pattern in LEFTOVERS for path in Path(folder).glob(pattern)), *former]:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(
            missing_ok=True
        )
