"""Load a trained model from its checkpoint: to use it in Python, or as the function to export.

from inference.load import load

loaded = load("saved/MNIST_Sample/RUN/checkpoint-epoch_10.params")
logits = loaded.predict(images)
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from data_loader.base import class_names
from data_loader.table import MISSING
from inference.input_shape import (
    channels_first,
    channels_last,
    input_specs,
    known_shape,
    own_inputs,
)
from inference.loaded import Loaded, recorded_tokenizer
from inference.lowering.trace import describe, of_batch
from model.layers.activations import softmax
from model.layers.blocks import unrolled
from training.checkpoint.pretrained import Pretrained, merged, with_base
from training.checkpoint.probe import EXAMPLES, Probe, check_meaning, probed_spec
from training.checkpoint.record import check_described, check_keys
from training.checkpoint.storage import checkpoint_at
from training.preprocess import with_recorded
from utils import UserError, named_leaves
from wiring.build import build_to_ship
from wiring.config import override, read
from wiring.own_modules import look_in
from wiring.vary import of_replica


class Form(NamedTuple):
    """What an exported file takes and returns."""

    layout: str | None = "nhwc"  # None until it is known: that of the given shape, or nhwc
    preprocess: bool = False  # whether it takes raw inputs
    softmax: bool = False  # whether it returns probabilities


NHWC = Form()
LOSSES_OF_NUMBERS = ("binary_cross_entropy", "huber", "mae", "mse")
PASS_ONE = "pass a config with -c or, from Python, the model: load(path, model, preprocess=[...])"


class Exportable(NamedTuple):
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

    @property
    def classes(self):
        """The names of the classes: those that the run recorded, else those of the data, or
        None."""
        return known_classes(self.record, self.parts.data)

    @property
    def output_kind(self):
        """What the outputs are: "logits" or "probabilities" of classes, or "numbers"."""
        return output_kind(self.config, self.form, self.classes)

    @property
    def table(self):
        """How a file with more rows of the table is read, as the arguments of `rows_of`; None for
        other data."""
        if not (columns := self.parts.facts.get("columns")):
            return None
        data = self.config["data"]
        args = data["args"] if isinstance(data, dict) and data.get("name") == "csv" else {}
        given = {name: args[name] for name in ("missing", "separator") if name in args}
        return {"columns": columns, "missing": MISSING, "separator": ","} | given

    @property
    def tokenizer(self):
        """The tokenizer that the run has recorded, or None."""
        return recorded_tokenizer(self.record, self.parts.source)


def load(path, model=None, *, preprocess=(), config=None, trust=False, best=False) -> Loaded:
    """The trained model in a checkpoint; of a run's folder, in its newest checkpoint, or in the
    best one by checkpoint.monitor if `best` is true. The `path` of the result says which it is.

    A run of a config stores all that is needed. A run of `fit` stores no functions: pass its
    `model`, and the `preprocess` with which it was trained. `config` is a file to use instead of
    the stored config; only with `trust` may a stored config import its dotted names.
    """
    if model is None and preprocess:
        raise UserError("load: preprocess goes with a model; the config of a run has its own")
    checkpoint = checkpoint_at(path, best)
    weights = Pretrained(checkpoint)
    check_keys(checkpoint, weights.record, weights.record)
    if model is None:
        found = find_config(config, checkpoint, weights.record, (), trust)
        facts = stored_facts(weights.record)
        parts, _ = build_to_ship(*found[:2], facts, trusted=found[2], folders=found[3])
        parts = with_recorded(parts, weights.record.get("config", {}), checkpoint)
        model, preprocess, config = parts.model, parts.preprocess, parts.config
        raw, inputs = input_specs(parts, stored_facts(weights.record), None)
        if own_inputs(model):  # predict takes what the model takes
            preprocess, raw = (), inputs
        classes = known_classes(weights.record, parts.data) or []
    else:
        check_given(model, preprocess)
        config, raw = weights.record.get("config", {}), None
        classes = known_classes(weights.record, None) or []
        inputs = own_inputs(model) or probed_spec(weights.probe)
    model, params, state = checked_weights(weights, model, inputs, config, str(checkpoint))
    trees, record = (model, params, state), weights.record
    if record.get("written_by") == "fit":
        check_described(checkpoint, record.get("preprocess"), preprocess)
    return Loaded(checkpoint, *trees, config, classes, tuple(preprocess), raw, record, inputs)


def check_given(model, preprocess):
    """Refuse a model or preprocessing that cannot be one."""
    if isinstance(model, type) or not (hasattr(model, "init") and hasattr(model, "apply")):
        name = getattr(model, "__name__", repr(model))
        raise UserError(f"load: model must be what its function returns, as mlp(...), got {name}")
    if not isinstance(preprocess, list | tuple) or not all(map(callable, preprocess)):
        raise UserError(f"load: preprocess must be a list of functions, got {preprocess!r}")


def checked_weights(weights, model, inputs, config, source):
    """(the model, params, state) of a checkpoint, after a check that they belong together. A model
    with factors, such as `lora`, is replaced by the plain one with merged weights."""
    shapes = model_shapes(model, source)
    params, state = weights(*shapes)
    state = with_base(model, params, state, config, weights.record, source)
    if weights.probe and inputs is not None:
        probe = Probe(model, of_batch(inputs, EXAMPLES))(params, state)
        check_meaning(weights.path, weights.probe, probe, "use a checkout with the original model/")
    return merged(model, params, state)


def load_to_export(
    config_file, checkpoint, *, overrides=(), trusted=True, shape=None, batch=None, form=NHWC
):
    """Load the weights of a checkpoint into the config's model, as a function to export.

    `shape` is the shape of one input in the layout of `form`, by default that of the data; `batch`
    is the only batch size that the model must accept, by default any. Without a config file, the
    checkpoint's own config is used, which may import nothing unless it is trusted.
    """
    weights = Pretrained(checkpoint)
    check_keys(checkpoint, weights.record, weights.record)
    config, source, trusted, folders = find_config(
        config_file, checkpoint, weights.record, overrides, trusted
    )
    facts = stored_facts(weights.record)
    known = known_shape(config, source, facts, trusted, folders) if shape else None
    shape, layout = channels_last(shape, form.layout, known)
    form = form._replace(layout=layout)
    parts, data_error = build_to_ship(config, source, facts, trusted, shape, folders)
    parts = with_recorded(parts, weights.record.get("config", {}), checkpoint)
    raw, inputs = input_specs(parts, facts, shape)
    if inputs is None:
        raise UserError("--input: the input shape is unknown; pass it, as in --input 1 28 28 1")
    parts.model, params, state = checked_weights(weights, parts.model, inputs, parts.config, source)
    check_applies(parts.model, (params, state), inputs, batch or 1, source, form)
    if form.preprocess and raw is None:
        other = f"the data's inputs do not have the shape {tuple(shape or ())}"
        other = "the model takes other inputs" if own_inputs(parts.model) else other
        needs = "needs the form of the data's raw inputs"
        raise UserError(f"--with-preprocess: {needs}: {data_error or other}")
    preprocess = tuple(parts.preprocess)
    inputs, outside, inside = (raw, (), preprocess) if form.preprocess else (inputs, preprocess, ())
    if form.layout == "nchw":
        inputs = channels_first(inputs)
    function = partial(forward, parts.model, inside, form)
    trees = unrolled({"params": params, "state": state})  # without stacked blocks, as of `scan`
    return Exportable(function, trees, inputs, outside, form, parts, data_error, weights.record)


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
    """(config, its name in messages, whether it may import, the folders that it may import from).
    It is the given file, or the stored one, with the numbers of the checkpoint's replica."""
    replica = record.get("replica", 0)
    if config_file:
        folders, name = look_in(Path(config_file).parent), Path(config_file).name
        return of_replica(read(config_file, overrides), replica), name, True, folders
    if "config" not in record:
        raise UserError(f"{checkpoint}: contains no config; {PASS_ONE}")
    is_run = "step" in record  # else it is the config beside an exported file
    if record.get("written_by") == "fit" or (is_run and "model" not in record["config"]):
        what = "was written by fit, from Python, so it holds weights but not their model"
        raise UserError(f"{checkpoint}: {what}; {PASS_ONE}")
    config = record["config"]
    for text in overrides:
        config = override(config, text)
    folders = look_in(Path(checkpoint).parent) if trusted else ()
    return of_replica(config, replica), str(checkpoint), trusted, folders


def stored_facts(record):
    """The facts about the training data that the checkpoint stores."""
    facts = record.get("facts", {})
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()
    }


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


def output_kind(config, form, classes):
    """Exportable.output_kind, by the loss of a config and the names of the classes. With a user's
    own loss, the outputs are logits if the classes have names."""
    loss = config.get("loss")
    loss = loss.get("name") if isinstance(loss, dict) else loss
    own = classes and loss not in (None, *LOSSES_OF_NUMBERS)
    if loss == "cross_entropy" or own:
        return "probabilities" if form.softmax else "logits"
    return "numbers"


def known_classes(record, data):
    """The names of the classes: those that the run recorded, else those of the data, or None."""
    return as_names(record.get("classes")) or class_names(data)


def as_names(classes):
    return list(map(str, classes)) if isinstance(classes, list) else []
