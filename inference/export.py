"""Export a checkpoint to a folder of verified files; an export that fails leaves nothing behind.

A language model becomes two functions: the logits of a whole text, of any length, and a decode
step, which continues texts token by token with a cache as inputs and outputs.
"""

import hashlib
import importlib.metadata
import json
import re
import shutil
import sys
import time
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from inference.child import Child
from inference.demo.runtime import runtime
from inference.demo.text import page_tokenizer, write_text_page
from inference.exporter import Exporter, described, remove
from inference.folders import REPORT, prepare, replace, temporary_folder
from inference.generate import LOGITS, NEXT, POSITION, TOKEN, Decoder, steps
from inference.load import NHWC, Exportable, Form, load_to_export, no_parts
from inference.metadata import size_names
from inference.packages import first_import
from inference.progress import Progress
from inference.runtimes import Arrays, FileModel, open_model
from inference.sizes import parse_free
from inference.to_tflite import write_merged
from inference.verify import Reports, Rows, table, take, title
from model.base import Model
from model.generate import Sampling, context_of, generate
from training.checkpoint.storage import chosen_checkpoint
from utils import RunError, UserError, echo, named_leaves
from utils.files import inside, open_file
from wiring.own_modules import COPIES

PACKAGES = ("jax", "onnx", "onnxruntime", "tensorflow", "ai-edge-litert", "tf2onnx")
SIGNATURE = "decode"  # of the step within a TFLite file
WHOLE = "serving_default"  # of the logits of a whole text
LENGTH = 200  # tokens of the greedy texts that are compared
GREEDY = Sampling(temperature=0)
PROMPTS = (8, 3)  # tokens of the prompts of these texts
LARGEST = 2**28  # bytes of the caches with which a step is verified


def export(
    arguments: Namespace, root: Path, check: Callable[[], None] = lambda: None
) -> dict[str, bool]:
    """Write the folder of a checkpoint; returns {format: whether it failed}. `check` raises the
    KeyboardInterrupt of a Ctrl-C that a package has caught. TensorFlow and the runtimes work in a
    child process."""
    parse_free(arguments.free)  # fail before loading anything
    with Progress() as progress, Child(first_import(arguments.formats)) as child:
        folder = Path(arguments.out) / arguments.name if arguments.name else None
        if folder:
            prepare(folder, arguments.force)
        if arguments.demo:
            runtime()
        # The child starts while JAX computes what the files must return.
        if arguments.formats != ["stablehlo"]:
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
            is_text = getattr(exportable.parts.model, "cache", None) is not None
            if is_text:
                arguments.free = arguments.free or free_length(exportable)
                if arguments.demo:
                    page_tokenizer(exportable.tokenizer)  # raises for one that a page cannot have
            exporter = Exporter(arguments, exportable, child, check, progress)
            step = DecodeStep(exporter) if is_text else None
            reports, failures = exporter.reports(work / folder.name)
            if step:
                step.add_to(reports, failures, work / folder.name)
            if reports:
                if arguments.demo and "onnx" in reports:
                    file = work / reports["onnx"]["file"]
                    try:
                        (step or exporter).write_page(file, file.with_suffix(".html"))
                    except UserError as error:
                        failures["demo"] = f"demo: {error}"
                write_report(work, code_of(arguments.weights, root), exporter, reports, failures)
                check()
                replace(work, folder, arguments.force)
                lines = [table(reports), *accuracies(reports), *exporter.warnings(reports)]
                lines += decoding(reports)
                echo(*lines, f"Written: {folder}", sep="\n")
    echo(*failures.values(), sep="\n", end="\n" if failures else "", file=sys.stderr)
    outputs = [*arguments.formats, *(["demo"] if arguments.demo else [])]
    return {name: name in failures for name in outputs}


def code_of(checkpoint: Path, root: Path) -> Path:
    """The folder model/ with which a checkpoint was trained: the copy in its run, or else
    that of this project."""
    run = Path(checkpoint).parent
    is_run = (run / "environment.json").is_file() and (run / "model").is_dir()
    return inside(run, "model") if is_run else Path(root) / "model"


def write_report(
    work: Path, code: Path, exporter: Exporter, reports: Reports, failures: dict[str, str]
) -> None:
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


def readable_json(value: object) -> str:
    """Indented JSON in which a list of plain values is one line."""
    return re.sub(
        r"\[[^\[\]{}]*\]",
        lambda match: re.sub(r"\s*\n\s*", " ", match[0]),
        json.dumps(value, indent=2),
    )


