"""Rawtree: `fit` as a notebook calls it, its evaluation off, which a callback holds between two epochs."""

import importlib
import queue
import threading
from functools import partial

import jax
import numpy as np

from training.fit import fit
from training.loss import cross_entropy
from training.optimizers import adamw
from training.schedules import constant, warmup_linear

VARIANTS = ("",)
FOREVER = 10**9  # epochs: whoever asks for them decides when it is enough
BATCH = 500  # of the test set


class Trainer:
    """A run in a thread of its own."""

    def __init__(self, workload, data):
        self.workload, self.data = workload, data
        factory = getattr(importlib.import_module(f"model.{workload.model}"), workload.model)
        self.model = factory(workload.shape, 10, **workload.args)
        params, _ = jax.eval_shape(self.model.init, jax.random.key(0))
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        self.turns = Turns()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        """Returns only if it fails: it waits for ever for another epoch."""
        workload = self.workload
        steps = -(-len(self.data["train"][0]) // workload.batch_size) * workload.epochs
        schedules = {
            "constant": constant,
            "one_cycle": partial(warmup_linear, round(workload.warmup * steps), steps=steps),
        }
        try:
            fit(
                self.model,
                self.data["train"],
                optimizer=adamw(workload.lr, weight_decay=workload.weight_decay),
                schedule=schedules[workload.schedule](),
                loss=partial(cross_entropy, label_smoothing=workload.label_smoothing),
                callbacks=[self.turns],
                epochs=FOREVER,
                batch_size=workload.batch_size,
                eval_every=0,
            )
        except BaseException as error:  # whoever waits for an epoch must not wait for ever
            self.turns.done.put(error)

    def epoch(self, _seed):
        """The order is fit's own."""
        if self.thread.ident is None:
            self.thread.start()
        else:
            self.turns.go.put(None)
        loss = self.turns.done.get()
        if isinstance(loss, BaseException):
            raise loss
        return loss

    def accuracy(self):
        (x, y), apply = self.data["test"], jax.jit(self.model.apply)
        params, state = self.turns.view.params, self.turns.view.state
        logits = [apply(params, state, x[i : i + BATCH])[0] for i in range(0, len(x), BATCH)]
        return float(np.mean(np.argmax(np.concatenate(logits), -1) == y))


class Turns:
    """A callback: at the end of an epoch it tells its loss, and waits until it is told to go on."""

    def __init__(self):
        self.go, self.done = queue.Queue(), queue.Queue()

    def on_epoch_end(self, view):
        self.view = view
        self.done.put(view.metrics["train_loss"])
        self.go.get()


def trainer(workload, data, variant):
    return Trainer(workload, data)
