"""Export a checkpoint to a folder of verified files; an export that fails leaves nothing behind."""

import hashlib
import importlib.metadata
import json
import re
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import jax

from inference.child import Child
from inference.demo.runtime import runtime
from inference.exporter import Exporter
from inference.folders import REPORT, prepare, replace, temporary_folder
from inference.language import DecodeStep, is_decoder, text_options
from inference.load import Form, load_to_export
from inference.packages import first_import
from inference.progress import Progress
from inference.sizes import parse_free
from inference.verify import table, title
from training.checkpoint.storage import chosen_checkpoint
from utils import UserError, echo
from utils.files import inside, open_file
from wiring.own_modules import COPIES

PACKAGES = ("jax", "onnx", "onnxruntime", "tensorflow", "ai-edge-litert", "tf2onnx")


def export(arguments, root, check=lambda: None):
    """Write the folder of a checkpoint; returns {format: whether it failed}. `check` raises the
    KeyboardInterrupt of a Ctrl-C that a package has caught."""
    with Progress() as progress, Child(first_import(arguments.formats)) as child:
        return export_with(child, check, progress, arguments, root)


def export_with(child, check, progress, arguments, root):
    """`export`, with the process in which TensorFlow and the runtimes work."""
    parse_free(arguments.free)  # fail before loading anything
    folder = Path(arguments.out) / arguments.name if arguments.name else None
    if folder:
        prepare(folder, arguments.force)
    if arguments.demo:
        runtime()
    if arguments.formats != ["stablehlo"]:  # it starts while JAX computes what files must return
        child.start()
    arguments.weights = chosen_checkpoint(arguments.weights, arguments.best)
    jax.config.update("jax_platforms", "cpu")  # JAX only computes the reference, on the CPU
    exportable = load_to_export(
        arguments.config,
        arguments.weights,
        overrides=arguments.overrides,
        trusted=arguments.trust,
        shape=arguments.shape,
        batch=arguments.batch,
        form=Form(arguments.input_layout, arguments.with_preprocess, arguments.with_softmax),
    )
    folder = folder or Path(arguments.out) / exportable.parts.title
    prepare(folder, arguments.force)
    with temporary_folder(folder) as work:
        is_text = is_decoder(exportable)
        if is_text:
            arguments.free, tokenizer = text_options(arguments, exportable)
        exporter = Exporter(arguments, exportable, child, check, progress)
        step = DecodeStep(exporter, tokenizer) if is_text else None
        reports, failures = exporter.reports(work / folder.name)
        if step:
            step.add_to(reports, failures, work / folder.name)
        if reports:
            if arguments.demo and "onnx" in reports:
                failures |= demo(work / reports["onnx"]["file"], step or exporter)
            describe(work, code_of(arguments.weights, root), exporter, reports, failures)
            check()
            replace(work, folder, arguments.force)
            lines = [table(reports), *accuracies(reports), *exporter.warnings(reports)]
            lines += decoding(reports)
            echo(*lines, f"Written: {folder}", sep="\n")
    echo(*failures.values(), sep="\n", end="\n" if failures else "", file=sys.stderr)
    outputs = [*arguments.formats, *(["demo"] if arguments.demo else [])]
    return {name: name in failures for name in outputs}


def demo(path, writer):
    """Write a page that runs the ONNX file; returns {} or {"demo": why there is none}."""
    try:
        writer.write_page(path, path.with_suffix(".html"))
    except UserError as error:
        return {"demo": f"demo: {error}"}
    return {}


def code_of(checkpoint, root):
    """The folder model/ with which a checkpoint was trained: the copy in its run, or else
    that of this project."""
    run = Path(checkpoint).parent
    is_run = (run / "environment.json").is_file() and (run / "model").is_dir()
    return inside(run, "model") if is_run else Path(root) / "model"


def describe(work, code, exporter, reports, failures):
    """Write the config, a copy of the folder `code` and the report about the files."""
    exportable, arguments, examples = exporter.exportable, exporter.arguments, exporter.examples
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(code, work / "model", ignore=ignored, symlinks=True)  # not what links lead to
    for path, file in exportable.parts.own_files().items():
        (work / COPIES / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, work / COPIES / path)
    if tokenizer := exportable.record.get("tokenizer"):
        (work / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    config = {key: value for key, value in exportable.config.items() if key != "$schema"}
    (work / "config.json").write_text(
        json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8"
    )
    report = {
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": sys.argv,
        "checkpoint": str(arguments.weights),
        "sha256": digest(Path(arguments.weights)),
        "model": str(code),
        "form": exportable.form._asdict(),
        # The preprocessing that the caller must do.
        "preprocess": [] if exportable.form.preprocess else exportable.config["preprocess"],
        "output_kind": exportable.output_kind,
        "classes": exportable.classes,
        "table": exportable.table,
        "vocab_size": exportable.parts.facts.get("vocab_size"),
        "data": examples.source if examples else f"none: {exporter.no_examples}",
        "samples": len(exporter.samples) if exporter.samples else None,
        "versions": versions(),
        "formats": reports,
        "failed": failures,
        "files": sorted([*(path.name for path in work.iterdir()), REPORT]),
    }
    (work / REPORT).write_text(readable_json(report) + "\n", encoding="utf-8")


def readable_json(value):
    """Indented JSON in which a list of plain values is one line."""
    return re.sub(
        r"\[[^\[\]{}]*\]",
        lambda match: re.sub(r"\s*\n\s*", " ", match[0]),
        json.dumps(value, indent=2),
    )


def digest(path):
    """The SHA-256 of a checkpoint; None for a checkpoint that is a folder."""
    if not path.is_file():
        return None
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions():
    """The versions of the packages that are installed."""
    installed = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def decoding(reports):
    """The table of the decode steps of a language model, and how much of their greedy text is that
    of JAX."""
    steps = {name: report["decode"] for name, report in reports.items() if "decode" in report}
    if steps:
        yield table(steps, signatures=False)  # they name every array of the cache
    for report in steps.values():
        texts, tokens, same = (report["greedy"][key] for key in ("texts", "tokens", "same"))
        yield f"{title(report)}: {same:.1%} of {texts} x {tokens} greedy tokens are those of JAX"


def accuracies(reports):
    """One line per format: its metrics on the test set before and after quantization."""
    for name, report in reports.items():
        if scores := report.get("test_set"):
            before, after = scores["before"], scores["after"]
            changes = [f"{key} {before[key]:.4f} -> {after[key]:.4f}" for key in before]
            yield f"{name}, {report['precision']}, on the test set: {', '.join(changes)}"
