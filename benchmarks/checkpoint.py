"""What saving costs: the sample with a checkpoint every epoch against none, and a state of 50
million parameters written in the background against written synchronously.

python -m benchmarks.checkpoint [rounds]
"""

import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
from training.runner import Runner

from benchmarks.overhead import log_to
from benchmarks.results import record, spread
from data_loader.base import Arrays
from model.mlp import mlp
from training.checkpoint import storage
from training.checkpoint.keeper import Cut, Keeper, as_saved
from training.checkpoint.probe import Probe, probe_input
from training.fit import compose
from training.loop import Loop
from training.loss import cross_entropy
from training.objective import supervised
from training.optimizers import adam
from training.options import CheckpointOptions, LoaderOptions, LoggingOptions, TrainingOptions
from training.run import Reader
from training.runs.shape_check import count
from training.update import gradient_update
from training.watching.metric_log import MetricLog
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
    functions = {label: metric.function for label, metric in parts.metrics.items()}
    objective = compose(
        parts.objective, parts.model, parts.loss, functions, parts.preprocess, parts.augment
    )
    data = {"train": parts.data.load()["train"]}
    loops = {}
    for form in ("no checkpoints", "one every epoch"):
        run_dir = folder / form
        run_dir.mkdir()
        runner = Runner(
            parts.model,
            objective,
            partial(gradient_update, objective, parts.optimizer),
            data,
            parts.loader,
        )
        probe = Probe(parts.model, probe_input(runner.feeds["train"].shapes, parts.preprocess))
        keeper = (
            Keeper(run_dir, CheckpointOptions(keep=2), {"config": parts.config}, probe)
            if form != "no checkpoints"
            else None
        )
        log = MetricLog(run_dir / "metrics.jsonl")
        loops[form] = Loop(
            runner, Reader(objective.finish), [], parts.training, log, parts.logging, keeper=keeper
        )
    rates = {form: [] for form in loops}
    for i in range(rounds + 1):
        for form, loop in loops.items() if i % 2 else reversed(loops.items()):
            start = time.perf_counter()
            for _ in range(EPOCHS):
                loop.one_epoch()
            loop.keeper.wait()
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
    objective = compose(supervised, model, cross_entropy, {})
    data = {"train": Arrays(np.zeros((64, 784), np.float32), np.zeros(64, np.int32))}
    runner = Runner(
        model,
        objective,
        partial(gradient_update, objective, adam()),
        data,
        LoaderOptions(batch_size=32),
    )
    keeper = Keeper(folder, CheckpointOptions(keep=1))
    loop = Loop(
        runner, Reader(), [], TrainingOptions(), MetricLog(), LoggingOptions(), keeper=keeper
    )
    loop.one_epoch()
    loop.keeper.wait()
    forms = {"written synchronously": write, "until the run continues": delay}
    times = {form: [] for form in forms}
    for _ in range(rounds):
        for form, save in forms.items():
            loop.run.step += 1  # so that the file gets another name
            times[form].append(save(loop))
            loop.keeper.wait()
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    rows = [f"| {form}, s | {spread(values)} |" for form, values in times.items()]
    rows.append(f"| continues / synchronously, pair by pair | {spread(ratios)} |")
    megabytes = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.states)) // 10**6
    head = f"| {count(runner.states[0].params):,} parameters, {megabytes} MB | median (range) |"
    table = "\n".join([head, "|---|---|", *rows])
    record("Saving a large state", "python -m benchmarks.checkpoint", table)


def write(loop):
    """Seconds to write the state while everything waits."""
    start = time.perf_counter()
    cut = Cut(loop.runner.states, {"position": 0})
    storage.save(loop.keeper.folder / "at_once.params", as_saved(cut.states[0], cut, True), {})
    return time.perf_counter() - start


def delay(loop):
    """Seconds until the next step can begin."""
    cuts = []

    def cut():
        cuts.append(loop.cut())
        return cuts[0]

    start = time.perf_counter()
    loop.keeper.save(loop.run, cut)
    jax.block_until_ready(cuts[0].states)  # the next step would wait for this copy
    return time.perf_counter() - start


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