def digest(path: Path) -> str | None:
    """The SHA-256 of a checkpoint; None for a checkpoint that is a folder."""
    if not path.is_file():
        return None
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    installed = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def decoding(reports: Reports) -> Iterator[str]:
    """The table of the decode steps of a language model, and how much of their greedy text is that
    of JAX."""
    steps = {name: report["decode"] for name, report in reports.items() if "decode" in report}
    if steps:
        yield table(steps, signatures=False)  # they name every array of the cache
    for report in steps.values():
        texts, tokens, same = (report["greedy"][key] for key in ("texts", "tokens", "same"))
        yield f"{title(report)}: {same:.1%} of {texts} x {tokens} greedy tokens are those of JAX"


def accuracies(reports: Reports) -> Iterator[str]:
    """One line per format: its metrics on the test set before and after quantization."""
    for name, report in reports.items():
        if scores := report.get("test_set"):
            before, after = scores["before"], scores["after"]
            changes = [f"{key} {before[key]:.4f} -> {after[key]:.4f}" for key in before]
            yield f"{name}, {report['precision']}, on the test set: {', '.join(changes)}"


def free_length(exportable: Exportable) -> list[str]:
    """The --free with which a decoder takes texts of any length."""
    is_text = all(len(x.shape) == 1 for x in jax.tree.leaves(exportable.inputs))
    return [f"1:length:1-{context_of(exportable.parts.model)}"] if is_text else []


class DecodeStep:
    """The second function of a decoder. `whole` is the Exporter of the first, the logits of a whole
    text."""

    def __init__(self, whole: Exporter) -> None:
        self.whole = whole
        self.context = context_of(whole.exportable.parts.model)
        self.texts = texts(whole, self.context)
        self.step = step_exporter(whole, self.texts)

    def add_to(self, reports: Reports, failures: dict[str, str], stem: Path) -> None:
        """Write the step of each format in `reports`, into which its report goes as `decode`; a
        format whose step fails goes from the `reports` to the `failures`."""
        for name in list(reports):
            path = stem.with_name(f"{stem.name}.{name}")
            try:
                reports[name] |= {"decode": self.report(name, path, reports[name])}
            except Exception as error:  # converters raise many kinds
                del reports[name]
                failures[name] = f"{name}: the decode step: {described(error)}"
                remove(path)
                remove(step_path(path))
            self.whole.check()

    def write_page(self, path: Path, page: Path) -> None:
        """Write a web page that generates text with the decode step beside the ONNX file `path`."""
        tokenizer = page_tokenizer(self.whole.exportable.tokenizer)
        write_text_page(step_path(path), page, path.stem, self.context, tokenizer)

    def report(self, format: str, file: Path, whole: dict[str, Any]) -> dict[str, Any]:
        """The report of the step, which is written beside the `file` of the report `whole`."""
        path = step_path(file)
        report = self.step.report(format, path)
        signature = None
        if format == "tflite":
            self.merge(file, path)
            path, signature = file, SIGNATURE
            both = {"file": path.name, "bytes": path.stat().st_size}
            whole |= both
            report |= both | {"signature": signature}
        report["context"] = self.context
        report["greedy"] = self.greedy(open_model(path, signature), report)
        return report

    def merge(self, path: Path, step: Path) -> None:
        """Make one TFLite file of two, which shares their weights."""
        work = path.with_name(f"merged {path.name}")
        files = {WHOLE: path, SIGNATURE: step}
        sizes = size_names(self.whole.traced) | size_names(self.step.traced)
        exporters = {WHOLE: self.whole, SIGNATURE: self.step}
        inputs = {
            name: take(next(iter(each.cases.values()))[0], 0, each.batches[0])
            for name, each in exporters.items()
        }
        facts = self.whole.facts(path.stem) | {"sizes": sizes}
        write_merged(work, files, inputs, facts, partial(self.whole.call, "tflite"))
        work.replace(path)
        step.unlink()

    def greedy(self, model: FileModel, report: dict[str, Any]) -> dict[str, Any]:
        """The share of greedy tokens on which the file and JAX agree, where both read the greedy
        text of JAX. In float32 they agree on all tokens, or the logits of the two tokens are equal
        within the tolerance."""
        rows = self.whole.arguments.batch or len(PROMPTS)
        sizes = [min(PROMPTS[i % len(PROMPTS)], self.context) for i in range(rows)]
        prompts = [self.texts[i % len(self.texts)][:size] for i, size in enumerate(sizes)]
        model_in_jax, weights = self.whole.exportable.parts.model, self.whole.exportable.weights
        options = {"state": weights["state"]}
        with jax.default_device(jax.devices("cpu")[0]):
            texts = generate(model_in_jax, weights["params"], prompts, LENGTH, GREEDY, **options)
        expected, same, behind = iter(np.stack(texts, 1)), [], []

        def follow(logits: np.ndarray) -> np.ndarray:
            want, got = next(expected), logits.argmax(-1)
            same.append(got == want)
            lead = logits[np.arange(rows), got] - logits[np.arange(rows), want]
            behind.append(lead.max() / np.abs(logits).max())
            return want

        decoder = Decoder(model, model.inputs, self.context)
        for _ in steps(decoder, prompts, LENGTH, follow):
            pass
        if report["precision"] == self.step.traced.precision and max(behind) > report["tolerance"]:
            raise RunError(
                f"{report['file']}: writes another text than JAX: token {np.argmax(behind)} of a "
                f"greedy text is another one, whose logit is larger by {max(behind):.2g} of their "
                "scale; --tolerance sets another limit"
            )
        return {"tokens": LENGTH, "texts": rows, "same": round(float(np.mean(same)), 4)}


