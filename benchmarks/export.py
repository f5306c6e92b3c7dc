"""Exported files of the sample against those that other frameworks make of it.

Compares nodes, bytes and latency on one thread, side by side; measures what quantizing costs, and
how long an export takes.

python -m benchmarks.export [--checkpoint FILE] [--rounds 25]
without a checkpoint the sample is trained for an epoch first
needs inference/requirements.txt and benchmarks/requirements.txt
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from benchmarks.exporters import SHAPE, reference_output
from benchmarks.latency import BATCHES, compare, ratios
from benchmarks.results import markdown, record, short, spread
from inference.runtimes import open_model
from utils import first_line

# {format: {function of exporters.py: its name in the tables}}; the first is ours, and latencies
# are given relative to the second.
MAKERS = {
    "onnx": {
        "native_onnx": "ours",
        "torch_conv": "PyTorch's exporter",
        "torch_linear": "PyTorch's, 1x1 convolutions as nn.Linear",
        "jax2onnx": "jax2onnx",
        "jax2tf_onnx": "jax2tf, TFLite, tf2onnx",
        "jax2tf_onnx_fixed": "jax2tf, TFLite, tf2onnx, for a batch of 1",
    },
    "tflite": {
        "native_tflite": "ours",
        "keras_tflite": "Keras' exporter",
        "jax2tf_tflite": "jax2tf, TFLite",
        "jax2tf_tflite_fixed": "jax2tf, TFLite, for a batch of 1",
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    checkpoint_help = "of the sample, to measure quantizing (default: train for an epoch)"
    parser.add_argument("--checkpoint", help=checkpoint_help)
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder, tables, targets = Path(folder), [], []
        for kind, makers in MAKERS.items():
            files, errors = make_files(folder, kind, makers)
            times = compare(files, args.rounds)
            tables.append(peers_table(kind, makers, files, times, errors))
            targets += peers_targets(kind, makers, files, times)
        checkpoint = args.checkpoint or train_sample(folder)
        reports = precision_reports(folder, checkpoint)
        tables.append(precisions_table(reports))
        targets += precisions_targets(reports)
        seconds = export_seconds(folder, checkpoint)
        targets.append(("`--formats onnx`, from process start to verified file, s", seconds, 6))
    tables += [targets_table(targets), f"{NOTES} {versions()}."]
    record("Exported files", "python -m benchmarks.export", "\n\n".join(tables))


def make_files(folder, kind, makers):
    """({maker: file}, {maker: why there is no file}), each file made in a process of its own and
    checked against JAX."""
    files, errors = {}, {}
    for maker in makers:
        file = folder / f"{maker}.{kind}"
        print(f"making {file.name}", file=sys.stderr)
        command = [sys.executable, "-m", "benchmarks.exporters", maker, file]
        done = subprocess.run(command, capture_output=True, text=True)
        error = done.stderr.strip().splitlines()[-1] if done.returncode else file_error(file)
        if error:
            for prefix in (folder, Path.cwd()):  # RESULTS.md shows no path of this machine
                error = error.replace(f"{prefix}/", "")
            errors[maker] = f"none: {error[:160].replace('|', '/')}"
        else:
            files[maker] = file
    return files, errors


def file_error(file):
    """How a file's output differs from the sample's; None if it does not."""
    x, expected = example_and_reference()
    try:
        model = open_model(file)
        ((name, (shape, _)),) = model.inputs.items()
        inputs = x[: shape[0]]  # NCHW and NHWC are the same numbers, as there is one channel
        (output,) = model({name: inputs.reshape(len(inputs), *shape[1:])}).values()
    except Exception as error:  # each runtime raises errors of its own
        return f"its file fails: {first_line(error)}"
    difference = np.abs(output - expected[: len(inputs)]).max()
    return None if difference <= TOLERANCE else f"its file is off by {difference:.2g}"


@cache
def example_and_reference():
    """(inputs, JAX's output)"""
    x = np.random.default_rng(1).random((3, *SHAPE), np.float32)
    return x, reference_output(x)


def peers_table(kind, makers, files, times, errors):
    """The size and the latency of each file."""
    reference = list(makers)[1]
    columns = [f"batch {batch}, us" for batch in BATCHES]
    columns += [f"x {makers[reference]}, batch {batch}" for batch in BATCHES]
    head = [NAMES[kind], "nodes", "bytes", "batch", *columns]
    rows = []
    for maker, title in makers.items():
        if maker in errors:
            rows.append([title, errors[maker], *[""] * (len(head) - 2)])
            continue
        model, size = open_model(files[maker]), files[maker].stat().st_size
        free = all(shape[0] is None for shape, _ in model.inputs.values())
        about = [title, str(model.nodes()), f"{size:,}", "free" if free else "fixed"]
        latencies = [times[maker].get(batch) for batch in BATCHES]
        multiples = [relative(times, maker, reference, batch) for batch in BATCHES]
        rows.append(about + [spread(cell) if cell else "-" for cell in latencies + multiples])
    return markdown(head, rows)


def relative(times, maker, reference, batch):
    """A file's latency as a multiple of the reference's, round by round; empty without either."""
    own, other = (times.get(name, {}).get(batch) for name in (maker, reference))
    return ratios(own, other) if own and other else []


def peers_targets(kind, makers, files, times):
    """[(target, measured value or None, the most that it may be)]"""
    ours, reference = list(makers)[:2]
    name, at_most = NAMES[kind], AT_MOST[kind]
    nodes = open_model(files[ours]).nodes() if ours in files else None
    targets = [(f"{name}: nodes", nodes, at_most["nodes"])]
    if "bytes" in at_most:
        size = files[ours].stat().st_size if ours in files else None
        targets.append((f"{name}: bytes", size, at_most["bytes"]))
    for batch in BATCHES:
        multiples = relative(times, ours, reference, batch)
        value = statistics.median(multiples) if multiples else None
        label = f"{name}: latency / {makers[reference]}, batch {batch}"
        targets.append((label, value, at_most["ratio"]))
    return targets


def train_sample(folder):
    """A checkpoint of the sample, after one epoch."""
    command = [sys.executable, "train.py", "-c", "config.json", "training.epochs=1"]
    command += ["checkpoint.every_epochs=1", f"checkpoint.dir={folder}", "callbacks=[]"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return next(folder.rglob("*.params"))


def precision_reports(folder, checkpoint):
    """{precision: {format: its report in verification.json}}"""
    reports = {}
    for precision in PRECISIONS:
        print(f"exporting {precision}", file=sys.stderr)
        quantize = [] if precision == "float32" else ["--quantize", precision]
        done = export(folder, checkpoint, "--name", precision, *quantize)
        file = folder / precision / "verification.json"
        reports[precision] = (
            json.loads(file.read_text(encoding="utf-8"))["formats"] if file.exists() else {}
        )
        if done.returncode:
            print(done.stderr, file=sys.stderr)
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


def export_seconds(folder, checkpoint, rounds=5):
    """The median wall time of the whole command."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        if export(folder, checkpoint, "--name", "timed", "--force", "--formats", "onnx").returncode:
            return None
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def export(folder, checkpoint, *options):
    """Run the export command."""
    command = [sys.executable, "inference/convert_tflite.py", "-w", checkpoint, "--out", folder]
    return subprocess.run([*command, *options], capture_output=True, text=True)


def targets_table(targets):
    rows = []
    for target, value, at_most in targets:
        reached = "not measured" if value is None else "yes" if value <= at_most else "**no**"
        rows.append([target, "-" if value is None else short(value), short(at_most), reached])
    return markdown(["target", "measured", "at most", "reached"], rows)


def versions():
    lines = []
    for package in PACKAGES:
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"no {package}")
    return ", ".join(lines)


if __name__ == "__main__":
    main()
