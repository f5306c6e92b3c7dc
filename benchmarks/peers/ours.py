"""Rawtree: `fit` and `generate` as a notebook calls them; a callback pauses `fit` every epoch."""

import importlib
import queue
import threading
from functools import partial

import jax

from benchmarks.peers import accuracy_of
from model.base import Model
from model.generate import Sampling, generate
from model.gpt import gpt
from model.layers.activations import relu
from model.layers.conv import conv2d, conv2d_init
from model.layers.initializers import he_normal
from model.layers.linear import linear, linear_init
from model.layers.norm import batch_norm, batch_norm_init
from model.layers.pool import global_avg_pool
from training.fit import fit
from training.loss import cross_entropy
from training.optimizers import adamw
from training.schedules import constant, warmup_linear

FOREVER = 10**9  # epochs: the caller of `epoch` decides when to stop


def model_of(workload, **options):
    """The Model of a workload: one of `model/`, or one that only the benchmarks have."""
    name = workload.model
    own = mobilenet_v1 if name == "mobilenet_v1" else None
    factory = own or getattr(importlib.import_module(f"model.{name}"), name)
    return factory(workload.shape, workload.classes, **workload.args, **options)


class Trainer:
    """A run in a thread of its own; `options` are further ones of `fit`."""

    def __init__(self, workload, data, variant="", **options):
        self.workload, self.data, self.options = workload, data, options
        self.model = model_of(workload)
        params, _ = jax.eval_shape(self.model.init, jax.random.key(0))
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        self.turns = Turns()
        self.thread = threading.Thread(target=self.train, daemon=True)

    def train(self):
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
                **self.options,
            )
        except BaseException as error:  # a caller that waits for an epoch must not wait forever
            self.turns.done.put(error)

    def epoch(self, _seed=0):
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

    def device_memory(self):
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


trainer = Trainer


class Turns:
    """A callback that puts the loss of each epoch into `done`, and waits for `resume`."""

    def __init__(self):
        self.every = {"epochs": 1}
        self.resume, self.done = queue.Queue(), queue.Queue()

    def on_evaluated(self, run, name, values):
        self.run = run
        self.done.put(values["train_loss"])
        self.resume.get()


class Writer:
    """Generated text."""

    def __init__(self, workload, variant):
        self.model = gpt(workload.shape, workload.classes, **workload.args)
        self.params, _ = self.model.init(jax.random.key(0))

    def write(self, prompt, count, temperature, top_k):
        sampling = Sampling(temperature, top_k)
        return generate(self.model, self.params, [prompt], count, sampling)[0]


writer = Writer


def mobilenet_v1(input_shape, num_classes, plan) -> Model:
    """MobileNet v1 (Howard et al., 2017) for small images, as a user of our layers writes it: a 3x3
    convolution of the first width, then one block per (width, stride) of the plan: a depthwise 3x3
    and a 1x1 convolution. Each has its batch norm and relu."""
    width = plan[0][0]
    units = [(input_shape[-1], width, 3, 1, 1)]  # in, out, kernel, groups, stride
    for out, stride in plan:
        units += [(width, width, 3, width, stride), (width, out, 1, 1, 1)]
        width = out

    def init(key):
        *keys, head_key = jax.random.split(key, len(units) + 1)
        params, state = [], []
        for k, (in_dim, out_dim, kernel, groups, _) in zip(keys, units, strict=True):
            options = {"groups": groups, "bias": False, "init": he_normal}
            conv = conv2d_init(k, in_dim, out_dim, kernel, **options)
            norm, statistics = batch_norm_init(out_dim)
            params.append({"conv": conv, "norm": norm})
            state.append(statistics)
        head = linear_init(head_key, width, num_classes)
        return {"units": params, "head": head}, {"units": state}

    def apply(params, state, x, *, train=False, key=None):
        new = []
        for unit, before, (*_, stride) in zip(params["units"], state["units"], units, strict=True):
            x = conv2d(unit["conv"], x, stride=stride)
            x, after = batch_norm(unit["norm"], before, x, train=train)
            x = relu(x)
            new.append(after)
        return linear(params["head"], global_avg_pool(x)), {"units": new}

    return Model(init, apply)
