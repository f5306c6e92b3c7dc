"""Exported files of the sample against those that other frameworks make of it: nodes, bytes, latency on one thread, side by side;
what quantizing costs, and how long an export takes.

python -m benchmarks.export [--checkpoint FILE] [--rounds 25]   (without a checkpoint the sample is trained for an epoch first)
needs requirements.txt, inference/requirements.txt and benchmarks/requirements.txt
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

from benchmarks.exporters import SHAPE, answer
from benchmarks.latency import BATCHES, compare, ratios
from benchmarks.results import markdown, record, short, spread
from inference.runtimes import open_model
from utils import first_line

# {format: {function of exporters.py: what it is called}}: the first is ours, the second is what it is measured by.
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
AGREEMENT = 1e-4  # as near must every file's output be to JAX's
PACKAGES = (
    "torch",
    "onnxscript",
    "jax2onnx",
    "keras",
    "tensorflow",
    "tf2onnx",
    "onnx",
    "onnxruntime",
    "ai-edge-litert",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoint",
        help="of the sample, for what quantizing costs (default: an epoch is trained)",
    )
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder, tables, claims = Path(folder), [], []
        for kind, makers in MAKERS.items():
            files, failed = made(folder, kind, makers)
            times = compare(files, args.rounds)
            tables.append(peers_table(kind, makers, files, times, failed))
            claims += peers_claims(kind, makers, files, times)
        checkpoint = args.checkpoint or trained(folder)
        reports = precisions(folder, checkpoint)
        tables.append(precisions_table(reports))
        claims += precisions_claims(reports)
        seconds = export_seconds(folder, checkpoint)
        claims.append(("`--formats onnx`, from process start to verified file, s", seconds, 6))
    tables += [claims_table(claims), versions()]
    record("Exported files", "python -m benchmarks.export", "\n\n".join(tables))


def made(folder, kind, makers):
    """({maker: file}, {maker: why there is none}), each made in a process of its own and known to compute what JAX does."""
    files, failed = {}, {}
    for maker in makers:
        file = folder / f"{maker}.{kind}"
        print(f"making {file.name}", file=sys.stderr)
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.exporters", maker, file],
            capture_output=True,
            text=True,
        )
        why = done.stderr.strip().splitlines()[-1] if done.returncode else fault(file)
        if why:
            for place in (folder, Path.cwd()):  # the table is for others' machines too
                why = why.replace(f"{place}/", "")
            failed[maker] = f"none: {why[:160].replace('|', '/')}"
        else:
            files[maker] = file
    return files, failed


def fault(file):
    """How a file differs from the sample; None where it does not."""
    x, expected = question()
    try:
        model = open_model(file)
        ((name, (shape, _)),) = model.inputs.items()
        given = x[: shape[0]]  # one channel, so that NCHW is the same numbers
        (found,) = model({name: given.reshape(len(given), *shape[1:])}).values()
    except Exception as error:  # the runtimes' own, of many kinds
        return f"its file fails: {first_line(error)}"
    gap = np.abs(found - expected[: len(given)]).max()
    return None if gap <= AGREEMENT else f"its file is off by {gap:.2g}"


@cache
def question():
    """(inputs, what JAX answers)"""
    x = np.random.default_rng(1).random((3, *SHAPE), np.float32)
    return x, answer(x)


def peers_table(kind, makers, files, times, failed):
    """What each file is, and how long it takes."""
    mark = list(makers)[1]
    against = [f"x {makers[mark]}, batch {batch}" for batch in BATCHES]
    head = [
        NAMES[kind],
        "nodes",
        "bytes",
        "batch",
        *(f"batch {batch}, us" for batch in BATCHES),
        *against,
    ]
    rows = []
    for maker, title in makers.items():
        if maker in failed:
            rows.append([title, failed[maker], *[""] * (len(head) - 2)])
            continue
        model, file = open_model(files[maker]), files[maker]
        free = all(shape[0] is None for shape, _ in model.inputs.values())
        about = [title, str(model.nodes()), f"{file.stat().st_size:,}", "free" if free else "fixed"]
        latencies = [
            spread(times[maker][batch]) if batch in times[maker] else "-" for batch in BATCHES
        ]
        multiples = [
            spread(found) if (found := relative(times, maker, mark, batch)) else "-"
            for batch in BATCHES
        ]
        rows.append(about + latencies + multiples)
    return markdown(head, rows)


def relative(times, maker, mark, batch):
    """Round by round, a file's latency as a multiple of the mark's; empty where one of them has none."""
    own, other = (times.get(name, {}).get(batch) for name in (maker, mark))
    return ratios(own, other) if own and other else []


def peers_claims(kind, makers, files, times):
    """[(what is claimed, what was found, the most that it may be)]"""
    ours, mark = list(makers)[:2]
    most = {
        "onnx": {"nodes": 36, "ratio": 0.95},
        "tflite": {"nodes": 85, "bytes": 75_000, "ratio": 1.0},
    }[kind]
    nodes = open_model(files[ours]).nodes() if ours in files else None
    claims = [(f"{NAMES[kind]}: nodes", nodes, most["nodes"])]
    if "bytes" in most:
        claims.append(
            (
                f"{NAMES[kind]}: bytes",
                files[ours].stat().st_size if ours in files else None,
                most["bytes"],
            )
        )
    for batch in BATCHES:
        found = relative(times, ours, mark, batch)
        value = statistics.median(found) if found else None
        claims.append(
            (f"{NAMES[kind]}: latency / {makers[mark]}, batch {batch}", value, most["ratio"])
        )
    return claims


def trained(folder):
    """A checkpoint of the sample, after one epoch."""
    overrides = [
        "training.epochs=1",
        "checkpoint.every_epochs=1",
        f"checkpoint.dir={folder}",
        "callbacks=[]",
    ]
    subprocess.run(
        [sys.executable, "train.py", "-c", "config.json", *overrides],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return next(folder.rglob("*.params"))


def precisions(folder, checkpoint):
    """{precision: {format: its report in verification.json}}"""
    reports = {}
    for precision in PRECISIONS:
        print(f"exporting {precision}", file=sys.stderr)
        options = ["--name", precision] + (
            [] if precision == "float32" else ["--quantize", precision]
        )
        done = export(folder, checkpoint, *options)
        file = folder / precision / "verification.json"
        reports[precision] = json.loads(file.read_text())["formats"] if file.exists() else {}
        if done.returncode:
            print(done.stderr, file=sys.stderr)
    return reports


def precisions_table(reports):
    """Size and accuracy of each precision."""
    rows = []
    for precision, formats in reports.items():
        for kind, report in formats.items():
            scores = report.get("test_set") or {}
            before, after = (
                f"{scores[when]['accuracy']:.4f}" if scores else "-" for when in ("before", "after")
            )
            share = report["bytes"] / reports["float32"].get(kind, report)["bytes"]
            latencies = [f"{1e3 * report['latency_ms'][str(batch)]:.0f}" for batch in BATCHES]
            rows.append(
                [
                    f"{precision}, {NAMES[kind]}",
                    f"{report['bytes']:,}",
                    short(share),
                    before,
                    after,
                    *latencies,
                ]
            )
    head = [
        "trained sample",
        "bytes",
        "x float32",
        "accuracy before",
        "after",
        *(f"batch {batch}, us" for batch in BATCHES),
    ]
    return markdown(head, rows)


def precisions_claims(reports):
    whole, int8 = (reports[precision].get("tflite", {}) for precision in ("float32", "int8"))
    scores = int8.get("test_set") or {}
    share = int8["bytes"] / whole["bytes"] if whole and int8 else None
    lost = 100 * (scores["before"]["accuracy"] - scores["after"]["accuracy"]) if scores else None
    return [
        ("TFLite: int8, bytes / float32", share, 0.7),
        ("TFLite: int8, points of accuracy lost", lost, 0.5),
    ]


def export_seconds(folder, checkpoint, rounds=5):
    """The median wall time of the whole command."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        if export(folder, checkpoint, "--name", "timed", "--force", "--formats", "onnx").returncode:
            return None
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def export(folder, checkpoint, *options):
    """The command that is measured."""
    command = [
        sys.executable,
        "inference/convert_tflite.py",
        "-w",
        checkpoint,
        "--out",
        folder,
        *options,
    ]
    return subprocess.run(command, capture_output=True, text=True)


def claims_table(claims):
    rows = []
    for claim, found, most in claims:
        held = "not measured" if found is None else "yes" if found <= most else "**no**"
        rows.append([claim, "-" if found is None else short(found), short(most), held])
    return markdown(["what it must reach", "found", "at most", "reached"], rows)


def versions():
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    trimmed = "Our files leave out taps of kernels that read padding alone (7x7 over 3x3 pixels, and over one); others do not."
    return f"Ratios are taken round by round: median (smallest - largest). {trimmed} {', '.join(found)}."


if __name__ == "__main__":
    main()
