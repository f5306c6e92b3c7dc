"""A run on disk: its folder, with the resolved config, a copy of model/, and the environment it ran
in."""

import datetime
import filecmp
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_loader.base import fingerprints_of, has_items, length
from training.run import Run
from training.watching.metric_log import json_safe
from utils import PACKAGE, RunError, UserError, quoted, relative_path
from utils.files import atomic_write, fresh_folder, locked, parse_json, read_file

USER_MODULES = "user_modules"  # where wiring/own_modules.py looks for them
# What is written before config.json, with which a run has begun.
BEFORE_A_RUN = ("model", USER_MODULES, "train.log", "environment.json", "tokenizer.json")
FINISHED = "finished.json"  # left by a run that ended by itself, and not by a signal
TOKENIZER = "tokenizer.json"
PACKAGES = ("jax", "jaxlib", "numpy", "safetensors", *([PACKAGE[:-1]] if PACKAGE else []))


def new_folder(base: str | Path, title: str, run_name: str | None = None) -> Path:
    """saved/<title>/<run_name>, which must not exist; without a name saved/<title>/<date_time>, a
    new one even when two runs start in the same second."""
    stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    parent = Path(base) / title
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if run_name:
            return named_folder(parent / run_name)
        n, folder = 1, parent / stamp
        while True:
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
            n += 1
            folder = parent / f"{stamp}_{n}"
    except OSError as error:
        raise RunError(
            f"{parent}: cannot be made: {error.strerror}; choose a folder with checkpoint.dir"
        ) from error


def named_folder(folder: Path) -> Path:
    """A folder with a chosen name. It may exist if a process was killed there before its run
    began."""
    try:
        folder.mkdir()
    except FileExistsError:
        left = lambda name: name in BEFORE_A_RUN or name.endswith(".tmp")  # noqa: E731
        if not folder.is_dir() or not all(left(path.name) for path in folder.iterdir()):
            fix = f"choose another name, or continue that run with --resume {quoted(folder)}"
            if folder.is_dir() and is_locked(folder):
                fix = "another process is training this run; wait for it, or stop it first"
            raise UserError(f"run_name: {folder} exists already; {fix}") from None
    return folder


def is_locked(folder: Path) -> bool:
    """Whether a process trains in this folder."""
    try:
        os.close(locked(folder, shared=True))
    except BlockingIOError:
        return True
    return False