def step_path(path: Path) -> Path:
    """The file of the decode step beside the file of the logits."""
    return path.with_name(f"{path.stem}_{SIGNATURE}{path.suffix}")


def step_function(
    model: Model,
    structure: Any,
    names: Sequence[str],
    weights: dict[str, PyTree],
    inputs: dict[str, jax.Array],
) -> OrderedDict[str, jax.Array]:
    """The logits of the next token, and the cache, of one more token of each text."""
    cache = jax.tree.unflatten(structure, [inputs[name] for name in names])
    state = weights["state"] | {"cache": cache}
    token = inputs[TOKEN][:, None]
    logits, state = model.apply(weights["params"], state, token, train=False, key=None)
    new = named_leaves(state["cache"])
    return OrderedDict({LOGITS: logits[:, 0]} | {NEXT + name: new[name] for name in new})


def step_exporter(whole: Exporter, texts: np.ndarray) -> Exporter:
    """The exporter of the step."""
    exportable, model = whole.exportable, whole.exportable.parts.model
    cache = jax.eval_shape(lambda: model.cache(1)["cache"])
    names = list(named_leaves(cache))
    inputs = filled_caches(model, exportable.weights, texts)
    one = OrderedDict(
        (name, jax.ShapeDtypeStruct(array.shape[1:], array.dtype)) for name, array in inputs.items()
    )
    parts = no_parts({"title": exportable.config.get("title")})
    function = partial(step_function, model, jax.tree.structure(cache), names)
    step = Exportable(function, exportable.weights, one, (), NHWC, parts, "", exportable.record)
    batches = whole.arguments.batches or [size for size in (1, 3, len(texts)) if size <= len(texts)]
    names = {"free": [], "inputs": None, "input_names": [], "output_names": []}
    batches = None if whole.arguments.batch else list(dict.fromkeys(batches))
    arguments = Namespace(**vars(whole.arguments) | names | {"batches": batches})
    examples = Rows(inputs, whole.arguments.batch)
    return Exporter(arguments, step, whole.child, whole.check, whole.progress, examples)


def filled_caches(model: Model, weights: dict[str, PyTree], texts: np.ndarray) -> Arrays:
    """{input: array} of a step that follows beginnings of texts, from short to whole ones."""
    rows, context = texts.shape
    empty_cache = model.cache
    assert empty_cache is not None  # it is a decoder

    @jax.jit
    def read(weights: dict[str, PyTree]) -> PyTree:
        state = weights["state"] | empty_cache(rows)
        return model.apply(weights["params"], state, texts, train=False, key=None)[1]["cache"]

    with jax.default_device(jax.devices("cpu")[0]):
        cache = named_leaves(jax.tree.map(np.asarray, read(weights)))
    position = np.linspace(context - 1, 0, rows).astype(np.int32)
    cache = {POSITION: position} | {name: x for name, x in cache.items() if name != POSITION}
    return {TOKEN: texts[np.arange(rows), position]} | cache


def texts(whole: Exporter, context: int) -> np.ndarray:
    """Rows of tokens that fill the context: those of the data, or random ones."""
    model = whole.exportable.parts.model
    leaves = jax.tree.leaves(jax.eval_shape(lambda: model.cache(1)))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    rows = min(64, max(3, LARGEST // size))
    kind = "real" if "real" in whole.cases else next(iter(whole.cases))
    inputs = whole.cases[kind][0]
    tokens = inputs["tokens"] if "tokens" in inputs else next(iter(inputs.values()))
    tokens = np.asarray(tokens, np.int32).reshape(-1)
    # Each row begins elsewhere in the text.
    starts = np.arange(rows)[:, None] * max(1, len(tokens) // rows)
    return np.take(tokens, starts + np.arange(context), mode="wrap")
