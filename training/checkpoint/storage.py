"""The checkpoints in the folder of a run: their names, reading and writing them in either format,
and finding the one that is named, the newest, or the best.

A checkpoint is a tree of arrays and a JSON record, in a file or a folder, by its format. Of several
replicas, the names of the arrays begin with a number, `0/params/...`.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from training.base import key_data
from training.checkpoint import orbax_folder, safetensor_file
from training.checkpoint.orbax_folder import HostArray
from training.checkpoint.record import Record, check_record
from training.processes import from_first, is_first
from training.rows import below
from utils import Damaged, UserError, echo, named_leaves, quoted
from utils.files import remove
from utils.forms import local_path

SUFFIXES = {"safetensors": ".params", "orbax": ".orbax"}  # {format: suffix of its checkpoints}
# A hidden former folder is read if the process was killed while it replaced it (orbax_folder).
FILE = re.compile(r"(checkpoint-.+)\.(params|orbax)|\.(checkpoint-.+\.orbax)\.former")
# How to name one of several replicas in a checkpoint, as `checkpoint-epoch_3.params:1`.
ONE = re.compile(r"(.+\.(?:params|orbax)):(\d+)")
# What a process leaves that is killed while it writes a file or a folder. The evaluator's file is
# written by another process, which may be running.
LEFTOVER = re.compile(r"\.checkpoint-.*\.tmp|\.(?!evaluator\.json).+\.\d+\.tmp")


class Checkpoint(NamedTuple):
    """A checkpoint in memory."""

    name: str
    path: Path
    arrays: list[dict[str, HostArray]]  # {name: array} of each replica
    record: Record

    @property
    def completed(self) -> int:
        """How many epochs were trained to their end."""
        return self.record["epoch"] - bool(self.record["position"])


# Files.


def format_of(path: str | Path) -> ModuleType:
    """The module that reads and writes the format of this path."""
    return orbax_folder if Path(path).suffix == SUFFIXES["orbax"] else safetensor_file


def save(path: str | Path, tree: PyTree, record: Mapping[str, Any]) -> None:
    """Write a tree of arrays under the names of its leaves, and the record."""
    format_of(path).write(path, named_leaves(jax.tree.map(key_data, tree)), record)


def load(path: str | Path, verified: bool = False) -> tuple[dict[str, HostArray], dict[str, Any]]:
    """({name: array}, record) of a checkpoint, checked against its digest unless that was done
    (`verified`). The record of a safetensors file from another program is empty."""
    return format_of(path).read(path, verified)


def load_one(path: str | Path) -> tuple[dict[str, HostArray], dict[str, Any]]:
    """({name: array}, record) of the first replica in a checkpoint, or of the one of this number:
    `checkpoint-epoch_3.params:1`. The record says which it is, as "replica"; that of another
    program's file is empty."""
    one = ONE.fullmatch(str(path))
    file, number = (Path(one[1]), int(one[2])) if one else (path, 0)
    arrays, record = load(file)
    if not record:
        return arrays, record
    own = below(arrays, str(number))
    if one and not own:
        raise UserError(f"{file}: holds no replica {number}")
    return own or arrays, record | {"replica": number}


def record_of(path: str | Path) -> Record | None:
    """The record of a checkpoint, which is not verified; None if it cannot be used."""
    try:
        return check_record(path, format_of(path).read_record(path))
    except UserError:  # or the checkpoint was deleted in the meantime
        return None


def format_for(name: str, processes: int | None = None) -> str:
    """The checkpoint format of this run: with several processes, only Orbax can write one."""
    if name != "auto":
        return name
    return "orbax" if (processes or jax.process_count()) > 1 else "safetensors"


def check_format(name: str, processes: int | None = None) -> None:
    """Refuse, before training starts, a format that cannot be written here."""
    if name == "safetensors" and (processes or jax.process_count()) > 1:
        raise UserError(
            "checkpoint.format: several processes cannot write one safetensors file together; "
            "use 'auto' or 'orbax'"
        )
    if format_for(name, processes) == "orbax" and importlib.util.find_spec("orbax") is None:
        raise UserError(f"checkpoint.format: {orbax_folder.NOT_INSTALLED}")


# Names.


def files(folder: str | Path) -> dict[str, Path]:
    """{name: its file} of all checkpoints. A process that was killed after a change of format may
    have left one in both formats; then either file serves."""
    matches = [FILE.fullmatch(path.name) for path in sorted(Path(folder).glob("*checkpoint-*"))]
    paths = [Path(folder) / (match[3] or match[0]) for match in matches if match]
    return {path.stem: path for path in paths}


