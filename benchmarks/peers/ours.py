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
from model.layers.conv import (
    conv2d,
    conv2d_init,
    conv_transpose2d,
    conv_transpose2d_init,
)
from model.layers.initializers import he_normal
from model.layers.linear import linear, linear_init
from model.layers.norm import (
    batch_norm,
    batch_norm_init,
    group_norm,
    group_norm_init,
    layer_norm,
    layer_norm_init,
)
from model.layers.pool import global_avg_pool
from model.rnn import rnn
from training.fit import fit
from training.loss import cross_entropy
from training.optimizers import adamw
from training.schedules import constant, warmup_linear

FOREVER = 10**9  # epochs: the caller of `epoch` decides when to stop


def model_of(workload, **options):
    """The Model of a workload: one of `model/`, or one that only the benchmarks have."""
    name = workload.model
    factory = OWN.get(name) or getattr(importlib.import_module(f"model.{name}"), name)
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


def net(input_shape, num_classes, layers) -> Model:
    """Convolutions, each with its norm and relu, as a user of our layers writes them."""

    def init(key):
        *keys, head_key = jax.random.split(key, len(layers) + 1)
        params, state, width = [], [], input_shape[-1]
        for k, layer in zip(keys, layers, strict=True):
            options = {"bias": False, "init": he_normal}
            if layer.kind == "up":
                conv = conv_transpose2d_init(k, width, layer.width, layer.kernel, **options)
            else:
                options["groups"] = layer.groups
                conv = conv2d_init(k, width, layer.width, layer.kernel, **options)
            norm, statistics = norm_init(layer)
            params.append({"conv": conv, "norm": norm})
            state.append(statistics)
            width = layer.width
        head = linear_init(head_key, width, num_classes)
        return {"layers": params, "head": head}, {"layers": state}

    def apply(params, state, x, *, train=False, key=None):
        new = []
        for own, before, layer in zip(params["layers"], state["layers"], layers, strict=True):
            conv = conv_transpose2d if layer.kind == "up" else conv2d
            x = conv(own["conv"], x, stride=layer.stride)
            x, after = normalized(layer, own["norm"], before, x, train)
            x = relu(x)
            new.append(after)
        return linear(params["head"], global_avg_pool(x)), {"layers": new}

    return Model(init, apply)


def norm_init(layer):
    """(params, running statistics)."""
    if layer.norm == "batch":
        return batch_norm_init(layer.width)
    init = {"group": group_norm_init, "layer": layer_norm_init, "none": lambda width: {}}
    return init[layer.norm](layer.width), {}


def normalized(layer, params, state, x, train):
    if layer.norm == "batch":
        return batch_norm(params, state, x, train=train)
    if layer.norm == "group":
        return group_norm(params, x, groups=8), state
    return (layer_norm(params, x) if layer.norm == "layer" else x), state


def sequences(input_shape, num_classes, lengths=False, **options) -> Model:
    """`rnn`, which gets the length of each sequence if they are padded with zeros."""
    model = rnn(input_shape, num_classes, **options)

    def apply(params, state, x, **others):
        if lengths:
            x = {"sequence": x, "length": (x != 0).any(-1).sum(-1)}
        return model.apply(params, state, x, **others)

    return model._replace(apply=apply)


OWN = {"net": net, "rnn": sequences}
