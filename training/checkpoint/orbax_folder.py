"""A checkpoint as a folder, written by Orbax: with several processes, each writes the shards that it holds.

checkpoint-epoch_3.orbax/
    arrays/       Orbax's own; without the arrays of size zero, which it refuses
    rawtree.json  the record, and the type and shape of every array
    SHA256SUMS    the digest of every other file, written last; `sha256sum -c SHA256SUMS` compares them by hand

It is built beside its place, as `.<name>.tmp`, and takes its name when all of it is on the disk. One that is to be replaced
is `.<name>.former` meanwhile; a reader that finds nothing in the place takes that one. Nothing is unpickled.
"""

import hashlib
import json
import logging
import math
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from utils import Damaged, RunError, UserError, first_line

ARRAYS, NOTE, SUMS = "arrays", "rawtree.json", "SHA256SUMS"
LARGE = 2**12  # numbers: up to here an array is read at once
LONG = 24 * 3600  # seconds; what one process does alone, with terabytes, takes its time


def write(path, arrays, record):
    """Write {name: array} and the record. Every process has to call this; it returns when the folder is in its place. Where a
    process fails it raises, there alone; if it was one that wrote arrays, the others do so after Orbax's five minutes.
    """
    ocp, path = import_orbax(), Path(path).absolute()
    arrays = {name: a if isinstance(a, jax.Array) else np.asarray(a) for name, a in arrays.items()}
    note = json.dumps(
        {"record": record, "arrays": {name: [a.dtype.name, a.shape] for name, a in arrays.items()}}
    )
    building, processes, first = (
        beside(path, "tmp"),
        set(range(jax.process_count())),
        jax.process_index() == 0,
    )
    try:
        with meeting(ocp, f"{building}: begun", processes):
            if first:
                shutil.rmtree(building, ignore_errors=True)  # of a process that was killed
                building.mkdir()
        with meeting(ocp, f"{path}: in its place", processes):
            if filled := {name: a for name, a in arrays.items() if a.size}:
                with orbax(ocp, processes) as writer:
                    writer.save(building / ARRAYS, args=ocp.args.PyTreeSave(filled))
            if first:
                seal(building, note)
                put(building, path)
    # TensorStore tells of a full disk by a ValueError, JAX of a lost process by a RuntimeError.
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(f"{path}: cannot be written: {reason(error)}") from error
    finally:
        if first:
            shutil.rmtree(building, ignore_errors=True)


@contextmanager
def meeting(ocp, name, processes):
    """Afterwards all processes have come to this point, one that failed as well; one that is lost JAX tells of."""
    try:
        yield
    finally:
        ocp.multihost.sync_global_processes(name, processes=processes, timeout=LONG)


def read(path, verified=False):
    """({name: NumPy array}, record), once the digest of every file is found right, unless all are `verified`; each process reads
    for itself. Of several processes none may have room for the whole: there a large array is Stored."""
    ocp = import_orbax()
    with telling(path):
        folder = find(path)
        if not verified:
            compare_digests(path, folder)
        note = json.loads((folder / NOTE).read_bytes())
        forms = {
            name: (np.dtype(dtype), tuple(shape)) for name, (dtype, shape) in note["arrays"].items()
        }
        arrays = {
            name: np.empty(shape, dtype) for name, (dtype, shape) in forms.items() if 0 in shape
        }
        large = [
            name
            for name, (_, shape) in forms.items()
            if math.prod(shape) > LARGE and jax.process_count() > 1
        ]
        stored = {name: Stored(path, name, *forms[name]) for name in large}
        if filled := forms.keys() - arrays.keys() - stored.keys():
            arrays |= restored(
                folder,
                dict.fromkeys(filled, ocp.RestoreArgs(restore_type=np.ndarray)),
                some=bool(stored),
            )
        arrays |= stored
        if {name: (a.dtype, a.shape) for name, a in arrays.items()} != forms:
            raise Damaged(f"{path}: is damaged: its arrays are not those that {NOTE} tells of")
        return {name: arrays[name] for name in forms}, dict(note["record"])


def restored(folder, wanted, some=True):
    """{name: array} as these arguments of Orbax say, for this process alone; `some` of those that are there, or all."""
    ocp = import_orbax()
    args = ocp.args.PyTreeRestore(
        item=dict.fromkeys(wanted, 0), restore_args=wanted, partial_restore=some
    )
    with orbax(ocp, {jax.process_index()}) as reader:
        return reader.restore(folder / ARRAYS, args=args)


