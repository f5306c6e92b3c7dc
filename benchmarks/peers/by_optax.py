"""A workload's optimizer and loss in Optax, for the frameworks without their own."""

import jax
import optax
from optax.contrib import MuonDimensionNumbers

CLASSES = 10


def mean_loss(logits, labels, label_smoothing):
    if label_smoothing:
        targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), label_smoothing)
        return optax.softmax_cross_entropy(logits, targets).mean()
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def optimizer_of(workload, examples, decayed, outputs_last=True):
    """`decayed` selects the parameters with weight decay; weights are (..., in, out), or
    (out, in, ...) without `outputs_last`."""
    steps = examples // workload.batch_size * workload.epochs
    rate, decay = schedule_of(workload, workload.lr, steps), workload.weight_decay
    if workload.optimizer == "adamw":
        return optax.adamw(rate, weight_decay=decay, mask=decayed)

    def axes(params):
        return jax.tree.map(lambda leaf: muon_axes(leaf.shape, outputs_last), params)

    def labels(params):
        return jax.tree.map(
            lambda leaf: "muon" if muon_axes(leaf.shape, outputs_last) else "adamw", params
        )

    muon = optax.contrib.muon(rate, weight_decay=decay, muon_weight_dimension_numbers=axes)
    adamw_rate = schedule_of(workload, workload.adamw_lr, steps)
    adamw = optax.adamw(adamw_rate, weight_decay=decay, mask=decayed)
    return optax.partition({"muon": muon, "adamw": adamw}, labels)


def schedule_of(workload, rate, steps):
    if workload.schedule == "constant":
        return rate
    warmup = round(workload.warmup * steps)
    rise = optax.linear_schedule(0, rate, warmup)
    fall = optax.linear_schedule(rate, 0, steps - warmup)
    return optax.join_schedules([rise, fall], [warmup])


def muon_axes(shape, outputs_last):
    """The axes of a weight that Muon updates; None for those that AdamW updates: depthwise kernels,
    vectors and the last layer."""
    axes = list(range(len(shape)))[:: 1 if outputs_last else -1]
    if len(shape) not in (2, 4):
        return None
    inputs, outputs = shape[axes[-2] if outputs_last else 1], shape[axes[-1]]
    if inputs == 1 or outputs == CLASSES:
        return None
    return MuonDimensionNumbers(tuple(axes[:-1]), axes[-1])
