"""Build the function to export, of weights and inputs, from a config and a checkpoint."""

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
from wiring.own_modules import look_in


class Form(NamedTuple):
    """What an exported file takes and returns."""

    layout: str = "nhwc"
    preprocess: bool = False  # whether it takes raw inputs
    softmax: bool = False  # whether it returns probabilities


NHWC = Form()


class LoadedModel(NamedTuple):
    """`function(weights, inputs)` takes a batch; `inputs` is the spec of one example."""

    function: Any
    weights: Any  # {"params": ..., "state": ...} on the host
    inputs: Any
    preprocess: tuple  # the preprocessing that the function leaves to its caller
    form: Form
    parts: Any  # the built config; its `data` is None if the data cannot be built
    data_error: str  # why `data` is None, or empty
    record: dict  # the checkpoint's metadata

    @property
    def config(self):
        """The config, with its defaults."""
        return self.parts.config


def load(config_file, checkpoint, *, overrides=(), trusted=True, shape=None, batch=None, form=NHWC):
    """Load the weights of a checkpoint into the config's model.

    `shape` is the shape of one input, by default that of the data; `batch` is the only batch size
    that the model must accept, by default any. Without a config file, the checkpoint's own config
    is used, which may import nothing unless it is trusted.
    """
    weights = Pretrained(checkpoint)
    config, source, trusted = find_config(
        config_file, checkpoint, weights.record, overrides, trusted
    )
    folders = look_in(Path(config_file or checkpoint).parent) if trusted else ()
    facts = stored_facts(weights.record)
    parts, data_error = build_to_ship(config, source, facts, trusted, shape, folders)
    raw, inputs = input_specs(parts, weights.record, shape)
    shapes = model_shapes(parts.model, source)
    weights.check(*shapes)
    params, state = weights(*shapes)
    check_applies(parts.model, shapes, inputs, batch or 1, source, form)
    if weights.probe:
        probe = Probe(parts.model, of_batch(inputs, EXAMPLES))(params, state)
        fix = "use a checkout with the original model/"
        check_meaning(checkpoint, weights.probe, probe, fix)
    if form.preprocess and raw is None:
        reason = data_error or f"the data's inputs do not have the shape {tuple(shape)}"
        raise UserError(f"--with-preprocess: needs the form of the data's raw inputs: {reason}")
    preprocess = tuple(parts.preprocess)
    inputs, outside, inside = (raw, (), preprocess) if form.preprocess else (inputs, preprocess, ())
    if form.layout == "nchw":
        inputs = channels_first(inputs)
    function = partial(forward, parts.model, inside, form)
    trees = {"params": params, "state": state}
    return LoadedModel(function, trees, inputs, outside, form, parts, data_error, weights.record)


def forward(model, preprocess, form, weights, x):
    """The model's output, with the input and output conversions of `form`."""
    if form.layout == "nchw":
        x = jnp.moveaxis(x, 1, -1)
    for fn in preprocess:
        x = jax.vmap(fn)(x)
    out, _ = model.apply(weights["params"], weights["state"], x, train=False, key=None)
    return softmax(out) if form.softmax else out


def prepare(preprocess, form, raw):
    """Convert a batch of raw inputs to what the function takes."""
    for fn in preprocess:
        raw = jax.vmap(fn)(raw)
    if form.layout == "nchw":
        raw = np.moveaxis(np.asarray(raw), -1, 1)
    return jax.tree.map(np.asarray, raw)


def find_config(config_file, checkpoint, record, overrides, trusted):
    """(config, its name for messages, whether it may import): the given file, or the stored one."""
    if config_file:
        look_in(Path(config_file).parent)
        return read(config_file, overrides), Path(config_file).name, True
    if "config" not in record:
        raise UserError(f"{checkpoint}: contains no config; pass one with -c")
    config = record["config"]
    for text in overrides:
        config = override(config, text)
    if trusted:
        look_in(Path(checkpoint).parent)
    return config, str(checkpoint), trusted


def stored_facts(record):
    """The facts about the training data that the checkpoint stores."""
    facts = record.get("facts", {})
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()
    }


def input_specs(parts, record, shape):
    """(shape and dtype of one raw input or None, those of one input of the model)"""
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
    facts = stored_facts(record)
    shape = shape or facts.get("input_shape")
    if shape is None:
        raise UserError("--input: the input shape is unknown; pass it, as in --input 1 28 28 1")
    dtype = jnp.int32 if "vocab_size" in facts else jnp.float32
    return None, jax.ShapeDtypeStruct(tuple(shape), dtype)


def model_shapes(model, source):
    """(params, state) of a model, as shapes."""
    try:
        return jax.eval_shape(model.init, jax.random.key(0))
    except Exception as error:
        raise UserError(f"{source}: model: cannot be initialized: {describe(error)}") from error


def check_applies(model, shapes, inputs, size, source, form):
    """Raise if the model fails on this input, or if a softmax does not apply to its output."""
    batch = of_batch(inputs, size)
    try:
        out, _ = jax.eval_shape(
            lambda *args: model.apply(*args, train=False, key=None), *shapes, batch
        )
    except Exception as error:
        specs = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(batch))
        message = f"{source}: the model fails on an input of {specs}: {describe(error)}"
        raise UserError(message) from error
    if form.softmax and not hasattr(out, "shape"):
        names = ", ".join(named_leaves(out))
        raise UserError(f"--with-softmax: needs a model with one output; this one has {names}")


def describe(error):
    """An error in the user's code, with its location."""
    return f"{type(error).__name__}: {first_line(error)} ({place(error)})"


def channels_first(inputs):
    """The spec of one image with its channels first."""
    leaves = jax.tree.leaves(inputs)
    if len(leaves) != 1 or len(leaves[0].shape) != 3:
        shapes = {name: leaf.shape for name, leaf in named_leaves(inputs).items()}
        raise UserError(
            "--input-layout nchw: needs a model with one image input of (height, width, channels); "
            f"this one takes {shapes}"
        )
    height, width, channels = inputs.shape
    return jax.ShapeDtypeStruct((channels, height, width), inputs.dtype)


def output_kind(config, form):
    """What the outputs are: "logits" or "probabilities" of classes, or "numbers"."""
    loss = config.get("loss")
    if (loss.get("name") if isinstance(loss, dict) else loss) != "cross_entropy":
        return "numbers"
    return "probabilities" if form.softmax else "logits"
