"""What saving costs: the sample with a checkpoint every epoch against none, and a state of 50
million parameters written in the background against written synchronously.

python -m benchmarks.checkpoint [rounds]
"""

import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.overhead import log_to
from benchmarks.results import record, spread
from data_loader.base import Arrays
from model.mlp import mlp
from training.checkpoint import storage
from training.checkpoint.keeper import Keeper, as_saved
from training.commands.shape_check import count
from training.devices.options import MeshOptions
from training.devices.sharding import Plan
from training.engine import Trainer
from training.fit import assemble, recipe_of
from training.optimizers import adam
from training.options import CheckpointOptions
from training.recipe import compose
from wiring.build import build
from wiring.config import read

EPOCHS = 4  # per turn, at the end of which all of its checkpoints are written


def main(rounds=9):
    # In the current folder, since the default temporary folder may be in memory.
    with tempfile.TemporaryDirectory(dir=".") as folder:
        folder = Path(folder)
        log_to(folder / "train.log")
        every_epoch(folder, rounds)
        large_state(folder, rounds)


def every_epoch(folder, rounds):
    """The sample's throughput with and without saving."""
    parts = build(read("config.json", ["data=digits", "training.eval_every=0"]), "config.json")
    plan, data = Plan.on_paper(MeshOptions(), None), {"train": parts.data.load()["train"]}
    every = {"no checkpoints": 0, "one every epoch": 1}
    loops = {}
    for form, every_epochs in every.items():
        parts.checkpoint = CheckpointOptions(keep=2, every_epochs=every_epochs)
        loops[form] = loop_of(compose(parts, plan), data, folder / form, {"config": parts.config})
    rates = {form: [] for form in loops}
    for i in range(rounds + 1):
        for form, loop in loops.items() if i % 2 else reversed(loops.items()):
            start = time.perf_counter()
            for _ in range(EPOCHS):
                loop.epoch()
            keeper_of(loop).wait()
            if i > 0:  # the first round compiles
                rates[form].append(EPOCHS * len(data["train"]) / (time.perf_counter() - start))
    ratios = [b / a for a, b in zip(*rates.values(), strict=True)]
    rows = [f"| {form}, images/s | {spread(values)} |" for form, values in rates.items()]
    rows.append(f"| ratio, pair by pair | {spread(ratios)} |")
    table = "\n".join(["| sample | median (range) |", "|---|---|", *rows])
    record("A checkpoint every epoch", "python -m benchmarks.checkpoint", table)


def large_state(folder, rounds):
    """How long saving 50 million parameters, with Adam's m and v, delays the next step of a run."""
    model = mlp((784,), 10, dims=(6600, 6600))
    data = {"train": Arrays(np.zeros((64, 784), np.float32), np.zeros(64, np.int32))}
    checkpoint = CheckpointOptions(keep=1)
    recipe = recipe_of(model, optimizer=adam(), metrics=[], batch_size=32, checkpoint=checkpoint)
    loop = loop_of(recipe, data, folder / "large", {"config": {}})
    loop.epoch()
    keeper_of(loop).wait()
    forms = {"written synchronously": write, "until the run continues": delay}
    times = {form: [] for form in forms}
    for _ in range(rounds):
        for form, save in forms.items():
            loop.run.step += 1  # so that the file gets another name
            times[form].append(save(loop))
            keeper_of(loop).wait()
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    rows = [f"| {form}, s | {spread(values)} |" for form, values in times.items()]
    rows.append(f"| continues / synchronously, pair by pair | {spread(ratios)} |")
    megabytes = sum(leaf.nbytes for leaf in jax.tree.leaves(loop.trainer.states)) // 10**6
    head = (
        f"| {count(loop.trainer.states[0].params):,} parameters, {megabytes} MB | median (range) |"
    )
    table = "\n".join([head, "|---|---|", *rows])
    record("Saving a large state", "python -m benchmarks.checkpoint", table)


def loop_of(recipe, data, folder, record):
    """A Loop that writes into a folder."""
    folder.mkdir()
    record = record | {"facts": {}, "data": {}}
    loop, _ = assemble(recipe, Trainer(recipe, data), data, folder, record)
    loop.run.epochs = 10**9  # so that no epoch is the last, which is saved in any case
    return loop


def keeper_of(loop):
    return next(each for each in loop.observers if isinstance(each, Keeper))


def write(loop):
    """Seconds to write the state while everything waits."""
    start = time.perf_counter()
    tree = as_saved(loop.trainer.states[0], whole=True, sums=None)
    storage.save(keeper_of(loop).folder / "at_once.params", tree, {})
    return time.perf_counter() - start


def delay(loop):
    """Seconds until the next step can begin."""
    snapshots = []

    def take():
        snapshots.append(loop.snapshot())
        return snapshots[0]

    start = time.perf_counter()
    keeper_of(loop).on_save(loop.run, take, "last")
    jax.block_until_ready(snapshots[0].states)  # the next step would wait for this copy
    return time.perf_counter() - start


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
