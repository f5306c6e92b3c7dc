"""The checkpoints in the folder of a run: their names, reading and writing them in either format,
and finding the one that is named, the newest, or the best.

A checkpoint is a tree of arrays and a JSON record, in the format given by the suffix. With several
replicas, a checkpoint `checkpoint-epoch_3` has one file or folder per replica,
`checkpoint-epoch_3-replica_0.params` and so on. That of replica 0 is written last: without it, the
process was killed before the checkpoint was complete.
"""

import importlib.util
import re
import sys
from pathlib import Path
from typing import NamedTuple

import jax

from training.base import key_data
from training.checkpoint import orbax_folder, safetensor_file
from training.checkpoint.record import check_record
from training.processes import from_first, is_first
from utils import Damaged, UserError, echo, named_leaves, quoted
from utils.files import remove
from utils.forms import local_path

SUFFIXES = {"safetensors": ".params", "orbax": ".orbax"}  # {format: suffix of its checkpoints}
# A hidden former folder is read if the process was killed while it replaced it (orbax_folder).
FILE = re.compile(r"(checkpoint-.+)\.(params|orbax)|\.(checkpoint-.+\.orbax)\.former")
# What a process leaves that is killed while it writes a file or a folder. The evaluator's file is
# written by another process, which may be running.
LEFTOVER = re.compile(r"\.checkpoint-.*\.tmp|\.(?!evaluator\.json).+\.\d+\.tmp")


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

    @property
    def completed(self):
        """How many epochs were trained to their end."""
        return self.record["epoch"] - bool(self.record["position"])


# Files.


def format_of(path):
    """The module that reads and writes the format of this path."""
    return orbax_folder if Path(path).suffix == SUFFIXES["orbax"] else safetensor_file


def save(path, tree, record):
    """Write a tree of arrays under the names of its leaves, and the record."""
    format_of(path).write(path, named_leaves(jax.tree.map(key_data, tree)), record)


def load(path, verified=False):
    """({name: array}, record) of a checkpoint, checked against its digest unless that was done
    (`verified`). The record of a safetensors file from another program is empty."""
    return format_of(path).read(path, verified)


def record_of(path):
    """The record of a checkpoint, which is not verified; None if it cannot be used."""
    try:
        return check_record(path, format_of(path).read_record(path))
    except UserError:  # or the checkpoint was deleted in the meantime
        return None


def format_for(name, processes=None):
    """The checkpoint format of this run: with several processes, only Orbax can write one."""
    if name != "auto":
        return name
    return "orbax" if (processes or jax.process_count()) > 1 else "safetensors"


def check_format(name, processes=None):
    """Refuse, before training starts, a format that cannot be written here."""
    if name == "safetensors" and (processes or jax.process_count()) > 1:
        raise UserError(
            "checkpoint.format: several processes cannot write one safetensors file together; "
            "use 'auto' or 'orbax'"
        )
    if format_for(name, processes) == "orbax" and importlib.util.find_spec("orbax") is None:
        raise UserError(f"checkpoint.format: {orbax_folder.NOT_INSTALLED}")


# Names.


def name_of(path):
    """The name of the checkpoint to which a file belongs."""
    return Path(path).stem.split("-replica_")[0]


def places(folder, name, replicas, suffix):
    """The path of each replica's file of a checkpoint."""
    ends = [f"-replica_{r}" for r in range(replicas)] if replicas > 1 else [""]
    return [Path(folder) / f"{name}{end}{suffix}" for end in ends]


def all_files(folder):
    """{name: its existing files} of all checkpoints, also of those that are not complete."""
    found = {}
    for path in sorted(Path(folder).glob("*checkpoint-*")):
        if match := FILE.fullmatch(path.name):
            file = path.with_name(match[3]) if match[3] else path
            found.setdefault(name_of(file), {})[file] = True
    return {name: sorted(files) for name, files in found.items()}


def files(folder, name):
    """The existing files of a checkpoint."""
    return all_files(folder).get(name, [])


def checkpoints(folder):
    """{name: its files} of the checkpoints that were completed, oldest first: in the order of their
    steps, where the end of an epoch comes last. One with an unreadable record counts as newest."""

    def age(item):
        record = record_of(item[1][0])
        return (record["step"], record["position"] == 0) if record else (float("inf"), False)

    complete = [
        (name, paths)
        for name, paths in all_files(folder).items()
        if paths[0].stem in (name, f"{name}-replica_0")
    ]
    return dict(sorted(complete, key=age))


def records(folder):
    """{name: record} of the checkpoints whose record can be read, oldest first; not verified."""
    record_by_name = {name: record_of(paths[0]) for name, paths in checkpoints(folder).items()}
    return {name: record for name, record in record_by_name.items() if record}


