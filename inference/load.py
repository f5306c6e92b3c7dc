"""A config and a checkpoint made into what is shipped: a function of weights and inputs."""

import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from inference.lowering.trace import of_batch, place
from model.layers.activations import softmax
from training.checkpoint.pretrained import Pretrained
from training.checkpoint.probe import EXAMPLES, Probe
from training.checkpoint.restore import check_meaning
from utils import UserError, first_line, named_leaves
from wiring.build import build_to_ship
from wiring.config import override, read


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
    parts: Any  # of the config; its data is None where it cannot be had,
    why: str  # for this reason
    record: dict  # of the checkpoint

    @property
    def config(self):
        """The config, with its defaults."""
        return self.parts.config


def load(config_file, checkpoint, *, overrides=(), trusted=True, shape=None, batch=None, form=NHWC):
    """What the config makes of the weights in a checkpoint. `shape` is that of one input, where the data's is not meant, and
    `batch` the only size that it is to take.

    Without a config file it is the checkpoint's own, which may import nothing unless it is trusted.
    """
    weights = Pretrained(checkpoint)
    config, source, trusted = config_of(config_file, checkpoint, weights.record, overrides, trusted)
    parts, missing = build_to_ship(config, source, facts_of(weights.record), trusted, shape)
    raw, inputs = forms(parts, weights.record, shape)
    shapes = shapes_of(parts.model, source)
    weights.check(*shapes)
    params, state = weights(*shapes)
    check_applies(parts.model, shapes, inputs, batch or 1, source, form)
    if weights.probe:
        mend = "use a checkout whose model/ is as it was"
        check_meaning(
            checkpoint,
            weights.probe,
            Probe(parts.model, of_batch(inputs, EXAMPLES))(params, state),
            mend,
        )
    if form.preprocess and raw is None:
        reason = missing or f"its inputs have another shape than {tuple(shape)}"
        raise UserError(
            f"--with-preprocess: takes what raw inputs look like from the data, which does not tell: {reason}"
        )
    preprocess = tuple(parts.preprocess)
    inputs, outside, inside = (raw, (), preprocess) if form.preprocess else (inputs, preprocess, ())
    if form.layout == "nchw":
        inputs = channels_first(inputs)
    function, host = partial(forward, parts.model, inside, form), {"params": params, "state": state}
    return Shipped(function, host, inputs, outside, form, parts, missing, weights.record)


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
        sys.path.append(
            str(Path(config_file).resolve().parent)
        )  # a dotted name may stand beside the config
        return read(config_file, overrides), Path(config_file).name, True
    if "config" not in record:
        raise UserError(f"{checkpoint}: does not tell its config; name one with -c")
    config = record["config"]
    for text in overrides:
        config = override(config, text)
    return config, str(checkpoint), trusted


def facts_of(record):
    """What a checkpoint knows of the data that it was trained on."""
    facts = record.get("facts", {})
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()
    }


def forms(parts, record, shape):
    """(the form of one raw input or None, that of one input of the model)"""
    if parts.data and isinstance(parts.data.example, tuple):
        raw = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype), parts.data.example[0]
        )
        x = raw
        for fn in parts.preprocess:
            x = jax.eval_shape(fn, x)
        if shape is None or tuple(shape) == x.shape:
            return raw, x
        return None, jax.ShapeDtypeStruct(tuple(shape), x.dtype)
    shape = shape or facts_of(record).get("input_shape")
    if shape is None:
        raise UserError(
            "--input: the shape of an input is not known; name it, as in --input 1 28 28 1"
        )
    return None, jax.ShapeDtypeStruct(
        tuple(shape), jnp.int32 if "vocab_size" in facts_of(record) else jnp.float32
    )


def shapes_of(model, source):
    """(params, state) of a model, as shapes."""
    try:
        return jax.eval_shape(model.init, jax.random.key(0))
    except Exception as error:
        raise UserError(f"{source}: model: cannot be initialized: {why(error)}") from error


def check_applies(model, shapes, inputs, size, source, form):
    """Refuse an input that the model refuses, and a softmax of what is no array."""
    batch = of_batch(inputs, size)
    try:
        out, _ = jax.eval_shape(
            lambda *args: model.apply(*args, train=False, key=None), *shapes, batch
        )
    except Exception as error:
        told = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(batch))
        raise UserError(f"{source}: the model fails on an input of {told}: {why(error)}") from error
    if form.softmax and not hasattr(out, "shape"):
        raise UserError(
            f"--with-softmax: is for one output; the model has {', '.join(named_leaves(out))}"
        )


def why(error):
    """What went wrong in the user's code, and where."""
    return f"{type(error).__name__}: {first_line(error)} ({place(error)})"


def channels_first(inputs):
    """The form of one image with its channels in front."""
    leaves = jax.tree.leaves(inputs)
    if len(leaves) != 1 or len(leaves[0].shape) != 3:
        found = {name: leaf.shape for name, leaf in named_leaves(inputs).items()}
        raise UserError(
            f"--input-layout nchw: is for one image of (height, width, channels); the model takes {found}"
        )
    height, width, channels = inputs.shape
    return jax.ShapeDtypeStruct((channels, height, width), inputs.dtype)


def answers(config, form):
    """What the outputs are: "logits" or "probabilities" of classes, or "numbers"."""
    loss = config.get("loss")
    if (loss.get("name") if isinstance(loss, dict) else loss) != "cross_entropy":
        return "numbers"
    return "probabilities" if form.softmax else "logits"
