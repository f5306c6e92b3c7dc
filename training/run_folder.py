"""A run on disk: its folder, with the config as resolved, a copy of model/, and the environment that it ran in."""

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from data_loader.loader import fingerprint
from utils import RunError, atomic_write

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
        raise RunError(f"{parent}: cannot be made: {error.strerror}; choose a folder with checkpoint.dir") from error
    raise RunError(f"{parent / stamp}: a thousand runs started in this second")


def describe(folder, config, facts, datasets, root):
    """Write what tells this run from others: config.json, model/ and environment.json."""
    schema = os.path.relpath(Path(root) / "config.schema.json", folder)
    write_json(folder / "config.json", config | {"$schema": schema})
    write_json(folder / "environment.json", environment(facts, datasets, root))
    try:
        shutil.copytree(Path(root) / "model", folder / "model", ignore=shutil.ignore_patterns("__pycache__"))
    except shutil.Error as error:  # it lists every file; the first tells enough
        raise RunError(f"{folder / 'model'}: cannot be written: {error.args[0][0][2]}") from error
    except OSError as error:
        raise RunError(f"{folder / 'model'}: cannot be written: {error.strerror}") from error


def write_json(path, value):
    """A JSON file for people to read."""
    atomic_write(path, (json.dumps(value, indent=2) + "\n").encode())


def environment(facts, datasets, root):
    """Versions, devices, git commit and data."""
    import jax

    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "devices": [f"{d.platform}: {d.device_kind}" for d in jax.devices()],
        "cores": os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "git_commit": git_commit(root),
        "facts": facts,
        "data": {name: describe_data(dataset) for name, dataset in datasets.items()},
    }


def describe_data(dataset):
    """Where a dataset came from, and what tells it from another."""
    return {"source": source(dataset), "examples": len(dataset), "fingerprint": fingerprint(dataset)}


def source(dataset):
    """Where a dataset came from, if it says so."""
    return getattr(dataset, "source", type(dataset).__name__)


def git_commit(root):
    """The commit of the checkout, marked where it is not clean; None outside one."""
    try:
        run = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(run, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
