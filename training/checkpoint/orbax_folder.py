"""A checkpoint as a folder written by Orbax; with several processes, each writes its own shards.

checkpoint-epoch_3.orbax/
    arrays/       written by Orbax; without arrays of size zero, which it refuses
    rawtree.json  the record, and the type and shape of every array
    SHA256SUMS    digests of all other files, written last; check with `sha256sum -c SHA256SUMS`

The folder is built as `.<name>.tmp` next to its final path, and renamed once all of it is on disk.
Meanwhile a folder to be replaced is called `.<name>.former`; a reader falls back to that one if
there is none at the path. Nothing is unpickled.
"""

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from numpy.typing import DTypeLike

from utils import Damaged, RunError, UserError, check_memory, first_line, format_bytes
from utils.files import parse_json, read_file, to_disk

ARRAYS, NOTE, SUMS = "arrays", "rawtree.json", "SHA256SUMS"
LARGE = 2**12  # with several processes, an array with more elements than this is read in parts
LONG = 24 * 3600  # seconds; one process alone may take hours for terabytes
OVERHEAD = 2**28  # bytes that the files may have besides twice those of the arrays
Form = tuple[np.dtype, tuple[int, ...]]  # the type and shape of an array
NOT_INSTALLED = "Orbax is not installed: run `pip install -r training/optional.txt`"


def write(path: str | Path, arrays: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Write {name: array} and the record; every process has to call this. It returns when the
    folder is complete. A process that fails raises alone. If it was writing arrays, the other
    processes raise after Orbax's timeout of five minutes."""
    ocp, path = import_orbax(), Path(path).absolute()
    arrays = {name: a if isinstance(a, jax.Array) else np.asarray(a) for name, a in arrays.items()}
    forms = {name: [a.dtype.name, a.shape] for name, a in arrays.items()}
    note = json.dumps({"record": record, "arrays": forms})
    building, first = beside(path, "tmp"), jax.process_index() == 0
    processes = set(range(jax.process_count()))
    try:
        with barrier(ocp, f"{building}: started", processes):
            if first:
                shutil.rmtree(building, ignore_errors=True)  # left by a killed process
                building.mkdir()
        with barrier(ocp, f"{path}: complete", processes):
            if filled := {name: a for name, a in arrays.items() if a.size}:
                with checkpointer(ocp, processes) as writer:
                    writer.save(building / ARRAYS, args=ocp.args.PyTreeSave(filled))
            if first:
                seal(building, note)
                put(building, path)
    # TensorStore reports a full disk as a ValueError, JAX a lost process as a RuntimeError.
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(f"{path}: cannot be written: {reason(error)}") from error
    finally:
        if first:
            shutil.rmtree(building, ignore_errors=True)


@contextmanager
def barrier(ocp: ModuleType, name: str, processes: set[int]) -> Iterator[None]:
    """Wait at the end for all processes, including those that failed; JAX raises for a lost one."""
    try:
        yield
    finally:
        ocp.multihost.sync_global_processes(name, processes=processes, timeout=LONG)


def read(path: str | Path, verified: bool = False) -> "tuple[dict[str, HostArray], dict[str, Any]]":
    """({name: NumPy array}, record), checked against the digests unless `verified`. Each process
    reads separately. With several processes, none of them may have memory for the whole model, so
    a large array is returned as Stored."""
    ocp = import_orbax()
    with naming(path):
        folder = find(path)
        if not verified:
            compare_digests(path, folder)
        record, forms = read_note(folder)
        arrays = {name: np.empty(shape, d) for name, (d, shape) in forms.items() if 0 in shape}
        if jax.process_count() > 1:
            large = [name for name, (_, shape) in forms.items() if math.prod(shape) > LARGE]
            arrays |= {name: Stored(Path(path), name, *forms[name]) for name in large}
        if rest := forms.keys() - arrays.keys():
            check_memory(
                str(path), sum(math.prod(forms[n][1]) * forms[n][0].itemsize for n in rest)
            )
            restore_args = dict.fromkeys(rest, ocp.RestoreArgs(restore_type=np.ndarray))
            some = any(isinstance(array, Stored) for array in arrays.values())
            arrays |= restored(folder, restore_args, some)
        if {name: (a.dtype, a.shape) for name, a in arrays.items()} != forms:
            raise Damaged(f"{path}: is damaged: its arrays are not those listed in {NOTE}")
        return {name: arrays[name] for name in forms}, record


def restored(folder: Path, restore_args: dict[str, Any], some: bool = True) -> dict[str, Any]:
    """{name: array} for {name: Orbax's arguments}; these are all of the arrays unless `some`."""
    ocp, item = import_orbax(), dict.fromkeys(restore_args, 0)
    args = ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=some)
    with checkpointer(ocp, {jax.process_index()}) as reader:
        return reader.restore(folder / ARRAYS, args=args)


