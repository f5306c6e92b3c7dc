"""What the loop costs: epochs of `fit`, with logging and metrics on, against a loop that one would
write by hand. What watching costs: epochs of the sample with all logging, callbacks and trackers
on, with those of config.json, and with all off, evaluation included.

python -m benchmarks.overhead [--rounds 15]
"""

import json
import tempfile
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.harness import seconds, take_turns
from benchmarks.pausing import PausedRun
from benchmarks.peers.ours import Trainer, model_of
from benchmarks.results import arguments, markdown, ratios, record, spread
from benchmarks.workloads import WORKLOADS, data_of
from data_loader.loader import epoch_order
from training.loss import cross_entropy
from training.optimizers import adamw

WORKLOAD = WORKLOADS["convnext"]._replace(examples=None)
IMAGES = 60_000
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
QUIET = ["checkpoint.every_epochs=0", "checkpoint.monitor=null"]
# {form: (overrides, callbacks)}
FORMS = {
    "all off": (["logging.every_steps=0", "logging.learning_rate=false"], ()),
    "as in config.json": ([], ("confusion_matrix", "sample_images")),
    "all on": (
        [*(f"logging.{key}=true" for key in KEYS), f"logging.trackers={TRACKERS}"],
        CALLBACKS,
    ),
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
    return table(forms, "fit", len(data["train"][0]), rounds, over=True)


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


def watching(rounds):
    """Epochs with their evaluation, including what the trackers still have to do at their end."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: PausedRun(f"{folder}/{name}", [*QUIET, *overrides], callbacks)
            for name, (overrides, callbacks) in FORMS.items()
        }
        text = table({name: run.seconds for name, run in runs.items()}, "all off", IMAGES, rounds)
        for run in runs.values():
            run.end()
    return text


def table(forms, base, images, rounds, over=False):
    """Images per second of each form, and the ratios, round by round: of each form to the base, or,
    with `over`, of the base to each form."""
    calls = {name: partial(rate_of, form, images) for name, form in forms.items()}
    rates = take_turns(calls, rounds)
    rows = [[name, spread(values)] for name, values in rates.items()]
    for name in rates:
        if name != base:
            pair = (base, name) if over else (name, base)
            ratio = ratios(*(rates[each] for each in pair))
            rows.append([" / ".join(pair), spread(ratio)])
    return markdown(["form", "images/s, median (range)"], rows)


def rate_of(epoch, images):
    return images / seconds(epoch)


if __name__ == "__main__":
    main()
