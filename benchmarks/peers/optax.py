"""What the frameworks without an optimizer of their own share: a workload's optimizer and loss in
Optax, and epochs of a jitted step."""

import jax
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from benchmarks.peers import accuracy_of

CLASSES = 10


class Trainer:
    """Trains by `step(carry, x, y) -> (carry, (loss, accuracy))`, where the carry is what it
    updates; `predict(carry, x)` are logits."""

    def __init__(self, workload, data, parameters, carry, step, predict):
        self.data = data if jax.default_backend() == "cpu" else jax.device_put(data)
        self.batch_size, self.parameters = workload.batch_size, parameters
        self.carry, self.step, self.predict = carry, step, predict

    def epoch(self, seed):
        x, y = self.data["train"]
        order, metrics = np.random.default_rng(seed).permutation(len(x)), []
        for i in range(0, len(x) - self.batch_size + 1, self.batch_size):
            rows = order[i : i + self.batch_size]
            self.carry, measured = self.step(self.carry, x[rows], y[rows])
            metrics.append(measured)
        return float(np.mean([loss for loss, _ in jax.device_get(metrics)]))

    def accuracy(self):
        return accuracy_of(lambda x: self.predict(self.carry, x), self.data["test"])

    def device_memory(self):
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def mean_loss(workload, logits, labels):
    if workload.label_smoothing:
        targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), workload.label_smoothing)
        return optax.softmax_cross_entropy(logits, targets).mean()
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def optimizer_of(workload, examples, decayed, outputs_last=True):
    """`decayed` selects the parameters with weight decay; weights are (..., in, out), or
    (out, in, ...) without `outputs_last`."""
    steps = examples // workload.batch_size * workload.epochs
    decay = workload.weight_decay
    adamw_lr = workload.adamw_lr if workload.optimizer == "muon" else workload.lr
    adamw = optax.adamw(schedule_of(workload, adamw_lr, steps), weight_decay=decay, mask=decayed)
    if workload.optimizer == "adamw":
        return adamw

    def of_each(params, function):
        return jax.tree.map(lambda leaf: function(muon_axes(leaf.shape, outputs_last)), params)

    muon = optax.contrib.muon(
        schedule_of(workload, workload.lr, steps),
        weight_decay=decay,
        muon_weight_dimension_numbers=lambda params: of_each(params, lambda axes: axes),
    )
    return optax.partition(
        {"muon": muon, "adamw": adamw},
        lambda params: of_each(params, lambda axes: "muon" if axes else "adamw"),
    )


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
