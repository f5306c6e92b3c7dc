"""The optimizer of a workload by Optax, for the frameworks that have none of their own."""

import jax
import optax
from optax.contrib import MuonDimensionNumbers

CLASSES = 10


def optimizer_of(workload, examples, decayed, outputs_last=True):
    """`decayed` answers which parameters decay; weights are (..., in, out), or else (out, in, ...)."""
    steps = examples // workload.batch_size * workload.epochs
    rate, decay = scheduled(workload, workload.lr, steps), workload.weight_decay
    if workload.optimizer == "adamw":
        return optax.adamw(rate, weight_decay=decay, mask=decayed)

    def axes(params):
        return jax.tree.map(lambda leaf: axes_of(leaf.shape, outputs_last), params)

    def labels(params):
        return jax.tree.map(
            lambda leaf: "adamw" if axes_of(leaf.shape, outputs_last) is None else "muon", params
        )

    muon = optax.contrib.muon(rate, weight_decay=decay, muon_weight_dimension_numbers=axes)
    adamw = optax.adamw(
        scheduled(workload, workload.adamw_lr, steps), weight_decay=decay, mask=decayed
    )
    return optax.partition({"muon": muon, "adamw": adamw}, labels)


def scheduled(workload, rate, steps):
    if workload.schedule == "constant":
        return rate
    warmup = round(workload.warmup * steps)
    rise, fall = (
        optax.linear_schedule(0, rate, warmup),
        optax.linear_schedule(rate, 0, steps - warmup),
    )
    return optax.join_schedules([rise, fall], [warmup])


def axes_of(shape, outputs_last):
    """The axes of a map between features; None for depthwise kernels, vectors and the last layer, which are AdamW's."""
    axes = list(range(len(shape)))[:: 1 if outputs_last else -1]
    if (
        len(shape) not in (2, 4)
        or shape[axes[-2] if outputs_last else 1] == 1
        or shape[axes[-1]] == CLASSES
    ):
        return None
    return MuonDimensionNumbers(tuple(axes[:-1]), axes[-1])