def remove_leftovers(folder):
    """Remove what a process left that was killed while writing."""
    folder = Path(folder)
    hidden = [*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")]
    leftovers = [path for path in hidden if LEFTOVER.fullmatch(path.name)]
    former = folder.glob(".checkpoint-*.former")
    leftovers += [path for path in former if path.with_name(path.stem[1:]).exists()]
    for path in leftovers:
        remove(path)


# Reading whole checkpoints.


def read(folder, name, whole=False, verified=False):
    """Read all files of a checkpoint; `whole` requires everything that resuming a run needs."""
    paths = files(folder, name)
    if not paths:
        present = ", ".join(checkpoints(folder)) or "none"
        raise Damaged(f"{folder}: has no {name}; it has {present}")
    replicas = [(path, *load(path, verified)) for path in paths]
    for path, _, record in replicas:
        check_record(path, record)
        if whole and not record["whole"]:
            raise Damaged(
                f"{path}: holds only weights (checkpoint.save_optimizer_state was false), so a run "
                "cannot resume from it"
            )
    replicas.sort(key=lambda replica: replica[2]["replica"])
    numbers, count = [record["replica"] for *_, record in replicas], record["replicas"]
    if len(numbers) != count or numbers != list(range(count)):
        missing = [r for r in range(min(count, len(numbers) + 1)) if r not in numbers]
        which = missing[0] if missing else "another"
        raise Damaged(
            f"{paths[0]}: is one of {count} replicas, and the file of replica {which} is missing"
        )
    return Checkpoint(name, *map(list, zip(*replicas, strict=True)))


def newest(folder):
    """(the newest valid checkpoint from which a run can resume, or None; errors of newer ones)"""
    errors = []
    for name in reversed(checkpoints(folder)):
        try:
            return read(folder, name, whole=True), errors
        except Damaged as error:
            errors.append(error)
    return None, errors


def for_all(folder, find):
    """The checkpoint of a folder that `find()` returns in process 0, or None; the other processes
    read the same one."""
    own = None

    def find_name():
        nonlocal own
        own = find()
        return own and own.name

    name = from_first(find_name)
    return own if name is None or is_first() else read(folder, name, verified=True)


def evidence_of_lost(folder):
    """Lines which show that a folder without a valid checkpoint had one. If there are none, the
    process was killed before it had written the first one."""
    for name, paths in all_files(folder).items():
        record = record_of(paths[0]) or {"regular": [], "best": []}
        others = sorted({*record["regular"], *(best for best, _ in record["best"])} - {name})
        if others:
            yield f"{name} was not the first one: there was {', '.join(others)}"


# Choosing one.


def checkpoint_at(path, best=False):
    """The checkpoint at a path; in a run's folder the newest one, or the best one. Of several
    replicas, the file of the first one."""
    path = local_path("path", path)
    if not path.is_dir() or path.name.startswith("checkpoint-"):  # Orbax writes folders
        if best:
            raise UserError(f"{path}: is not a run, of which the best checkpoint can be taken")
        return path
    present = checkpoints(path)
    if not present:
        runs = {file.parent for file in path.glob("*/checkpoint-*")}
        exported = sorted(file for file in path.glob("*.*") if file.suffix in (".onnx", ".tflite"))
        fix = "name a checkpoint or a run"
        if runs:
            latest = max(runs, key=lambda folder: folder.stat().st_mtime_ns)
            fix = f"did you mean {quoted(latest)}?"
        elif exported:
            fix = f"for exported files, run `python inference/predict.py {quoted(exported[0])} ...`"
        raise UserError(f"{path}: holds no checkpoint; {fix}")
    if not best:
        return list(present.values())[-1][0]
    name, why = best_in(path)
    if name is None:
        raise UserError(
            f"{path}: has no best checkpoint: no checkpoint has a finite value of {why}; "
            f"name one: {', '.join(present)}"
        )
    if name not in present:
        raise UserError(
            f"{path}: the best checkpoint, {name} ({why}), is no longer there; "
            f"put it back, or name another one: {', '.join(present)}"
        )
    return present[name][0]


def best_in(folder):
    """(the name of a run's best checkpoint, as its newest one records it, the metric with its
    value); (None, the metric) if there is none."""
    record = [{}, *records(folder).values()][-1]
    monitor = record.get("monitor") or "checkpoint.monitor"
    for name, value in record.get("best", [])[:1]:
        return name, f"{monitor} {value:.4f}"
    return None, monitor


def chosen_checkpoint(path, best=False):
    """`checkpoint_at` for a command: a line on stderr says which checkpoint that is."""
    file = checkpoint_at(path, best)
    which = ""
    if file != Path(path).expanduser():
        name, why = best_in(file.parent)
        which = f" (the newest; --best takes {name}, {why})" if name else " (the newest)"
        if name == name_of(file):
            which = f" (the best: {why})"
    echo(f"Checkpoint: {file}{which}", file=sys.stderr)
    return file