@dataclass(frozen=True)
class Stored:
    """An array that is still on disk; a process reads only the part that its devices hold."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    def placed(self, sharding: Sharding) -> jax.Array:
        """The array on the devices, in this sharding."""
        return self.read(import_orbax().ArrayRestoreArgs(sharding=sharding))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        array = self.read(import_orbax().RestoreArgs(restore_type=np.ndarray))
        return array.astype(dtype or self.dtype, copy=False)

    def read(self, restore_args: Any) -> Any:
        """The array, as Orbax restores it with these arguments."""
        with naming(self.path):
            return restored(find(self.path), {self.name: restore_args})[self.name]


HostArray = np.ndarray | Stored  # in memory, or still on disk


def read_record(path: str | Path) -> dict[str, Any]:
    """The record alone; neither arrays nor digests are read."""
    with naming(path):
        return read_note(find(path))[0]


def read_note(folder: Path) -> tuple[dict[str, Any], dict[str, Form]]:
    """(the record, {name: (type, shape)} of all arrays)."""
    note = parse_json(read_file(folder / NOTE))
    record = note["record"]
    if not isinstance(record, dict):
        raise ValueError(f"{NOTE} holds no record")
    return record, {
        name: (np.dtype(d), tuple(shape)) for name, (d, shape) in note["arrays"].items()
    }


def import_orbax() -> ModuleType:
    """Orbax without its log lines; the errors that it logs are raised as well."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise UserError(NOT_INSTALLED) from error
    logging.getLogger("absl").addFilter(is_not_orbax)
    return ocp


def is_not_orbax(log_record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in log_record.pathname


def checkpointer(ocp: ModuleType, processes: set[int]) -> Any:
    """Orbax's reader and writer for these processes together."""
    # Because the processes are named here, they wait for each other at the coordinator and not in a
    # collective, which would mix with the collectives of training when this runs in the background.
    hosts = {"primary_host": min(processes), "active_processes": processes}
    options = ocp.options.MultiprocessingOptions(**hosts)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def beside(path: Path, role: str) -> Path:
    """A hidden sibling of a path; the next run finds the same name and cleans it up."""
    return path.with_name(f".{path.name}.{role}")


def find(path: str | Path) -> Path:
    """The folder at a path, or the former one if its replacement was never completed."""
    path = Path(path)
    for folder in (path.absolute(), beside(path.absolute(), "former")):
        if folder.exists():
            return folder
    raise UserError(f"{path}: there is no such checkpoint")


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Turn any error while a checkpoint is read into one error that names it."""
    try:
        yield
    except UserError:
        raise
    except MemoryError as error:
        raise UserError(f"{path}: there is not enough memory for its arrays") from error
    except Exception as error:  # for invalid files, Orbax may raise anything
        raise Damaged(f"{path}: cannot be read: {reason(error)}") from error


def reason(error: Exception) -> str:
    """The cause of an error in one line; TensorStore's long messages hold a system error code."""
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    return getattr(error, "strerror", None) or first_line(error) or type(error).__name__


def digests(folder: Path) -> bytes:
    """One line per file of a folder except SHA256SUMS, in the format of `sha256sum`."""
    lines = []
    # Sorted by parts, since Windows ignores case when it compares paths.
    for file in sorted(folder.rglob("*"), key=lambda file: file.relative_to(folder).parts):
        if file.is_dir() or file == folder / SUMS:
            continue
        if not file.is_file():
            raise ValueError(f"{file.name} is not a regular file")  # opening a pipe would block
        with open(file, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        lines.append(f"{digest}  {file.relative_to(folder).as_posix()}\n".encode())
    return b"".join(lines)


def compare_digests(path: str | Path, folder: Path) -> None:
    """Refuse a folder in which any bit has changed since it was written."""
    if not (folder / SUMS).is_file():
        raise Damaged(f"{path}: is incomplete: it has no {SUMS}, which is written last")
    try:
        forms = read_note(folder)[1].values()
        expected = sum(math.prod(shape) * dtype.itemsize for dtype, shape in forms)
    except Exception as error:
        raise Damaged(f"{path}: is damaged: changed, missing or added: {NOTE}") from error
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if size > 2 * expected + OVERHEAD:  # to read them to their end could take hours
        sizes = f"{format_bytes(size)}, and its arrays {format_bytes(expected)}"
        raise Damaged(f"{path}: is damaged: its files have {sizes}")
    listed, actual = read_file(folder / SUMS), digests(folder)
    if listed != actual:
        differing = {*listed.split(b"\n")} ^ {*actual.split(b"\n")}
        wrong = sorted({line[66:].decode(errors="replace") for line in differing})
        raise Damaged(f"{path}: is damaged: changed, missing or added: {', '.join(wrong[:4])}")


def seal(folder: Path, note: str) -> None:
    """Add the note and the digests, and flush everything to disk."""
    (folder / NOTE).write_text(note, encoding="utf-8")
    (folder / SUMS).write_bytes(digests(folder))
    for entry in (folder, *folder.rglob("*")):
        to_disk(entry)


def put(folder: Path, path: Path) -> None:
    """Rename a folder to a path, replacing one that is already there."""
    former = beside(path, "former")
    if path.is_dir():
        shutil.rmtree(former, ignore_errors=True)  # left by a process killed near the end of this
        os.rename(path, former)
    os.rename(folder, path)
    to_disk(path.parent)
    shutil.rmtree(former, ignore_errors=True)
