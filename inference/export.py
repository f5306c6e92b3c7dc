"""From a checkpoint to a folder of verified files; of what fails, nothing is left behind."""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import jax

from inference.demo.page import write_demo
from inference.demo.runtime import runtime
from inference.exporter import Exporter
from inference.load import Form, answers, load
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
    about = {
        "overrides": arguments.overrides,
        "trusted": arguments.trust,
        "shape": arguments.shape,
        "batch": arguments.batch,
    }
    shipped = load(arguments.config, arguments.weights, **about, form=form)
    folder = folder or Path(arguments.out) / shipped.parts.title
    check_free(folder, arguments.force)
    with workplace(folder) as work:
        exporter = Exporter(arguments, shipped)
        reports, wrong = exporter.reports(work / folder.name)
        if reports:
            if arguments.demo and "onnx" in reports:
                wrong |= demo(work / reports["onnx"]["file"], exporter)
            describe(work, root, exporter, reports, wrong)
            replace(work, folder, arguments.force)
            print(
                table(reports),
                *accuracies(reports),
                *exporter.warnings(reports),
                f"Written: {folder}",
                sep="\n",
            )
    print(*wrong.values(), sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return {
        each: each in wrong for each in [*arguments.formats, *(["demo"] if arguments.demo else [])]
    }


def check_free(folder, force):
    """Refuse a name that is taken; what is no export is never replaced."""
    if not os.path.lexists(folder):
        return
    if not (folder / REPORT).is_file():
        raise UserError(f"{folder}: is there, and is no export; choose another --name")
    if not force:
        raise UserError(
            f"{folder}: is there already; choose another --name, or say --force to replace it"
        )


@contextmanager
def workplace(folder):
    """A hidden folder beside the one to be, which is gone in the end; so are those of processes that were killed."""
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        if not is_running(left.name.split(".")[-2]):
            shutil.rmtree(left, ignore_errors=True)
    work = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be made: {error.strerror}; choose another place with --out"
        ) from error
    try:
        yield work
    except shutil.Error as error:  # it lists every file; the first tells enough
        raise RunError(f"{folder}: cannot be written: {error.args[0][0][2]}") from error
    except OSError as error:
        raise RunError(f"{folder}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def is_running(process):
    return process.isdecimal() and Path(f"/proc/{process}").exists()


def replace(work, folder, force):
    """Put the finished folder in its place, where by now another one may be; what is no part of an earlier export stays."""
    check_free(folder, force)
    former = work.with_suffix(".former")
    if folder.exists():
        folder.rename(former)
    try:
        work.rename(folder)  # fails where another process has made it meanwhile
    except OSError as error:
        if former.exists():
            former.rename(folder)
            raise
        raise UserError(
            f"{folder}: was made by another meanwhile; choose another --name"
        ) from error
    if former.exists():
        keep_others(former, folder)
        shutil.rmtree(former, ignore_errors=True)


def keep_others(former, folder):
    """Move what lies in an earlier export and was not written by it; tell what was, and is not written again."""
    written = json.loads((former / REPORT).read_text()).get("files", [])
    left = [path for path in former.iterdir() if not (folder / path.name).exists()]
    for path in left:
        if path.name not in written:
            path.rename(folder / path.name)
    if gone := sorted(path.name for path in left if path.name in written):
        print(f"Gone with the earlier export: {', '.join(gone)}")


def demo(path, exporter):
    """A page that runs the ONNX file; or {"demo": why there is none}."""
    classes = exporter.examples and exporter.examples.classes
    try:
        write_demo(path, path.with_suffix(".html"), exporter.shipped, classes)
    except UserError as error:
        return {"demo": f"demo: {error}"}
    return {}


def describe(work, root, exporter, reports, wrong):
    """The config, a copy of model/, and what is known of the files."""
    shipped, arguments = exporter.shipped, exporter.arguments
    shutil.copytree(
        Path(root) / "model", work / "model", ignore=shutil.ignore_patterns("__pycache__")
    )
    config = {key: value for key, value in shipped.config.items() if key != "$schema"}
    (work / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    examples = exporter.examples
    told = {
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": sys.argv,
        "checkpoint": str(arguments.weights),
        "sha256": digest(Path(arguments.weights)),
        "form": shipped.form._asdict(),
        "preprocess": []
        if shipped.form.preprocess
        else shipped.config["preprocess"],  # for the caller to do
        "answers": answers(shipped.config, shipped.form),
        "classes": examples and examples.classes,
        "data": examples.source if examples else f"none: {exporter.no_examples}",
        "samples": len(exporter.samples) if exporter.samples else None,
        "versions": versions(),
        "formats": reports,
        "failed": wrong,
        "files": sorted([*(path.name for path in work.iterdir()), REPORT]),
    }
    (work / REPORT).write_text(pretty(told) + "\n")


def pretty(value):
    """JSON for people: a list of plain values stands in one line."""
    return re.sub(
        r"\[[^\[\]{}]*\]",
        lambda match: re.sub(r"\s*\n\s*", " ", match[0]),
        json.dumps(value, indent=2),
    )


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
            told = [
                f"{name} {scores['before'][name]:.4f} -> {scores['after'][name]:.4f}"
                for name in scores["before"]
            ]
            yield f"{each}, {report['precision']}, on the test set: {', '.join(told)}"
