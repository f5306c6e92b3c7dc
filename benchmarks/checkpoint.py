"""How long saving 50 million parameters, with Adam's m and v, delays the next step of a run.

python -m benchmarks.checkpoint [--rounds 9]
"""

import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.results import arguments, markdown, ratios, record, spread
from model.mlp import mlp
from training.fit import fit
from training.optimizers import adam

WIDTHS = (6600, 6600)


def main():
    args = arguments("checkpoint", __doc__, rounds=9)
    # In the current folder, since the default temporary folder may be in memory.
    with tempfile.TemporaryDirectory(dir=".") as folder:
        record(args, "Saving a large state", large_state(folder, args.rounds))


def large_state(folder, rounds, widths=WIDTHS):
    """A table of the seconds until the run continues, and until the file is written."""
    examples, saves = 32 * (rounds + 2), Saves(Path(folder))  # no step ends an epoch
    data = np.zeros((examples, 784), np.float32), np.zeros(examples, np.int32)
    run = fit(
        mlp((784,), 10, dims=widths),
        data,
        optimizer=adam(),
        metrics=[],
        batch_size=32,
        epochs=None,
        max_steps=rounds + 1,
        eval_every=0,
        folder=folder,
        checkpoint={"keep": 1, "every_epochs": 0},
        callbacks=[saves],
    )
    delays, written = saves.delays[1:], saves.written[1:]  # the first one allocates memory
    rows = [["written, s", spread(written)], ["until the run continues, s", spread(delays)]]
    rows.append(["continues / written, pair by pair", spread(ratios(delays, written))])
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    head = f"{parameters:,} parameters, {saves.bytes // 10**6} MB"
    return markdown([head, "median (range)"], rows)


class Saves:
    """A callback that saves after every step, and waits until the file is written."""

    def __init__(self, folder):
        self.folder, self.every = folder, {"steps": 1}
        self.delays, self.written, self.bytes = [], [], 0

    def on_steps(self, run):
        self.before, self.start = self.files(), time.perf_counter()
        return {"save": "last"}

    def on_save(self, run, take, kind):
        """Called after the copy of the state was made, and the writer was started."""
        states = take().states
        jax.block_until_ready(states)  # the next step would wait for this copy
        self.delays.append(time.perf_counter() - self.start)
        self.bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(states))
        while not self.files() - self.before:  # a file that is not finished has another name
            time.sleep(0.001)
        self.written.append(time.perf_counter() - self.start)

    def files(self):
        return set(self.folder.glob("checkpoint-*.params"))


if __name__ == "__main__":
    main()
