"""What the loop costs: its epochs, with logging and metrics on, against a bare loop over the same
compiled step. What watching costs: epochs of the sample with all logging, callbacks and trackers
on, with those of config.json, and with all off, evaluation included.

python -m benchmarks.overhead [rounds]
the sample of config.json; epochs interleaved in one process
"""

import json
import logging
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax

from benchmarks.results import record, spread
from data_loader.loader import epoch_order
from training.devices.options import MeshOptions
from training.devices.sharding import Plan
from training.engine import Trainer
from training.fit import assemble
from training.recipe import compose
from training.update import with_refusal
from training.watching.metric_log import MetricLog
from wiring.build import build
from wiring.config import read

OFF = ["logging.every_steps=0", "logging.learning_rate=false", "callbacks=[]"]
KEYS = (
    "log_all",
    "learning_rate",
    "gradient_norm",
    "parameter_norm",
    "leaf_statistics",
    "histograms",
)
TRACKERS = (
    '["console", "jsonl", "csv", "tensorboard", {"name": "wandb", "args": {"mode": "offline"}}]'
)
CALLBACKS = (
    "confusion_matrix",
    "sample_images",
    "gradient_spike_monitor",
    "learning_rate_monitor",
    "profiler",
    {"name": "early_stopping", "args": {"patience": 10**6}},
    {"name": "reduce_on_plateau", "args": {"monitor": "test_loss", "patience": 10**6}},
)
ON = [
    *(f"logging.{key}=true" for key in KEYS),
    f"logging.trackers={TRACKERS}",
    f"callbacks={json.dumps(CALLBACKS)}",
]


def main(rounds=15):
    with tempfile.TemporaryDirectory() as folder:
        log_to(Path(folder) / "train.log")
        loop_against_bare_steps(Path(folder), rounds)
        watching(Path(folder), rounds)


def loop_against_bare_steps(folder, rounds):
    """The loop, which logs every 22nd step, against its steps alone."""
    loop, recipe, data = loop_of(folder / "loop", ["training.eval_every=0"])
    trainers = [trainer_of(recipe, {"train": data["train"]}) for _ in range(3)]
    modes = trainers[2].modes["train"]["epoch"]
    step = with_refusal(recipe.make_update(unroll=False).step, modes)
    forms = {
        "fit": loop.epoch,
        "bare, one call per epoch": partial(bare_epoch, trainers[0], 10**9),
        "bare, one call per step": partial(bare_epoch, trainers[1], 1),
        "by hand, one call per epoch": by_hand(trainers[2], step, data["train"], recipe.loader),
    }
    rates = measure(forms, len(data["train"]), rounds)
    ratios = {
        f"fit / {name}": [fit / other for fit, other in zip(rates["fit"], rates[name], strict=True)]
        for name in list(forms)[1:]
    }
    record("Overhead of the loop", "python -m benchmarks.overhead", table(rates, ratios))


def watching(folder, rounds):
    """Epochs with their evaluation, including what the trackers still have to do at their end."""
    forms = {"all off": OFF, "as in config.json": [], "all on": ON}
    loops = {name: loop_of(folder / name, overrides)[0] for name, overrides in forms.items()}
    epochs = {name: partial(epoch_and_trackers, loop) for name, loop in loops.items()}
    rates = measure(epochs, loops["all off"].trainer.feed.size, rounds)
    for loop in loops.values():
        loop.ask("on_end")
        close(loop)
    off = rates["all off"]
    ratios = {
        f"{name} / all off": [a / b for a, b in zip(rates[name], off, strict=True)]
        for name in list(forms)[1:]
    }
    record("What watching costs", "python -m benchmarks.overhead", table(rates, ratios))


def loop_of(folder, overrides):
    """(a Loop of the sample that writes log lines into a folder, its recipe, its data)."""
    folder.mkdir()
    parts = build(read("config.json", ["data=digits", *overrides]), "config.json")
    recipe, data = compose(parts, Plan.on_paper(MeshOptions(), None)), parts.data.load()
    recipe = recipe._replace(checkpoint=replace(recipe.checkpoint, every_epochs=0, monitor=None))
    record = {"config": parts.config, "facts": parts.facts, "data": {}}
    loop, _ = assemble(recipe, Trainer(recipe, data), data, folder, record)
    loop.ask("on_start")
    loop.run.epochs = 10**9
    return loop, recipe, data


def trainer_of(recipe, sets):
    """A started Trainer."""
    trainer = Trainer(recipe, sets)
    trainer.start()
    return trainer


def publisher_of(loop):
    """The Publisher that passes a run's values to its trackers."""
    return next(each for each in loop.observers if isinstance(each, MetricLog)).publish


def close(loop):
    """End the trackers."""
    publisher_of(loop).close({})


def epoch_and_trackers(loop):
    """One epoch, until the trackers have processed everything that was logged in it."""
    loop.epoch()
    channels = publisher_of(loop).channels
    while any(channel.queue.qsize() or channel.since is not None for channel in channels):
        time.sleep(0.001)


def table(rates, ratios):
    """Images per second of each form, and the ratios, round by round."""
    rows = [f"| {name} | {spread(values)} |" for name, values in (rates | ratios).items()]
    return "\n".join(["| form | images/s, median (range) |", "|---|---|", *rows])


def bare_epoch(trainer, count):
    """The steps of an epoch alone, `count` steps per call at most."""
    trainer.begin(epoch=1)
    taken = 1
    while taken:
        taken, _ = trainer.train(count)
    jax.block_until_ready(trainer.states)


def by_hand(trainer, step, dataset, options):
    """The loop that one would write without the trainer, which only makes the first state here."""
    trainer.begin(epoch=1)
    carry, data = [trainer.states[0]], jax.device_put(dataset.arrays)

    @partial(jax.jit, donate_argnums=0)
    def loop(ts, data, order, valid):
        def body(i, ts):
            return step(ts, jax.tree.map(lambda a: a[order[i]], data), valid[i])[0]

        return jax.lax.fori_loop(0, len(order), body, ts)

    def epoch():
        order, valid = epoch_order(len(dataset), options.batch_size, seed=0, epoch=1, shuffle=True)
        carry[0] = jax.block_until_ready(loop(carry[0], data, order, valid))

    return epoch


def measure(forms, examples, rounds):
    """{form: examples per second in each round}, the forms taking turns; the first round, which
    compiles, is left out."""
    rates = {name: [] for name in forms}
    for i in range(rounds + 1):
        for name, epoch in forms.items():
            start = time.perf_counter()
            epoch()
            if i > 0:
                rates[name].append(examples / (time.perf_counter() - start))
    return rates


def log_to(file):
    """Send log lines to a file, as in a run."""
    logger = logging.getLogger("main")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.FileHandler(file))
    logger.propagate = False


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
