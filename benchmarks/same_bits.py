"""Do two checkouts train to the same bits?

python -m benchmarks.same_bits ../other            # this checkout against another one
python -m benchmarks.same_bits ../other mlp gpt    # only these cases

Each checkout trains the same small models by its own `fit`, in processes of its own. The weights,
running statistics and optimizer states of the last checkpoints must be equal bit by bit, and the
logged metrics to 1e-6 of their size. The exit code is 1 if they are not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-6  # of a metric: sums of float32 may be taken in another order
TIMES = ("seconds", "per_second", "waiting", "utilisation", "memory", "time")
COMMON = {"epochs": 3, "batch_size": 16, "log": {"every_steps": 5}}


def examples(count, shape, classes, seed):
    """Random inputs whose class is a function of them."""
    x = np.random.default_rng(seed).normal(size=(count, *shape)).astype(np.float32)
    return x, np.argmax(x.reshape(count, -1)[:, :classes], axis=1).astype(np.int32)


class Streamed:
    """The examples one by one, so that batches come from the host."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def cases():
    """{name: (model, training set, test set, other arguments of fit)}"""
    from model.convnext import convnext
    from model.gpt import gpt
    from model.mlp import mlp
    from model.resnet import resnet
    from training.loss import cross_entropy
    from training.optimizers import adamw, sgd
    from training.schedules import cosine

    flat, flat_test = examples(200, (12,), 4, 0), examples(50, (12,), 4, 1)
    images, image_test = examples(96, (8, 8, 3), 4, 2), examples(40, (8, 8, 3), 4, 3)
    tokens = np.random.default_rng(4).integers(0, 11, (64, 13))
    text = tokens[:, :-1], tokens[:, 1:]
    adam = {"optimizer": adamw(lr=0.003)}
    perceptron = mlp((12,), 4, dims=(16,))
    network = convnext((8, 8, 3), 4, dims=(4, 8), depths=(1, 1))
    decoder = gpt((12,), 11, dim=16, depth=2, heads=2, dropout=0.1)
    norms = resnet((8, 8, 3), 4, widths=(4, 8), depth=1)
    bad = flat[0].copy()
    bad[17] = np.inf
    return {
        "mlp": (perceptron, flat, flat_test, {**adam, "schedule": cosine(total_steps=39)}),
        "mlp, averaged": (perceptron, flat, flat_test, {**adam, "ema": 0.99}),
        "mlp, two seeds": (perceptron, flat, flat_test, {**adam, "replicas": 2}),
        "mlp, streamed": (perceptron, Streamed(*flat), flat_test, adam),
        "mlp, a bad example": (perceptron, (bad, flat[1]), None, {**adam, "on_nonfinite": "skip"}),
        "convnext": (network, images, image_test, adam),
        "convnext, microbatches": (network, images, image_test, {**adam, "accumulate": 4}),
        "resnet": (norms, images, image_test, {"optimizer": sgd(lr=0.05, momentum=0.9)}),
        "gpt": (decoder, text, None, {**adam, "loss": cross_entropy, "metrics": []}),
    }


def work(names, folder):
    """Train the cases in the checkout that is imported."""
    from training.fit import fit

    for name, (model, train, test, arguments) in cases().items():
        if not names or any(name.split(",")[0] == each or name == each for each in names):
            fit(model, train, test, folder=Path(folder) / name, **COMMON | arguments)


def trained(checkout, names, folder):
    """Train in a process that imports the project from a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-P", __file__, "--worker", str(folder), str(checkout), *names]
    subprocess.run(command, check=True, cwd=checkout, env=environment, stdout=subprocess.DEVNULL)


def leaves_of(folder):
    """{name of a checkpoint and of a leaf: array} of the last checkpoint of a run."""
    from safetensors.numpy import load_file

    newest = max(Path(folder).glob("checkpoint-*.params"), key=lambda path: path.stat().st_mtime)
    kept = ("params", "state", "opt", "ema", "step")
    return {
        f"{newest.name}: {name}": leaf
        for name, leaf in load_file(newest).items()
        if name.lstrip("0123456789/").split("/")[0] in kept
    }


def rows_of(folder):
    """The rows of metrics.jsonl, without times."""
    lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not any(word in k for word in TIMES)} for row in rows]


def of_leaves(one, other):
    """One line for each array that differs between the folders of two runs."""
    ours, theirs = leaves_of(one), leaves_of(other)
    for name in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            yield f"{name} is in one checkout only"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{name} has another type or shape"
        elif a.tobytes() != b.tobytes():
            yield f"{name} differs by up to {np.abs(a.astype(float) - b).max():.3g}"


def of_rows(one, other):
    """One line for each metric that differs."""
    ours, theirs = rows_of(one), rows_of(other)
    if len(ours) != len(theirs):
        yield f"metrics.jsonl has {len(ours)} rows here and {len(theirs)} there"
    for number, (row, former) in enumerate(zip(ours, theirs, strict=False), 1):
        for key in row.keys() | former.keys():
            a, b = row.get(key), former.get(key)
            numbers = isinstance(a, int | float) and isinstance(b, int | float)
            if not (np.isclose(a, b, TOLERANCE, 1e-7, equal_nan=True) if numbers else a == b):
                yield f"row {number} of metrics.jsonl: {key} is {a} here and {b} there"


def main():
    """Train every case in both checkouts and print what differs; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("checkout", type=Path, help="the folder of another checkout")
    parser.add_argument("cases", nargs="*", help="such as mlp, or 'mlp, streamed'; default: all")
    args = parser.parse_args()
    if args.worker:
        work(args.cases, args.worker)
        return 0
    different = False
    with tempfile.TemporaryDirectory() as folder:
        here, there = Path(folder) / "here", Path(folder) / "there"
        trained(ROOT, args.cases, here)
        trained(args.checkout.resolve(), args.cases, there)
        for run in sorted(here.iterdir()):
            lines = [*of_leaves(run, there / run.name), *of_rows(run, there / run.name)]
            different = different or bool(lines)
            count = len(leaves_of(run)), len(rows_of(run))
            same = "the same {} arrays and {} rows of metrics".format(*count)
            print(f"{run.name}: {'; '.join(lines) or same}")
    return int(different)


if __name__ == "__main__":
    sys.exit(main())