def record(
    config: dict[str, Any],
    facts: dict[str, Any],
    datasets: Mapping[str, Any],
    fingerprints: Iterable[tuple[str, str]] = (),
    classes: Sequence[str] | None = None,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """The part of a checkpoint's record that describes the run, as plain JSON; `fingerprints` are
    those of the objective, `classes` are the names of the classes, `tokenizer` is the text of its
    file."""
    content = {
        "config": config,
        "facts": facts,
        "data": fingerprints_of(datasets),
        "classes": classes,
        "objective": dict(fingerprints),
        "tokenizer": tokenizer,
    }
    return json.loads(json.dumps(content, default=plain))


def plain(value: Any) -> Any:
    """A NumPy number or array as JSON has it; anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def describe(
    folder: Path,
    record: dict[str, Any],
    datasets: Mapping[str, Any],
    root: Path,
    own_files: dict[Path, Path],
) -> None:
    """Write what distinguishes this run from others: its code, environment.json, and what `update`
    writes."""
    data = {
        name: {"source": source(d), "fingerprint": record["data"].get(name)}
        | ({"examples": len(d)} if has_items(d) else {"batches": length(d)})
        for name, d in datasets.items()
    }
    facts = {"command": sys.argv, **environment(root), "facts": record["facts"], "data": data}
    write_json(folder / "environment.json", facts)
    update(folder, record, root, own_files)


def copy_code(folder: Path, root: Path, own_files: dict[Path, Path]) -> None:
    """Write model/, and in user_modules/ a copy of the user's own files, {path below its folder:
    file}. Evaluations and exports import the copies."""
    ignored = shutil.ignore_patterns("__pycache__")
    target = folder / "model"
    try:
        with fresh_folder(target) as fresh:
            shutil.copytree(Path(root) / "model", fresh, ignore=ignored, dirs_exist_ok=True)
        for path in changed_code(folder, own_files):  # others may be the copies themselves
            target = folder / USER_MODULES / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(own_files[path], target)
    except OSError as error:
        # An error of copytree lists every file; the first one is enough.
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise RunError(f"{target}: cannot be written: {why}") from error


def changed_code(folder: Path, own_files: dict[Path, Path]) -> list[Path]:
    """The user's own files that have another copy in the run's folder, or none."""
    copies = {path: folder / USER_MODULES / path for path in own_files}
    return [
        path
        for path, file in own_files.items()
        if not (copies[path].is_file() and filecmp.cmp(file, copies[path], shallow=False))
    ]


def update(folder: Path, record: dict[str, Any], root: Path, own_files: dict[Path, Path]) -> None:
    """Write the code, the config and the tokenizer that the run uses from now on, and remove the
    mark of a finished run. A model that computes something else was refused before."""
    copy_code(folder, root, own_files)
    if record["tokenizer"]:
        atomic_write(folder / TOKENIZER, record["tokenizer"].encode())
    schema = relative_path(Path(root) / "config.schema.json", folder)
    (folder / FINISHED).unlink(missing_ok=True)
    write_json(folder / "config.json", record["config"] | {"$schema": schema})


def finish(folder: Path, run: Run, peak: dict[str, int]) -> None:
    """Mark a run as finished, so that `--resume auto` skips it; `peak` is its peak memory."""
    metrics = json_safe(run.metrics)
    keys = ("name", "epoch", "step", "monitor", "value")
    best = run.best and {key: getattr(run.best, key) for key in keys}
    content = {"epochs": run.completed, "steps": run.step, "metrics": metrics}
    content |= {"weights_from": run.weights_from, "best": best, "peak_memory": peak}
    write_json(folder / FINISHED, content)


def changes_of_environment(folder: Path, root: Path) -> list[str]:
    """What has changed since the run began, one line each. Only the same machine and versions give
    the same bits."""
    path = folder / "environment.json"
    try:
        before = flat(parse_json(read_file(path)))
    except (OSError, ValueError):
        return [f"{path}: cannot be read, so what has changed since is unknown"]
    now = flat(json.loads(json.dumps(environment(root))))
    return [
        f"The {key} was {before.get(key, 'another')!r}, is now {value!r}: the bits may differ"
        for key, value in now.items()
        if before.get(key) != value
    ]


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """{path.to.key: value} of nested objects and lists."""
    items = {}
    if isinstance(value, dict):
        items = value
    elif isinstance(value, list):
        items = dict(enumerate(value))
    if not items:
        return {path: value}
    return {
        key_path: leaf
        for key, inner in items.items()
        for key_path, leaf in flat(inner, f"{path}.{key}".lstrip(".")).items()
    }


def write_json(path: Path, value: Any) -> None:
    """A JSON file for people to read."""
    atomic_write(path, (json.dumps(value, indent=2) + "\n").encode())


def environment(root: Path) -> dict[str, Any]:
    """Versions, devices and git commit: what the bits of a run depend on besides config and
    data."""
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


def source(dataset: Any) -> str:
    """Where a dataset came from, if it has a `source`."""
    return getattr(dataset, "source", type(dataset).__name__)


def git_commit(root: Path) -> str | None:
    """The commit of Rawtree's own checkout, marked if it is not clean; elsewhere that of the user's
    project, without a mark; None outside a checkout."""
    own = not PACKAGE and (Path(root) / ".git").exists()
    # In a stranger's folder, to look for changes would run programs that its configuration names.
    words = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    command = ["git", "-C", Path.cwd() if PACKAGE else root]
    command += words if own else ["rev-parse", "HEAD"]
    settings = {"capture_output": True, "encoding": "utf-8", "timeout": 10, "check": True}
    try:
        return subprocess.run(command, **settings).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
