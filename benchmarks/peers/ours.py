"""Rawtree: `fit` as a notebook calls it, without evaluation; a callback pauses it every epoch."""

import importlib
import queue
import threading
from functools import partial

import jax

from benchmarks.peers.batches import accuracy_of, device_memory
from benchmarks.peers.mobilenet_v1 import mobilenet_v1
from model.generate import Sampling, generate
from model.gpt import gpt
from training.fit import fit
from training.loss import cross_entropy
from training.optimizers import adamw
from training.schedules import constant, warmup_linear

VARIANTS = ("",)
FOREVER = 10**9  # epochs: the caller of `epoch` decides when to stop


class Trainer:
    """A run in a thread of its own."""

    device_memory = staticmethod(device_memory)

    def __init__(self, workload, data):
        self.workload, self.data = workload, data
        self.model = factory_of(workload.model)(workload.shape, workload.classes, **workload.args)
        params, _ = jax.eval_shape(self.model.init, jax.random.key(0))
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        self.turns = Turns()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        """Returns only on failure; otherwise it waits forever for a request for another epoch."""
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
                precision=workload.precision,
                eval_every=0,
            )
        except BaseException as error:  # a caller that waits for an epoch must not wait forever
            self.turns.done.put(error)

    def epoch(self, _seed):
        """Train for one epoch; the order of the examples is that of `fit`."""
        if self.thread.ident is None:
            self.thread.start()
        else:
            self.turns.resume.put(None)
        loss = self.turns.done.get()
        if isinstance(loss, BaseException):
            raise loss
        return loss

    def accuracy(self):
        apply, run = jax.jit(self.model.apply), self.turns.run
        params, state = run.params, run.state
        return accuracy_of(lambda x: apply(params, state, x)[0], self.data["test"])


def factory_of(name):
    """A model of `model/`, or one that only the benchmarks have."""
    if name == "mobilenet_v1":
        return mobilenet_v1
    return getattr(importlib.import_module(f"model.{name}"), name)


class Turns:
    """A callback that puts the loss of each epoch into `done`, and waits for `resume`."""

    def __init__(self):
        self.resume, self.done = queue.Queue(), queue.Queue()

    def on_row(self, run, row):
        if row.get("end_of_epoch"):
            self.run = run
            self.done.put(row["train_loss"])
            self.resume.get()


class Writer:
    """Generated text, as in a notebook."""

    def __init__(self, workload):
        self.model = gpt(workload.shape, workload.classes, **workload.args)
        self.params, _ = self.model.init(jax.random.key(0))

    def write(self, prompt, count, temperature, top_k):
        sampling = Sampling(temperature, top_k)
        return generate(self.model, self.params, [prompt], count, sampling)[0]


def writer(workload, variant):
    return Writer(workload)


def trainer(workload, data, variant):
    return Trainer(workload, data)
