"""What the loop costs: epochs of `fit`, with logging and metrics on, against a loop that one would
write by hand. What watching costs: epochs of the sample with all logging, callbacks and trackers
on, with those of config.json, with a checkpoint every epoch, and with all off, evaluation included;
each run is a process of its own.

python -m benchmarks.overhead [--rounds 15]
"""

import json
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.harness import Run, seconds, take_turns
from benchmarks.peers.ours import Trainer, model_of
from benchmarks.results import arguments, markdown, ratios, record, spread
from benchmarks.workloads import WORKLOADS, data_of
from data_loader.loader import epoch_order
from training.loss import cross_entropy
from training.optimizers import adamw

WORKLOAD = WORKLOADS["convnext"]._replace(examples=None)
IMAGES = 60_000
EPOCHS = 4  # measured ones of a run, whose first one compiles
STARTED = "STARTING EPOCH"  # in the line that a run logs when an epoch begins
KEYS = ("log_all", "learning_rate", "gradient_norm", "parameter_norm", "leaf_statistics")
KEYS += ("histograms",)
WANDB = {"name": "wandb", "args": {"mode": "offline"}}
TRACKERS = json.dumps(["console", "jsonl", "csv", "tensorboard", WANDB])
CALLBACKS = (
    "confusion_matrix",
    "sample_images",
    "gradient_spike_monitor",
    "learning_rate_monitor",
    "profiler",
    {"name": "early_stopping", "args": {"patience": 10**6}},
    {"name": "reduce_on_plateau", "args": {"monitor": "test_loss", "patience": 10**6}},
)
OFF = ["callbacks=[]", "logging.every_steps=0", "logging.learning_rate=false"]
FORMS = {  # {form: overrides}
    "all off": OFF,
    "a checkpoint every epoch": [*OFF, "checkpoint.every_epochs=1"],
    "as in config.json": [],
    "all on": [
        *(f"logging.{key}=true" for key in KEYS),
        f"logging.trackers={TRACKERS}",
        f"callbacks={json.dumps(CALLBACKS)}",
    ],
}


def main():
    args = arguments("overhead", __doc__, rounds=15)
    record(args, "Overhead of the loop", loop_by_hand(args.rounds))
    record(args, "What watching costs", watching(args.rounds))


def loop_by_hand(rounds):
    """`fit`, which logs every 22nd step, against loops over the same mathematics."""
    data = data_of(WORKLOAD)
    fit = Trainer(WORKLOAD, data, log={"every_steps": 22})
    arrays = jax.device_put(data["train"])
    forms = {
        "fit": fit.epoch,
        "by hand, one call per epoch": by_hand(arrays, at_once=True),
        "by hand, one call per step": by_hand(arrays, at_once=False),
    }
    calls = {form: partial(rate_of, epoch) for form, epoch in forms.items()}
    return table(take_turns(calls, rounds), "fit", over=True)


def by_hand(arrays, at_once):
    """A function that trains for an epoch: all steps in one call, or one by one."""
    model, optimizer = model_of(WORKLOAD), adamw(WORKLOAD.lr, weight_decay=WORKLOAD.weight_decay)

    def loss_fn(params, x, y):
        logits, _ = model.apply(params, {}, x, train=True)
        return jax.vmap(cross_entropy)(logits, y).mean(), (logits.argmax(-1) == y).mean()

    def step(arrays, carry, rows):
        params, opt = carry
        x, y = (array[rows] for array in arrays)
        measured, grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x, y)
        updates, opt = optimizer.update(grads, opt, params)
        return (jax.tree.map(jnp.add, params, updates), opt), measured

    @partial(jax.jit, donate_argnums=0)
    def steps(carry, arrays, order):
        return jax.lax.scan(partial(step, arrays), carry, order)

    params, _ = model.init(jax.random.key(0))
    carry = [(params, optimizer.init(params))]

    def epoch():
        size = WORKLOAD.batch_size
        order, _ = epoch_order(len(arrays[0]), size, seed=0, epoch=1, shuffle=True)
        for rows in [order] if at_once else order[:, None]:
            carry[0], measured = steps(carry[0], arrays, rows)
        jax.block_until_ready(measured)

    return epoch


def rate_of(epoch):
    return IMAGES / seconds(epoch)


def watching(rounds):
    calls = {form: partial(rate_of_run, overrides) for form, overrides in FORMS.items()}
    return table(take_turns(calls, rounds), "all off")


def rate_of_run(overrides):
    """Images per second from the start of the second epoch to that of the last, so with all that
    the run does between epochs, but without its own start and end."""
    epochs = ["data=digits", f"training.epochs={EPOCHS + 2}"]
    no_saves = ["checkpoint.every_epochs=0", "checkpoint.monitor=null"]
    # In the current folder, since the default temporary folder may be in memory.
    with tempfile.TemporaryDirectory(dir=".") as folder:
        run = Run(Path(folder).resolve(), "config.json", *epochs, *no_saves, *overrides)
        _, first, *_, last = [after for after, line in run.lines() if STARTED in line]
    return EPOCHS * IMAGES / (last - first)


def table(rates, base, over=False):
    """Images per second of each form, and the ratios, round by round: of each form to the base, or,
    with `over`, of the base to each form."""
    rows = [[name, spread(values)] for name, values in rates.items()]
    for name in rates:
        if name != base:
            pair = (base, name) if over else (name, base)
            ratio = ratios(*(rates[each] for each in pair))
            rows.append([" / ".join(pair), spread(ratio)])
    return markdown(["form", "images/s, median (range)"], rows)


if __name__ == "__main__":
    main()
