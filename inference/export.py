"""From a checkpoint to a folder of verified files; of what fails, nothing is left behind."""

import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import jax

from inference.demo.page import write_demo
from inference.demo.runtime import runtime
from inference.exporter import Exporter
from inference.load import Form, load
from inference.verify import table
from utils import RunError, UserError

REPORT = "verification.json"
PACKAGES = ("jax", "onnx", "onnxruntime", "tensorflow", "ai-edge-litert", "tf2onnx")


def export(arguments, root):
    """Write the folder of a checkpoint; the answer is {format: whether it failed}."""
    folder = Path(arguments.out) / arguments.name if arguments.name else None
    if folder:  # the sooner it is refused, the better
        check_free(folder, arguments.force)
    if arguments.demo:
        runtime()
    jax.config.update("jax_platforms", "cpu")  # the reference is computed there, and nothing else
    form = Form(arguments.input_layout, arguments.with_preprocess, arguments.with_softmax)
    about = {"overrides": arguments.overrides, "trusted": arguments.trust, "shape": arguments.shape, "form": form}
    shipped = load(arguments.config, arguments.weights, **about)
    if folder is None:
        folder = Path(arguments.out) / shipped.config.get("title", "model")
        check_free(folder, arguments.force)
    with workplace(folder) as work:
        reports, wrong = Exporter(arguments, shipped).reports(work / folder.name)
        if reports:
            describe(work, root, arguments, shipped, reports, wrong)
            if arguments.demo and "onnx" in reports:
                path = work / reports["onnx"]["file"]
                write_demo(path, path.with_suffix(".html"), shipped)
            replace(work, folder)
            print(table(reports), *accuracies(reports), f"Written: {folder}", sep="\n")
    print(*wrong.values(), sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return {each: each in wrong for each in arguments.formats}


def check_free(folder, force):
    """Refuse a name that is taken; what is no export is never replaced."""
    if not folder.exists():
        return
    if not (folder / REPORT).is_file():
        raise UserError(f"{folder}: is there, and is no export; choose another --name")
    if not force:
        raise UserError(f"{folder}: is there already; choose another --name, or say --force to replace it")


@contextmanager
def workplace(folder):
    """A hidden folder beside the one to be, which is gone in the end."""
    work = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror}; choose another place with --out") from error
    try:
        yield work
    except OSError as error:
        raise RunError(f"{folder}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def replace(work, folder):
    """Put the finished folder in its place."""
    former = work.with_suffix(".former")
    if folder.exists():
        folder.rename(former)
    try:
        work.rename(folder)
    except OSError:
        with suppress(OSError):
            former.rename(folder)
        raise
    shutil.rmtree(former, ignore_errors=True)


def describe(work, root, arguments, shipped, reports, wrong):
    """The config, a copy of model/, and what is known of the files."""
    shutil.copytree(Path(root) / "model", work / "model", ignore=shutil.ignore_patterns("__pycache__"))
    config = shipped.config | {"$schema": "../../config.schema.json"}
    (work / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    told = {
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": sys.argv,
        "checkpoint": str(arguments.weights),
        "sha256": digest(Path(arguments.weights)),
        "form": shipped.form._asdict(),
        "versions": versions(),
        "formats": reports,
        "failed": wrong,
    }
    (work / REPORT).write_text(json.dumps(told, indent=2) + "\n")


def digest(path):
    """The SHA-256 of a checkpoint; None for one that is a folder."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def versions():
    """Of the packages that are there."""
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def accuracies(reports):
    """A line for each format: its metrics on the test set before quantization, and after."""
    for each, report in reports.items():
        if scores := report.get("test_set"):
            told = [f"{name} {scores['before'][name]:.4f} -> {scores['after'][name]:.4f}" for name in scores["before"]]
            yield f"{each}, {report['precision']}, on the test set: {', '.join(told)}"
