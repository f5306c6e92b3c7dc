"""What the loop costs: epochs of `fit`, logging and metrics on, against a bare loop over the same compiled step.

python -m benchmarks.overhead [rounds]   (the sample of config.json; epochs interleaved in one process)
"""

import logging
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np

from benchmarks.results import record, spread
from data_loader.loader import epoch_order
from training.fit import compose
from training.loop import Loop
from training.metric_log import MetricLog
from training.runner import Runner
from training.update import gradient_update
from wiring.build import build
from wiring.config import read


def main(rounds=15):
    parts = build(read("config.json", ["data=digits", "training.eval_every=0"]), "config.json")
    objective = compose(parts.objective, parts.model, parts.loss, parts.metrics, parts.preprocess, parts.augment)
    make_update = partial(gradient_update, objective, parts.optimizer)
    data = {"train": parts.data.load()["train"]}
    engines = [Runner(parts.model, objective, make_update, data, parts.loader) for _ in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        log_to(Path(folder) / "train.log")
        log = MetricLog(Path(folder) / "metrics.jsonl")
        loop = Loop(engines[0], objective, [], parts.training, log, parts.logging.every_steps)
        forms = {
            "fit": loop.one_epoch,
            "bare, one call an epoch": partial(bare_epoch, engines[1], 10**9),
            "bare, one call a step": partial(bare_epoch, engines[2], 1),
            "by hand, one call an epoch": by_hand(engines[3], make_update(unroll=False).step, data["train"], parts.loader),
        }
        rates = measure(forms, len(data["train"]), rounds)
    best = np.max(list(rates.values())[1:], axis=0)
    ratios = [fit / bare for fit, bare in zip(rates["fit"], best, strict=True)]
    rows = [f"| {name} | {spread(values)} |" for name, values in rates.items()]
    table = ["| form | images/s, median (range) |", "|---|---|", *rows, f"| fit / best bare, pair by pair | {spread(ratios)} |"]
    record("Overhead of the loop", "python -m benchmarks.overhead", "\n".join(table))
    return statistics.median(ratios)


def bare_epoch(engine, count):
    """Nothing but the steps."""
    engine.begin(epoch=1)
    taken = 1
    while taken:
        taken, _ = engine.train(count)
    jax.block_until_ready(engine.states)


def by_hand(engine, step, dataset, options):
    """What one would write without the engine, which only makes the first state."""
    engine.begin(epoch=1)
    held, data = [engine.states[0]], jax.device_put(dataset.arrays)

    @partial(jax.jit, donate_argnums=0)
    def loop(ts, data, order, valid):
        def body(i, ts):
            return step(ts, jax.tree.map(lambda a: a[order[i]], data), valid[i])

        return jax.lax.fori_loop(0, len(order), body, ts)

    def epoch():
        order, valid = epoch_order(len(dataset), options.batch_size, seed=0, epoch=1, shuffle=True)
        held[0] = jax.block_until_ready(loop(held[0], data, order, valid))

    return epoch


def measure(forms, examples, rounds):
    """{form: examples a second in each round}, the forms taking turns; the first round, which compiles, is left out."""
    rates = {name: [] for name in forms}
    for i in range(rounds + 1):
        for name, epoch in forms.items():
            start = time.perf_counter()
            epoch()
            if i > 0:
                rates[name].append(examples / (time.perf_counter() - start))
    return rates


def log_to(file):
    """Log lines go to a file, as in a run."""
    logger = logging.getLogger("main")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.FileHandler(file))
    logger.propagate = False


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
