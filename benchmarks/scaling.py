"""How speed and memory of `fit` change as the batch, the width, the dataset and the depth grow.

Each point is measured in a process of its own, with huge pages.

python -m benchmarks.scaling
"""

import logging
import time
from typing import NamedTuple

import numpy as np

from benchmarks.harness import in_process, print_progress
from benchmarks.results import arguments, markdown, record, spread
from benchmarks.workloads import IMAGE, Workload
from data_loader.digits import digits
from utils import peak_of_process

SECONDS, EPOCHS = 2.0, 3  # each point trains for at least this long and this many epochs
NOTE = """\
Images are 28x28x1, of the digits that the program draws; AdamW, float32, no evaluation; median \
(smallest - largest) over the epochs after the first, without compilation. Memory is the peak of \
the process: before `fit`, with JAX imported and the dataset read, and at the end."""


class Point(NamedTuple):
    """One training run of the benchmark."""

    label: str
    model: str
    args: dict
    batch_size: int
    examples: int
    device_budget_mb: int = 2048  # 0: the dataset stays on the host and is streamed


def sample(label, dims=(8, 16, 32), batch_size=512, examples=60_000, **options):
    """The model of config.json, with some of its settings changed."""
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
    args, rows = arguments("scaling", __doc__), []
    for axis, points in AXES.items():
        for i, point in enumerate(points):
            print_progress(f"{axis}: {point.label}")
            results = in_process("benchmarks.scaling:measure", *point, huge_pages=True, timeout=900)
            memory = [f"{results[when] / 2**20:,.0f}" for when in ("before", "peak")]
            cells = [f"{results['parameters']:,}", spread(results["rates"]), *memory]
            rows.append(["" if i else axis, point.label, *cells])
    head = ["what grows", "to", "parameters", "images/s", "memory before, MiB", "peak memory, MiB"]
    record(args, "Scaling", markdown(head, rows), NOTE)


def measure(label, model, model_args, batch_size, examples, device_budget_mb):
    """{"parameters", "rates" (images per second of each epoch), "before" and "peak" (bytes)}"""
    import jax

    from benchmarks.peers.ours import model_of
    from training.fit import fit
    from training.optimizers import adamw
    from training.preprocess import to_unit

    logging.getLogger("main").addHandler(logging.NullHandler())  # else `fit` prints its log lines
    x, y = digits().load()["train"].arrays
    rows = np.arange(examples) % len(x)
    data = x[rows], y[rows]
    before = peak_of_process()
    done = fit(
        model_of(Workload(model, model_args, IMAGE, batch_size, lr=0.003)),
        data,
        optimizer=adamw(0.003),
        preprocess=[to_unit],
        callbacks=[StopAfter()],
        batch_size=batch_size,
        device_budget_mb=device_budget_mb,
        epochs=10**6,
        eval_every=0,
    )
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(done.params)),
        "rates": [row["examples_per_second"] for row in done.history[1:]],
        "before": before,
        "peak": peak_of_process(),
    }


class StopAfter:
    """A callback that stops the run after EPOCHS epochs and SECONDS seconds."""

    def __init__(self):
        self.every = {"epochs": 1}

    def on_steps(self, run):
        if run.epoch == 1:
            self.start = time.perf_counter()
        return {"stop": run.epoch > EPOCHS and time.perf_counter() - self.start > SECONDS}


if __name__ == "__main__":
    main()
