"""Exported files of the sample against those that other frameworks make of it.

Compares nodes, bytes and latency on one thread, side by side; measures what quantizing costs, and
how long an export takes.

python -m benchmarks.export [--checkpoint FILE] [--rounds 25]
without a checkpoint the sample is trained for an epoch first
needs inference/requirements.txt and benchmarks/requirements.txt
"""

import json
import statistics
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path

import numpy as np

from benchmarks.exporters import example_and_output
from benchmarks.harness import ROOT, Run, WorkerError, in_process, print_progress, seconds
from benchmarks.latency import BATCHES, compare
from benchmarks.results import (
    arguments,
    markdown,
    ratios,
    record,
    short,
    spread,
    target_cells,
    versions,
)
from inference.runtimes import open_model
from utils import first_line

# {format: {its name in the tables: (function of exporters.py, its arguments)}}; the first is ours,
# and latencies are given relative to the second.
MAKERS = {
    "onnx": {
        "ours": ("native_onnx",),
        "PyTorch's exporter": ("torch_onnx", "conv"),
        "PyTorch's, 1x1 convolutions as nn.Linear": ("torch_onnx", "linear"),
        "jax2onnx": ("jax2onnx",),
        "jax2tf, TFLite, tf2onnx": ("jax2tf_onnx",),
        "jax2tf, TFLite, tf2onnx, for a batch of 1": ("jax2tf_onnx", 1),
    },
    "tflite": {
        "ours": ("native_tflite",),
        "Keras' exporter": ("keras_tflite",),
        "jax2tf, TFLite": ("jax2tf_tflite",),
        "jax2tf, TFLite, for a batch of 1": ("jax2tf_tflite", 1),
    },
}
NAMES = {"onnx": "ONNX", "tflite": "TFLite"}
PRECISIONS = ("float32", "float16", "dynamic", "int8")
TOLERANCE = 1e-4  # the largest difference between a file's output and JAX's
PACKAGES = ("torch", "onnxscript", "jax2onnx", "keras", "tensorflow", "tf2onnx")
PACKAGES += ("onnx", "onnxruntime", "ai-edge-litert")
AT_MOST = {
    "onnx": {"nodes": 36, "ratio": 0.95},
    "tflite": {"nodes": 85, "bytes": 75_000, "ratio": 1.0},
}
NOTES = """\
Ratios are computed round by round: median (smallest - largest). Our files omit kernel taps that \
read only padding (7x7 over 3x3 pixels, and over one); the others keep them."""


def main():
    args = arguments("export", __doc__, checkpoint=None, rounds=25)
    with tempfile.TemporaryDirectory() as folder:
        folder, tables, targets = Path(folder), [], []
        for kind in MAKERS:
            table, own_targets = against_peers(folder, kind, args.rounds)
            tables.append(table)
            targets += own_targets
        checkpoint = args.checkpoint or train_sample(folder)
        reports = precision_reports(folder, checkpoint)
        tables.append(precisions_table(reports))
        command = partial(export, folder, checkpoint, "timed", "--force", "--formats", "onnx")
        times = [seconds(command) for _ in range(min(5, args.rounds))]
        targets += precisions_targets(reports)
        label = "`--formats onnx`, from process start to verified file, s"
        targets.append((label, statistics.median(times), 6))
    rows = [[label, *target_cells(value, bound)] for label, value, bound in targets]
    tables.append(markdown(["target", "", "measured", "reached"], rows))
    record(args, "Exported files", *tables, f"{NOTES} {versions(*PACKAGES)}.")


def against_peers(folder, kind, rounds):
    """(the table of the files in a format, its targets [(label, value or None, at most)])."""
    files, errors = make_files(folder, kind)
    times = compare(files, rounds)
    ours, reference, *_ = MAKERS[kind]

    def relative(name, batch):
        own, other = times.get((name, batch)), times.get((reference, batch))
        return ratios(own, other) if own and other else []

    columns = [f"batch {batch}, us" for batch in BATCHES]
    columns += [f"x {reference}, batch {batch}" for batch in BATCHES]
    head, rows = [NAMES[kind], "nodes", "bytes", "batch", *columns], []
    for name in MAKERS[kind]:
        if name in errors:
            rows.append([name, errors[name], *[""] * (len(head) - 2)])
            continue
        model, size = open_model(files[name]), files[name].stat().st_size
        free = all(shape[0] is None for shape, _ in model.inputs.values())
        cells = [times.get((name, batch)) for batch in BATCHES]
        cells += [relative(name, batch) for batch in BATCHES]
        about = [name, model.nodes(), f"{size:,}", "free" if free else "fixed"]
        rows.append(about + [spread(cell) if cell else "-" for cell in cells])
    at_most, targets = AT_MOST[kind], []
    if ours in files:
        targets.append((f"{NAMES[kind]}: nodes", open_model(files[ours]).nodes(), at_most["nodes"]))
        if "bytes" in at_most:
            size = files[ours].stat().st_size
            targets.append((f"{NAMES[kind]}: bytes", size, at_most["bytes"]))
    for batch in BATCHES:
        multiples = relative(ours, batch)
        label = f"{NAMES[kind]}: latency / {reference}, batch {batch}"
        value = statistics.median(multiples) if multiples else None
        targets.append((label, value, at_most["ratio"]))
    return markdown(head, rows), targets


