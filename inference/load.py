"""A config and a checkpoint made into what is shipped: a function of weights and inputs, and real examples to try it on."""

import json
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from data_loader.base import loaded
from inference.lowering.trace import named
from model.layers.activations import softmax
from training.checkpoint.pretrained import Pretrained
from training.checkpoint.probe import EXAMPLES, Probe
from training.checkpoint.restore import check_meaning
from utils import UserError, first_line, named_leaves
from wiring.build import build, build_model, build_preprocess
from wiring.config import read

logger = logging.getLogger("main")


class Form(NamedTuple):
    """What goes into an exported file, and what comes out of it."""

    layout: str = "nhwc"
    preprocess: bool = False  # whether raw inputs go in
    softmax: bool = False  # whether probabilities come out


NHWC = Form()


class Shipped(NamedTuple):
    """`function(weights, inputs)` of a batch; `inputs` is the tree of shapes of one example."""

    function: Any
    weights: Any  # {"params": ..., "state": ...} on the host
    inputs: Any
    preprocess: tuple  # what is still to be done to the data's raw inputs
    form: Form
    parts: Any  # of the config; None where they cannot be built, and `why`
    why: str
    config: dict


def load(config_file, checkpoint, *, overrides=(), trusted=True, shape=None, form=NHWC):
    """What the config makes of the weights in a checkpoint; `shape` is that of one input, where the checkpoint's is not meant.

    Without a config file it is the checkpoint's own, which may import nothing unless it is trusted.
    """
    weights = Pretrained(checkpoint)
    record = weights.record
    config, source, trusted = config_of(config_file, checkpoint, record, overrides, trusted)
    parts, model, preprocess, why = built(config, source, trusted, record, shape)
    raw, inputs = example(parts, preprocess, record, shape)
    model_shapes = shapes_of(model, source)
    weights.check(*model_shapes)
    params, state = weights.merged(*model_shapes)
    check_applies(model, model_shapes, inputs, source)
    stored = weights.probe
    if stored:
        spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((EXAMPLES, *leaf.shape), leaf.dtype), inputs)
        mend = "export from a checkout whose model/ is as it was"
        check_meaning(checkpoint, stored, Probe(model, spec)(params, state), mend)
    if form.preprocess and raw is None:
        raise UserError(f"--with-preprocess: the form of raw inputs is not known, since the data cannot be had: {why}")
    inputs, outside, inside = (raw, (), tuple(preprocess)) if form.preprocess else (inputs, tuple(preprocess), ())
    if form.layout == "nchw":
        inputs = channels_first(inputs)
    function, host = partial(forward, model, inside, form), {"params": params, "state": state}
    return Shipped(function, host, inputs, outside, form, parts, why, parts.config if parts else config)


def forward(model, preprocess, form, weights, x):
    """The model's output, with what the form puts before and behind it."""
    if form.layout == "nchw":
        x = jnp.moveaxis(x, 1, -1)
    for fn in preprocess:
        x = jax.vmap(fn)(x)
    out, _ = model.apply(weights["params"], weights["state"], x, train=False, key=None)
    return softmax(out) if form.softmax else out


def prepared(preprocess, form, raw):
    """A batch of raw inputs as the function takes it."""
    for fn in preprocess:
        raw = jax.vmap(fn)(raw)
    if form.layout == "nchw":
        raw = np.moveaxis(np.asarray(raw), -1, 1)
    return jax.tree.map(np.asarray, raw)


def config_of(config_file, checkpoint, record, overrides, trusted):
    """(config, what it is called, whether it may import): the file that is named, or what the checkpoint remembers."""
    if config_file:
        sys.path.append(str(Path(config_file).resolve().parent))  # a dotted name may stand beside the config
        return read(config_file, overrides), Path(config_file).name, True
    if "config" not in record:
        raise UserError(f"{checkpoint}: does not tell its config; name one with -c")
    if overrides:
        raise UserError(f"{overrides[0]}: changes a config; name one with -c")
    return record["config"], str(checkpoint), trusted


def built(config, source, trusted, record, shape):
    """(parts or None, model, preprocessing, why there are no parts): without its data a model can still be built, from what the
    checkpoint knows of them."""
    facts = record.get("facts", {})
    facts = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
    try:
        parts, why = build(json.loads(json.dumps(config)), source, trusted), ""
    except UserError as error:
        parts, why = None, str(error)
    if parts and shape is None:
        return parts, parts.model, parts.preprocess, why
    known = facts | (parts.facts if parts else {}) | ({"input_shape": tuple(shape)} if shape else {})
    try:
        return parts, build_model(config, source, known, trusted), build_preprocess(config, source, trusted), why
    except UserError as error:
        raise UserError(why or str(error)) from error  # all that is wrong with the config


def example(parts, preprocess, record, shape):
    """(the form of one raw input or None, that of one input of the model)"""
    if parts and isinstance(parts.data.example, tuple):
        raw = jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype), parts.data.example[0])
        x = raw
        for fn in preprocess:
            x = jax.eval_shape(fn, x)
        if shape is None:
            return raw, x
        if tuple(shape) == x.shape:
            return raw, x
        return None, jax.ShapeDtypeStruct(tuple(shape), x.dtype)
    shape = shape or record.get("facts", {}).get("input_shape")
    if shape is None:
        raise UserError("--input: the shape of an input is not known; name it, as in --input 1 28 28 1")
    return None, jax.ShapeDtypeStruct(tuple(shape), jnp.float32)


def shapes_of(model, source):
    """(params, state) of a model, as shapes."""
    try:
        return jax.eval_shape(model.init, jax.random.key(0))
    except Exception as error:
        raise UserError(f"{source}: model: cannot be initialized: {first_line(error)}") from error


def check_applies(model, shapes, inputs, source):
    """Refuse an input that the model refuses."""
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), inputs)
    try:
        jax.eval_shape(lambda *args: model.apply(*args, train=False, key=None), *shapes, batch)
    except Exception as error:
        told = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(batch))
        raise UserError(f"{source}: the model refuses an input of {told}: {first_line(error)}") from error


def channels_first(inputs):
    """The form of one image with its channels in front."""
    leaves = jax.tree.leaves(inputs)
    if len(leaves) != 1 or len(leaves[0].shape) != 3:
        found = {name: leaf.shape for name, leaf in named_leaves(inputs).items()}
        raise UserError(f"--input-layout nchw: is for one image of (height, width, channels); the model takes {found}")
    height, width, channels = inputs.shape
    return jax.ShapeDtypeStruct((channels, height, width), inputs.dtype)


class Examples:
    """Real examples of the config's data: ({input: array}, targets), the inputs as the exported function takes them."""

    def __init__(self, shipped):
        if shipped.parts is None:
            raise UserError(shipped.why)
        self.sets, self.shipped = loaded(shipped.parts.data), shipped

    def test(self, count=None):
        """The first ones of the test set, or of the training set where there is no other."""
        return self.batch(self.sets.get("test", self.sets["train"]), count)

    def spread(self, count):
        """Some of the training set, from its first to its last."""
        return self.batch(self.sets["train"], count, spread=True)

    def batch(self, dataset, count, spread=False):
        """`count` examples, or all."""
        count = min(count or len(dataset), len(dataset))
        examples = [dataset[i * len(dataset) // count if spread else i] for i in range(count)]
        if not isinstance(examples[0], tuple):
            raise UserError("the data's examples are no pairs (input, target)")
        raw, targets = (jax.tree.map(lambda *leaves: np.stack(leaves), *side) for side in zip(*examples, strict=True))
        return named(prepared(self.shipped.preprocess, self.shipped.form, raw), "input"), targets
