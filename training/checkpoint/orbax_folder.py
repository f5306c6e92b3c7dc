"""A checkpoint as a folder, written by Orbax: with several processes each writes the shards that it holds.

checkpoint-epoch_3.orbax/
    arrays/       Orbax's own; without the arrays of size zero, which it refuses
    rawtree.json  the record, and the dtype and shape of every array
    SHA256SUMS    the digest of every other file, written last; `sha256sum -c SHA256SUMS` checks it by hand

It is built beside its place, as `.<name>.tmp`, and renamed when it is whole and on the disk. One that is to be replaced
waits as `.<name>.former` meanwhile; a reader that finds nothing in the place takes that one. Nothing is unpickled.
"""

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

import jax
import numpy as np

from utils import Damaged, RunError, UserError, first_line

ARRAYS, NOTE, SUMS = "arrays", "rawtree.json", "SHA256SUMS"
PATIENCE = 30 * 60  # seconds that a process waits for the others, one of which digests what all have written


def write(path, arrays, record):
    """Write {name: array} and a record; every process has to call this, and it returns when the folder is in its place."""
    ocp, path = import_orbax(), Path(path).absolute()
    arrays = {name: a if isinstance(a, jax.Array) else np.asarray(a) for name, a in arrays.items()}
    note = json.dumps({"record": record, "arrays": {name: [str(a.dtype), a.shape] for name, a in arrays.items()}})
    building, leads = beside(path, "tmp"), jax.process_index() == 0
    try:
        if leads:
            shutil.rmtree(building, ignore_errors=True)  # left by a run that was killed
            building.mkdir()
        wait_for_all(ocp, f"{building}: begun")
        save_arrays(ocp, building / ARRAYS, {name: a for name, a in arrays.items() if a.size})
        if leads:
            seal(building, note)
            put(building, path)
        wait_for_all(ocp, f"{path}: in its place")
    except (OSError, ValueError, RuntimeError) as error:  # TensorStore says "disk full" by ValueError, JAX "peer lost" by the last
        reason = getattr(error, "strerror", None) or first_line(error)
        raise RunError(f"{path}: cannot be written: {reason}") from error
    finally:
        if leads:
            shutil.rmtree(building, ignore_errors=True)


def read(path):
    """({name: NumPy array}, record), after the digest of every file has been compared."""
    ocp, folder = import_orbax(), find(path)
    try:
        check_digests(path, folder)
        note = read_note(path, folder)
        arrays = {name: np.empty(shape, dtype) for name, (dtype, shape) in note["arrays"].items() if 0 in shape}
        arrays |= restore_arrays(ocp, folder / ARRAYS, note["arrays"].keys() - arrays.keys())
        return {name: arrays[name] for name in note["arrays"]}, note["record"]
    except UserError:
        raise
    except Exception as error:  # Orbax and TensorStore raise whatever they like over metadata that someone made up
        raise Damaged(f"{path}: cannot be read: {type(error).__name__}: {first_line(error)}") from error


def read_record(path):
    """The record alone; of the arrays nothing is looked at."""
    return read_note(path, find(path))["record"]


def import_orbax():
    """Orbax, which is told to speak only of errors."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise UserError("checkpoints in Orbax's format: run `pip install -r training/requirements.txt`") from error
    logging.getLogger("absl").setLevel(logging.ERROR)
    return ocp


def beside(path, role):
    """A hidden sibling; its name is the same in all processes, and in the next run, which clears it away."""
    return path.with_name(f".{path.name}.{role}")


def find(path):
    """The folder to read for a path: the path, or what was set aside for a successor that never came."""
    for folder in (Path(path).absolute(), beside(Path(path).absolute(), "former")):
        if folder.is_dir():
            return folder
    raise UserError(f"{path}: there is no such checkpoint")


def wait_for_all(ocp, stage):
    """Go on when every process has come to this stage."""
    # Naming the processes makes it wait through the coordinator, not by a collective that would mix with training's own.
    ocp.multihost.sync_global_processes(stage, processes=set(range(jax.process_count())), timeout=PATIENCE)


def checkpointer(ocp, processes):
    """Orbax's synchronous writer and reader, used by these processes together."""
    options = ocp.options.MultiprocessingOptions(primary_host=min(processes), active_processes=processes)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def save_arrays(ocp, folder, arrays):
    if arrays:  # Orbax refuses to write nothing
        with checkpointer(ocp, set(range(jax.process_count()))) as writer:
            writer.save(folder, args=ocp.args.PyTreeSave(arrays))


def restore_arrays(ocp, folder, names):
    """{name: NumPy array} of a folder that has exactly these, read by this process alone."""
    if not names:
        return {}
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    with checkpointer(ocp, {jax.process_index()}) as reader:
        return reader.restore(folder, args=ocp.args.PyTreeRestore(item=dict.fromkeys(names, 0), restore_args=as_numpy))


def digests(folder):
    """{file: SHA-256} of all that lies in a folder, but for the list of them."""
    found = {}
    for file in folder.rglob("*"):
        if file.is_symlink() or not (file.is_dir() or file.is_file()):
            found[str(file.relative_to(folder))] = "not a plain file"
        elif file.is_file() and file != folder / SUMS:
            with open(file, "rb") as opened:
                found[str(file.relative_to(folder))] = hashlib.file_digest(opened, "sha256").hexdigest()
    return found