@dataclass(frozen=True)
class Stored:
    """An array that is still on the disk: a process reads the part of it that its devices are to hold."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple

    def placed(self, place):
        """It on the devices, as a sharding says."""
        return self.read(import_orbax().ArrayRestoreArgs(sharding=place))

    def __array__(self, dtype=None, copy=None):
        return self.read(import_orbax().RestoreArgs(restore_type=np.ndarray)).astype(
            dtype or self.dtype, copy=False
        )

    def read(self, wanted):
        """It as Orbax is asked for it."""
        with telling(self.path):
            return restored(find(self.path), {self.name: wanted})[self.name]


def read_record(path):
    """The record alone; neither the arrays nor the digests are looked at."""
    with telling(path):
        return dict(json.loads((find(path) / NOTE).read_bytes())["record"])


def import_orbax():
    """Orbax, whose log lines are dropped: what fails, it raises as well."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise UserError(
            "Orbax is not installed: run `pip install -r training/requirements.txt`"
        ) from error
    logging.getLogger("absl").addFilter(is_of_others)
    return ocp


def is_of_others(line):
    return f"{os.sep}orbax{os.sep}" not in line.pathname


def orbax(ocp, processes):
    """What writes and reads, all these processes together."""
    # As they are named here, they wait for each other at the coordinator, not in a collective, which would mix with those
    # of training where this runs in the background.
    options = ocp.options.MultiprocessingOptions(
        primary_host=min(processes), active_processes=processes
    )
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=options),
        multiprocessing_options=options,
    )


def beside(path, role):
    """A hidden name by the path's, the same in every process, and in the next run, which clears it away."""
    return path.with_name(f".{path.name}.{role}")


def find(path):
    """The folder in that place, or the one set aside for another that never came."""
    here = Path(path).absolute()
    for folder in (here, beside(here, "former")):
        if folder.exists():
            return folder
    raise UserError(f"{path}: there is no such checkpoint")


@contextmanager
def telling(path):
    """Make whatever is raised while a checkpoint is read one error that names it."""
    try:
        yield
    except UserError:
        raise
    except MemoryError as error:
        raise UserError(f"{path}: there is no memory for its arrays") from error
    except Exception as error:  # over files that someone made up, Orbax raises anything
        raise Damaged(f"{path}: cannot be read: {reason(error)}") from error


def reason(error):
    """What went wrong, in one line; of TensorStore's long ones, what the system said."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return (
        os.strerror(int(code[1]))
        if code
        else getattr(error, "strerror", None) or first_line(error) or type(error).__name__
    )


def digests(folder):
    """A line for every file in a folder but this list itself, as `sha256sum` writes them."""
    lines = []
    for file in sorted(
        file for file in folder.rglob("*") if not file.is_dir() and file != folder / SUMS
    ):
        if not file.is_file():
            raise ValueError(f"{file.name} is no plain file")  # a pipe would be waited for
        with open(file, "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        lines.append(f"{digest}  {file.relative_to(folder).as_posix()}\n".encode())
    return b"".join(lines)


def compare_digests(path, folder):
    """Refuse a folder that is not what was written, to the last bit."""
    if not (folder / SUMS).is_file():
        raise Damaged(f"{path}: is not whole: it has no {SUMS}, which is written last")
    listed, found = (folder / SUMS).read_bytes(), digests(folder)
    if listed != found:
        differing = {*listed.split(b"\n")} ^ {*found.split(b"\n")}
        wrong = sorted({line[66:].decode(errors="replace") for line in differing})
        raise Damaged(f"{path}: is damaged: changed, missing or added: {', '.join(wrong[:4])}")


def seal(folder, note):
    """Add the note and the digests, and bring all of it to the disk."""
    (folder / NOTE).write_text(note)
    (folder / SUMS).write_bytes(digests(folder))
    for entry in (folder, *folder.rglob("*")):
        to_disk(entry)


def put(folder, path):
    """Rename a folder, in place of the one that may be there."""
    former = beside(path, "former")
    if path.is_dir():
        shutil.rmtree(
            former, ignore_errors=True
        )  # of a process that was killed when it had all but done this
        os.rename(path, former)
    os.rename(folder, path)
    to_disk(path.parent)
    shutil.rmtree(former, ignore_errors=True)


def to_disk(path):
    """Make sure that a file, or the names in a folder, survive a loss of power."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
