"""A run on disk: its folder, with the config as resolved, a copy of model/, and the environment that it ran in."""

import datetime
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from data_loader.loader import fingerprint
from training.watching.metric_log import sayable
from utils import RunError, UserError, atomic_write

logger = logging.getLogger("main")

FINISHED = "finished.json"  # left by a run that came to its end
PACKAGES = ("jax", "jaxlib", "numpy", "safetensors")


def new_folder(base, title):
    """saved/<title>/<date_time>, a new one even when two runs start in the same second."""
    stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    parent = Path(base) / title
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for name in [stamp, *(f"{stamp}_{i}" for i in range(2, 1000))]:
            try:
                (parent / name).mkdir()
                return parent / name
            except FileExistsError:
                continue
    except OSError as error:
        raise RunError(
            f"{parent}: cannot be made: {error.strerror}; choose a folder with checkpoint.dir"
        ) from error
    raise RunError(f"{parent / stamp}: a thousand runs started in this second")


def record(config, facts, datasets):
    """What every checkpoint of a run tells of it, as plain JSON."""
    found = {name: fingerprint(dataset) for name, dataset in datasets.items()}
    return json.loads(json.dumps({"config": config, "facts": facts, "data": found}, default=str))


def describe(folder, record, datasets, root):
    """Write what tells this run from others: config.json, model/ and environment.json."""
    try:
        shutil.copytree(
            Path(root) / "model", folder / "model", ignore=shutil.ignore_patterns("__pycache__")
        )
    except shutil.Error as error:  # it lists every file; the first tells enough
        why = re.sub(r"^\[Errno \d+\] |: '.*", "", str(error.args[0][0][2]))
        raise RunError(f"{folder / 'model'}: cannot be written: {why}") from error
    except OSError as error:
        raise RunError(f"{folder / 'model'}: cannot be written: {error.strerror}") from error
    data = {
        name: {"source": source(d), "examples": len(d), "fingerprint": record["data"][name]}
        for name, d in datasets.items()
    }
    told = {"command": sys.argv, **environment(root), "facts": record["facts"], "data": data}
    write_json(folder / "environment.json", told)
    update(folder, record, root)


def update(folder, record, root):
    """Write the config that the run goes by; it has no end any more, if it had one."""
    schema = os.path.relpath(Path(root) / "config.schema.json", folder)
    (folder / FINISHED).unlink(missing_ok=True)
    write_json(folder / "config.json", record["config"] | {"$schema": schema})


def finish(folder, run, peak):
    """Mark a run as one that came to its end, so that nobody goes on with it unasked; `peak` is the memory that it needed."""
    told = {
        "epochs": run.completed,
        "steps": run.step,
        "metrics": sayable(run.metrics),
        "peak_memory": peak,
    }
    write_json(folder / FINISHED, told)


def changes_of_environment(folder, root):
    """What is not as it was when the run began, a line each: the same bits are promised for the same machine and versions."""
    try:
        before = flat(json.loads((folder / "environment.json").read_text()))
    except (OSError, ValueError, RecursionError):
        return [
            f"{folder / 'environment.json'}: cannot be read, so what changed since is not known"
        ]
    now = flat(json.loads(json.dumps(environment(root))))
    changed = [key for key, value in now.items() if before.get(key) != value]
    return [
        f"The {key} was {before.get(key, 'another')!r}, is now {now[key]!r}: the bits may differ"
        for key in changed
    ]


def flat(value, path=""):
    """{path.to.key: value} of nested objects and lists."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    if not items:
        return {path: value}
    return {
        k: v for key, inner in items for k, v in flat(inner, f"{path}.{key}".lstrip(".")).items()
    }


def cut_back(folder, lengths, names):
    """Cut logs back to the bytes that they had when a checkpoint was taken; one that it does not know was not there yet."""
    for path in [Path(folder) / name for name in names]:
        if path.is_symlink():
            raise UserError(
                f"{path}: is a link to another file, which is not cut back with the run; remove it"
            )
        there, length = path.stat().st_size if path.exists() else 0, lengths.get(path.name, 0)
        if there < length:
            logger.warning(
                "%s: is shorter than when the checkpoint was taken: lines are missing", path
            )
        elif there > length:
            try:
                os.truncate(path, length)
            except OSError as error:
                raise RunError(
                    f"{path}: cannot be cut back to the checkpoint: {error.strerror}"
                ) from error


def write_json(path, value):
    """A JSON file for people to read."""
    atomic_write(path, (json.dumps(value, indent=2) + "\n").encode())


def environment(root):
    """Versions, devices and git commit: what the bits of a run depend on besides its config and data."""
    import jax

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "devices": [f"{d.platform}: {d.device_kind}" for d in jax.devices()],
        "cores": os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "git_commit": git_commit(root),
    }


def source(dataset):
    """Where a dataset came from, if it says so."""
    return getattr(dataset, "source", type(dataset).__name__)


def git_commit(root):
    """The commit of the checkout, marked where it is not clean; None outside one."""
    try:
        run = [
            "git",
            "-C",
            str(root),
            "describe",
            "--always",
            "--dirty",
            "--abbrev=40",
            "--exclude=*",
        ]
        return subprocess.run(
            run, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