def make_files(folder, kind):
    """({name: file}, {name: why there is no file}), each file made in a process of its own and
    checked against JAX."""
    files, errors = {}, {}
    for i, (name, (maker, *words)) in enumerate(MAKERS[kind].items()):
        file = folder / f"{i}.{kind}"
        print_progress(f"making {name}")
        try:
            in_process(f"benchmarks.exporters:{maker}", str(file), *words)
            error = file_error(file)
        except WorkerError as failure:
            error = str(failure)
        if error:
            for prefix in (folder, Path.cwd()):  # RESULTS.md shows no path of this machine
                error = error.replace(f"{prefix}/", "")
            errors[name] = f"none: {error[:160].replace('|', '/')}"
        else:
            files[name] = file
    return files, errors


sample_output = cache(example_and_output)


def file_error(file):
    """How a file's output differs from the sample's; None if it does not."""
    x, expected = sample_output()
    try:
        model = open_model(file)
        ((name, (shape, _)),) = model.inputs.items()
        inputs = x[: shape[0]]  # NCHW and NHWC are the same numbers, as there is one channel
        (output,) = model({name: inputs.reshape(len(inputs), *shape[1:])}).values()
    except Exception as error:  # each runtime raises errors of its own
        return f"its file fails: {first_line(error)}"
    difference = np.abs(output - expected[: len(inputs)]).max()
    return None if difference <= TOLERANCE else f"its file is off by {difference:.2g}"


def train_sample(folder):
    """A checkpoint of the sample, after one epoch."""
    run = Run(folder, "config.json", "training.epochs=1", "callbacks=[]")
    run.finish()
    return run.checkpoint()


def export(folder, checkpoint, name, *options):
    """Run the export command; the reports of verification.json, {format: report}."""
    command = [sys.executable, "inference/convert_tflite.py", "-w", checkpoint, "--out", folder]
    command += ["--name", name, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        print_progress(done.stderr)
    file = folder / name / "verification.json"
    return json.loads(file.read_text(encoding="utf-8"))["formats"] if file.exists() else {}


def precision_reports(folder, checkpoint):
    """{precision: {format: its report}}"""
    reports = {}
    for precision in PRECISIONS:
        print_progress(f"exporting {precision}")
        quantize = [] if precision == "float32" else ["--quantize", precision]
        reports[precision] = export(folder, checkpoint, precision, *quantize)
    return reports


def precisions_table(reports):
    """The size, accuracy and latency of each precision."""
    rows = []
    for precision, formats in reports.items():
        for kind, report in formats.items():
            scores = report.get("test_set") or {}
            accuracies = [
                f"{scores[when]['accuracy']:.4f}" if scores else "-" for when in ("before", "after")
            ]
            ratio = report["bytes"] / reports["float32"].get(kind, report)["bytes"]
            latencies = [f"{1e3 * report['latency_ms'][str(batch)]:.0f}" for batch in BATCHES]
            title = f"{precision}, {NAMES[kind]}"
            rows.append([title, f"{report['bytes']:,}", short(ratio), *accuracies, *latencies])
    head = ["trained sample", "bytes", "x float32", "accuracy before", "after"]
    return markdown([*head, *(f"batch {batch}, us" for batch in BATCHES)], rows)


def precisions_targets(reports):
    float32, int8 = (reports[precision].get("tflite", {}) for precision in ("float32", "int8"))
    scores = int8.get("test_set") or {}
    ratio = int8["bytes"] / float32["bytes"] if float32 and int8 else None
    loss = 100 * (scores["before"]["accuracy"] - scores["after"]["accuracy"]) if scores else None
    return [
        ("TFLite: int8, bytes / float32", ratio, 0.7),
        ("TFLite: int8, points of accuracy lost", loss, 0.5),
    ]


if __name__ == "__main__":
    main()