def file_of(folder: str | Path, name: str) -> Path:
    """The file of a checkpoint, or the path where it was if it is not there."""
    return files(folder).get(name, Path(folder) / name)


def checkpoints(folder: str | Path) -> dict[str, Path]:
    """{name: its file} of the checkpoints, oldest first: in the order of their steps, where the end
    of an epoch comes last. One with an unreadable record counts as newest."""

    def age(item: tuple[str, Path]) -> tuple[float, bool]:
        record = record_of(item[1])
        return (record["step"], record["position"] == 0) if record else (float("inf"), False)

    return dict(sorted(files(folder).items(), key=age))


def records(folder: str | Path) -> dict[str, Record]:
    """{name: record} of the checkpoints whose record can be read, oldest first; not verified."""
    record_by_name = {name: record_of(path) for name, path in checkpoints(folder).items()}
    return {name: record for name, record in record_by_name.items() if record}


def remove_leftovers(folder: str | Path) -> None:
    """Remove what a process left that was killed while writing."""
    folder = Path(folder)
    hidden = [*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")]
    leftovers = [path for path in hidden if LEFTOVER.fullmatch(path.name)]
    former = folder.glob(".checkpoint-*.former")
    leftovers += [path for path in former if path.with_name(path.stem[1:]).exists()]
    for path in leftovers:
        remove(path)


# Reading a checkpoint of this run.


def read(folder: str | Path, name: str, whole: bool = False, verified: bool = False) -> Checkpoint:
    """Read a checkpoint; `whole` requires everything that resuming a run needs."""
    path = files(folder).get(name)
    if not path:
        present = ", ".join(checkpoints(folder)) or "none"
        raise Damaged(f"{folder}: has no {name}; it has {present}")
    arrays, record = load(path, verified)
    record = check_record(path, record)
    if whole and not record["whole"]:
        raise Damaged(
            f"{path}: holds only weights (checkpoint.save_optimizer_state was false), so a run "
            "cannot resume from it"
        )
    count = len(record["seeds"])
    own = [below(arrays, str(number)) for number in range(count)] if count > 1 else [arrays]
    return Checkpoint(name, path, own, record)


def newest(folder: str | Path) -> tuple[Checkpoint | None, list[Damaged]]:
    """(the newest valid checkpoint from which a run can resume, or None; errors of newer ones)"""
    errors = []
    for name in reversed(checkpoints(folder)):
        try:
            return read(folder, name, whole=True), errors
        except Damaged as error:
            errors.append(error)
    return None, errors


def for_all(folder: str | Path, find: Callable[[], Checkpoint | None]) -> Checkpoint | None:
    """The checkpoint of a folder that `find()` returns in process 0, or None; the other processes
    read the same one."""
    own = None

    def find_name() -> str | None:
        nonlocal own
        own = find()
        return own and own.name

    name = from_first(find_name)
    return own if name is None or is_first() else read(folder, name, verified=True)


def evidence_of_lost(folder: str | Path) -> Iterator[str]:
    """Lines which show that a folder without a valid checkpoint had one. If there are none, the
    process was killed before it had written the first one."""
    for name, path in files(folder).items():
        record = record_of(path) or {"regular": [], "best": []}
        others = sorted({*record["regular"], *(best for best, _ in record["best"])} - {name})
        if others:
            yield f"{name} was not the first one: there was {', '.join(others)}"


# Choosing one.


def checkpoint_at(path: str | Path, best: bool = False) -> Path:
    """The checkpoint at a path; in a run's folder the newest one, or the best one."""
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
        return list(present.values())[-1]
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
    return present[name]


def best_in(folder: str | Path) -> tuple[str | None, str]:
    """(the name of a run's best checkpoint, as its newest one records it, the metric with its
    value); (None, the metric) if there is none."""
    record = [{}, *records(folder).values()][-1]
    monitor = record.get("monitor") or "checkpoint.monitor"
    for name, value in record.get("best", [])[:1]:
        return name, f"{monitor} {value:.4f}"
    return None, monitor


def chosen_checkpoint(path: str | Path, best: bool = False) -> Path:
    """`checkpoint_at` for a command: a line on stderr says which checkpoint that is."""
    file = checkpoint_at(path, best)
    which = ""
    if file != Path(path).expanduser():
        name, why = best_in(file.parent)
        which = f" (the newest; --best takes {name}, {why})" if name else " (the newest)"
        if name == file.stem:
            which = f" (the best: {why})"
    echo(f"Checkpoint: {file}{which}", file=sys.stderr)
    return file
