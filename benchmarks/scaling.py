"""How speed and memory change as the batch, the width, the dataset and the depth grow: `fit`, each point in a process of its own,
with huge pages.

python -m benchmarks.scaling
"""

import json
import logging
import os
import subprocess
import sys
import time
from importlib import import_module
from typing import NamedTuple

import numpy as np

from benchmarks.results import markdown, record, spread
from benchmarks.serving import HUGE_PAGES
from data_loader.digits import digits
from utils import peak_of_process

SECONDS, EPOCHS = 2.0, 3  # a point trains at least so long, and so many epochs
NOTE = (
    "Images are 28x28x1, of the digits that the program draws; AdamW, float32, no evaluation; median (smallest - largest) over "
    "the epochs behind the first, what compiling takes left out. Memory is the most that the process has held: before `fit`, "
    "with JAX imported and the dataset read, and at the end."
)


class Point(NamedTuple):
    """What is trained."""

    label: str
    model: str
    args: dict
    batch_size: int
    examples: int
    device_budget_mb: int = 2048  # 0: the dataset stays on the host, and is streamed


def sample(label, dims=(8, 16, 32), batch_size=512, examples=60_000, **options):
    """The model of config.json, but for what grows."""
    return Point(label, "convnext", {"dims": dims}, batch_size, examples, **options)


WIDTHS = {factor: (8 * factor, 16 * factor, 32 * factor) for factor in (1, 2, 4, 8)}
AXES = {
    "batch of the sample": [sample(f"{size:,}", batch_size=size) for size in (32, 128, 512, 2048)],
    "width of the sample": [
        sample(" ".join(map(str, dims)), dims, examples=48_000 // factor)
        for factor, dims in WIDTHS.items()
    ],
    "dataset of the sample": [
        *(sample(f"{count:,} images", examples=count) for count in (15_000, 60_000, 240_000)),
        sample("240,000 images, streamed", examples=240_000, device_budget_mb=0),
    ],
    "depth of the vision transformer": [
        Point(f"{n} blocks", "vit", {"depth": n}, 128, 2_048) for n in (1, 2, 4, 8)
    ],
    "depth of the residual network": [
        Point(f"{6 * n + 2} layers", "resnet", {"depth": n}, 128, 2_048) for n in (1, 2, 3)
    ],
}


def main():
    rows = []
    for axis, points in AXES.items():
        for place, point in enumerate(points):
            print(f"{axis}: {point.label}", file=sys.stderr)
            found = in_a_process(axis, place)
            memory = [f"{found[when] / 2**20:,.0f}" for when in ("before", "peak")]
            rows.append(
                [
                    "" if place else axis,
                    point.label,
                    f"{found['parameters']:,}",
                    spread(found["rates"]),
                    *memory,
                ]
            )
    head = ["what grows", "to", "parameters", "images/s", "memory before, MiB", "peak memory, MiB"]
    record("Scaling", "python -m benchmarks.scaling", f"{markdown(head, rows)}\n\n{NOTE}")


def in_a_process(axis, place):
    """What a process tells of a point."""
    command = [sys.executable, "-m", "benchmarks.scaling", axis, str(place)]
    done = subprocess.run(
        command, env=os.environ | HUGE_PAGES, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def measure(point):
    """{"parameters", "rates" (images a second of each epoch), "before" and "peak" (bytes)}"""
    import jax

    from training.fit import fit
    from training.optimizers import adamw
    from training.preprocess import to_unit
    from training.runs.shape_check import count

    logging.getLogger("main").addHandler(logging.NullHandler())  # else `fit` would print its lines
    model = getattr(import_module(f"model.{point.model}"), point.model)(
        (28, 28, 1), 10, **point.args
    )
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    x, y = digits().load()["train"].arrays
    rows = np.arange(point.examples) % len(x)
    data = x[rows], y[rows]
    before = peak_of_process()
    options = {
        "batch_size": point.batch_size,
        "device_budget_mb": point.device_budget_mb,
        "epochs": 10**6,
        "eval_every": 0,
    }
    done = fit(
        model, data, optimizer=adamw(0.003), preprocess=[to_unit], callbacks=[Enough()], **options
    )
    rates = [row["examples_per_second"] for row in done.history[1:]]
    return {
        "parameters": count(params),
        "rates": rates,
        "before": before,
        "peak": peak_of_process(),
    }


class Enough:
    """A callback: it stops the run when there is enough to tell."""

    def on_epoch_end(self, view):
        if view.epoch == 1:
            self.began = time.perf_counter()
        return {"stop": view.epoch > EPOCHS and time.perf_counter() - self.began > SECONDS}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        axis, place = sys.argv[1:]
        print(json.dumps(measure(AXES[axis][int(place)])))
    else:
        main()
