"""What the frameworks without an optimizer of their own share: a workload's optimizer and loss in
Optax, and epochs of a jitted step."""

import jax
import numpy as np
import optax

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


def optimizer_of(workload, examples, decayed):
    """AdamW; `decayed` selects the parameters with weight decay."""
    steps = examples // workload.batch_size * workload.epochs
    rate = workload.lr
    if workload.schedule == "one_cycle":
        warmup = round(workload.warmup * steps)
        rise = optax.linear_schedule(0, rate, warmup)
        fall = optax.linear_schedule(rate, 0, steps - warmup)
        rate = optax.join_schedules([rise, fall], [warmup])
    return optax.adamw(rate, weight_decay=workload.weight_decay, mask=decayed)
