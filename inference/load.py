"""Load a trained model from its checkpoint: to use it in Python, or as the function to export.

from inference.load import load

loaded = load("saved/MNIST_Sample/RUN/checkpoint-epoch_10.params")
logits = loaded.predict(images)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from data_loader.base import Tokenizer, class_names
from data_loader.table import MISSING
from data_loader.tokenizers.saved import from_json
from inference.generate import text_pieces
from inference.lowering.trace import describe, of_batch
from model.base import Model
from model.layers.activations import softmax
from model.layers.blocks import unrolled
from model.sampling import Sampling
from training.checkpoint.pretrained import Pretrained, merged, with_base
from training.checkpoint.probe import EXAMPLES, Probe, check_meaning, probed_spec
from training.checkpoint.record import check_described, check_keys
from training.checkpoint.storage import checkpoint_at
from training.objective import outputs
from training.preprocess import with_recorded
from utils import UserError, first_line, named_leaves
from wiring.build import build_to_ship, facts_of_config
from wiring.config import override, read
from wiring.own_modules import look_in
from wiring.vary import of_replica

LOSSES_OF_NUMBERS = ("binary_cross_entropy", "huber", "mae", "mse")
PASS_ONE = "pass a config with -c or, from Python, the model: load(path, model, preprocess=[...])"


Preprocess = Callable[[PyTree], PyTree]  # of one raw input


class Form(NamedTuple):
    """What an exported file takes and returns."""

    layout: str | None = "nhwc"  # None until it is known: that of the given shape, or nhwc
    preprocess: bool = False  # whether it takes raw inputs
    softmax: bool = False  # whether it returns probabilities


NHWC = Form()


class Exportable(NamedTuple):
    """`function(weights, inputs)` takes a batch; `inputs` is the spec of one example."""

    function: Callable[[Any, PyTree], PyTree]
    weights: dict[str, PyTree]  # {"params": ..., "state": ...} on the host
    inputs: PyTree
    preprocess: Sequence[Preprocess]  # the preprocessing that the function leaves to its caller
    form: Form
    parts: Any  # the built config, or `no_parts`; its `data` is None if it cannot be built
    data_error: str  # why `data` is None, or empty
    record: dict[str, Any]  # the checkpoint's metadata

    @property
    def config(self) -> dict[str, Any]:
        """The config, with its defaults."""
        return self.parts.config

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes: those that the run recorded, else those of the data, or
        None."""
        return known_classes(self.record, self.parts.data)

    @property
    def output_kind(self) -> str:
        """What the outputs are: "logits" or "probabilities" of classes, or "numbers"."""
        return output_kind(self.config, self.form, self.classes)

    @property
    def table(self) -> dict[str, Any] | None:
        """How a file with more rows of the table is read, as the arguments of `rows_of`; None for
        other data."""
        if not (columns := self.parts.facts.get("columns")):
            return None
        data = self.config["data"]
        args = data["args"] if isinstance(data, dict) and data.get("name") == "csv" else {}
        given = {name: args[name] for name in ("missing", "separator") if name in args}
        return {"columns": columns, "missing": MISSING, "separator": ","} | given

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that the run has recorded, or None."""
        return recorded_tokenizer(self.record, self.parts.source)


@dataclass(frozen=True, eq=False, repr=False)
class Loaded:
    """A trained model with all that is needed to use it."""

    path: Path  # of the checkpoint
    model: Model  # model.apply(params, state, x) takes preprocessed inputs
    params: PyTree
    state: PyTree  # the model's running statistics
    config: dict[str, Any]  # of the run, with all defaults; after `fit`, what was passed to it
    classes: list[str]  # the class names, as far as they are known
    preprocess: tuple[Preprocess, ...]  # functions of one raw input
    inputs: PyTree  # shape and dtype of one raw input; None if unknown
    record: dict[str, Any]  # the metadata of the checkpoint: epoch, step, metrics
    model_inputs: PyTree = None  # shape and dtype of one input of the model; None if unknown

    def __repr__(self) -> str:
        size = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return f"Loaded({str(self.path)!r}, {size:,} parameters, step {self.record.get('step')})"

    def predict(self, x: PyTree, batch_size: int = 64) -> PyTree:
        """The outputs for raw inputs, an array, or a dict of them, with one row per input.

        They are computed in batches of this size; the last one is padded, so that each batch size
        is compiled only once.
        """
        if isinstance(x, list):
            raise UserError("predict: x is a list; pass an array: np.asarray(x)")
        x = jax.tree.map(np.asarray, x)
        count = self.checked_length(x)
        vocab_size = self.record.get("facts", {}).get("vocab_size")
        check_tokens(named_leaves(x), vocab_size, "predict: input {}".format)
        computed = []
        for start in range(0, count, batch_size):
            rows = np.arange(start, start + batch_size)
            rows = np.where(rows < count, rows, start)
            batch = jax.tree.map(lambda a, rows=rows: a[rows], x)
            computed.append(jax.tree.map(np.asarray, self.outputs(batch, x)))
        for name, leaf in named_leaves(computed[0]).items():
            if leaf.shape[:1] != (batch_size,):
                where = f"predict: {name}" if name else "predict: the output"
                found = f"has the shape {leaf.shape} for {batch_size} inputs"
                raise UserError(f"{where} {found}; it must have one row per input")
        return jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *computed)

    def outputs(self, batch: PyTree, x: PyTree) -> PyTree:
        """The outputs of one batch of the raw inputs x."""
        try:
            return self.program(self.params, self.state, batch)
        except Exception as error:  # the model and the preprocessing may be the user's own
            if not self.preprocess:  # a run of fit: its model may take other shapes as well
                check_one(x, self.model_inputs, self.shapes)
                check_shapes(x, self.model_inputs, self.shapes)
            one = jax.tree.map(lambda a: a[0], x)
            why = f"fails on inputs of {forms(one)}: {describe(error)}"
            raise UserError(f"predict: {why}") from error

    def generate(self, prompt: str = "", tokens: int = 200, **options: Any) -> str:
        """The prompt and the text that follows it, of up to `tokens` tokens; without a prompt, a
        new document. `options` are temperature, top_k, top_p and seed, as on the command line."""
        if not isinstance(prompt, str):
            found = f"must be a text, got {type(prompt).__name__}"
            raise UserError(f"generate: prompt {found}; model/generate.py takes tokens")
        seed = options.pop("seed", 0)
        try:
            sampling = Sampling(**options)
        except TypeError as error:
            known = "temperature, top_k, top_p, seed"
            raise UserError(f"generate: {error}; the options are {known}") from error
        return "".join(text_pieces(self, prompt, tokens, sampling, seed))

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that the run has recorded; None if it was not trained on text."""
        return recorded_tokenizer(self.record, self.path)

    @property
    def shapes(self) -> Callable[[PyTree], dict[str, Any]]:
        """The function that returns the shapes that must be equal; texts may have any length."""
        return any_length if getattr(self.model, "cache", None) else exact_shapes

    @cached_property
    def program(self) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
        return jax.jit(partial(outputs, self.model, self.preprocess))

    def checked_length(self, x: PyTree) -> int:
        """The number of inputs; raises if they are not what the model was trained on."""
        check_one(x, self.inputs, self.shapes)
        leaves = named_leaves(x)
        lengths = {
            name or "x": leaf.shape[0] if leaf.ndim else None for name, leaf in leaves.items()
        }
        if len(set(lengths.values())) != 1 or not all(lengths.values()):
            found = ", ".join(f"{name}: {n or 'none'}" for name, n in lengths.items()) or "nothing"
            fix = "pass an array, or a dict of arrays, as the data has them"
            raise UserError(f"predict: x must have one row per input, found {found}; {fix}")
        check_shapes(x, self.inputs, self.shapes)
        return next(iter(leaves.values())).shape[0]


def no_parts(config: dict[str, Any]) -> SimpleNamespace:
    """The `parts` of an Exportable that was not built from a config: it has no data and no loss."""
    parts = {"data": None, "facts": {}, "loss": None, "metrics": {}, "preprocess": ()}
    return SimpleNamespace(**parts, config=config)


def load(
    path: str | Path,
    model: Model | None = None,
    *,
    preprocess: Sequence[Preprocess] = (),
    config: str | Path | None = None,
    trust: bool = False,
    best: bool = False,
) -> Loaded:
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
    record = weights.record
    check_keys(checkpoint, record, record)
    written_config, raw = record.get("config", {}), None
    if model is None:
        found, name, is_trusted, folders = find_config(config, checkpoint, record, (), trust)
        facts = stored_facts(record)
        parts, _ = build_to_ship(found, name, facts, trusted=is_trusted, folders=folders)
        parts = with_recorded(parts, written_config, checkpoint)
        assert parts.config is not None  # since they were built from one
        model, preprocess, written_config = parts.model, parts.preprocess, parts.config
        raw, inputs = input_specs(parts, facts, None)
        if own_inputs(parts.model):  # predict takes what the model takes
            preprocess, raw = (), inputs
        classes = known_classes(record, parts.data) or []
    else:
        check_given(model, preprocess)
        classes = known_classes(record, None) or []
        inputs = own_inputs(model) or probed_spec(weights.probe)
    trees = checked_weights(weights, model, inputs, written_config, str(checkpoint))
    if record.get("written_by") == "fit":
        check_described(checkpoint, record.get("preprocess"), preprocess)
    written = tuple(preprocess), raw, record, inputs
    return Loaded(checkpoint, *trees, written_config, classes, *written)


def check_given(model: Model, preprocess: Sequence[Preprocess]) -> None:
    """Refuse a model or preprocessing that cannot be one."""
    if isinstance(model, type) or not (hasattr(model, "init") and hasattr(model, "apply")):
        name = getattr(model, "__name__", repr(model))
        raise UserError(f"load: model must be what its function returns, as mlp(...), got {name}")
    if not isinstance(preprocess, list | tuple) or not all(map(callable, preprocess)):
        raise UserError(f"load: preprocess must be a list of functions, got {preprocess!r}")


def checked_weights(
    weights: Pretrained, model: Model, inputs: PyTree, config: dict[str, Any], source: str
) -> tuple[Model, PyTree, PyTree]:
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
    config_file: str | Path | None,
    checkpoint: str | Path,
    *,
    overrides: Sequence[str] = (),
    trusted: bool = True,
    shape: Sequence[int] | None = None,
    batch: int | None = None,
    form: Form = NHWC,
) -> Exportable:
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
    assert parts.config is not None  # since they were built from one
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


def forward(
    model: Model,
    preprocess: Sequence[Preprocess],
    form: Form,
    weights: dict[str, PyTree],
    x: PyTree,
) -> PyTree:
    """The model's output, with the input and output conversions of `form`."""
    if form.layout == "nchw":
        x = jnp.moveaxis(x, 1, -1)
    for fn in preprocess:
        x = jax.vmap(fn)(x)
    out, _ = model.apply(weights["params"], weights["state"], x, train=False, key=None)
    return softmax(out) if form.softmax else out


def prepare(preprocess: Sequence[Preprocess], form: Form, raw: PyTree) -> PyTree:
    """Convert a batch of raw inputs to what the function takes."""
    for fn in preprocess:
        raw = jax.vmap(fn)(raw)
    if form.layout == "nchw":
        raw = np.moveaxis(np.asarray(raw), -1, 1)
    return jax.tree.map(np.asarray, raw)


def find_config(
    config_file: str | Path | None,
    checkpoint: str | Path,
    record: dict[str, Any],
    overrides: Sequence[str],
    trusted: bool,
) -> tuple[dict[str, Any], str, bool, Sequence[Path]]:
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


def stored_facts(record: dict[str, Any]) -> dict[str, Any]:
    """The facts about the training data that the checkpoint stores."""
    facts = record.get("facts", {})
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()
    }


def model_shapes(model: Model, source: str) -> tuple[PyTree, PyTree]:
    """(params, state) of a model, as shapes."""
    try:
        return jax.eval_shape(model.init, jax.random.key(0))
    except Exception as error:
        raise UserError(f"{source}: model: cannot be initialized: {describe(error)}") from error


def check_applies(
    model: Model, shapes: tuple[PyTree, PyTree], inputs: PyTree, size: int, source: str, form: Form
) -> None:
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


def output_kind(config: dict[str, Any], form: Form, classes: Sequence[str] | None) -> str:
    """Exportable.output_kind, by the loss of a config and the names of the classes. With a user's
    own loss, the outputs are logits if the classes have names."""
    loss = config.get("loss")
    loss = loss.get("name") if isinstance(loss, dict) else loss
    own = classes and loss not in (None, *LOSSES_OF_NUMBERS)
    if loss == "cross_entropy" or own:
        return "probabilities" if form.softmax else "logits"
    return "numbers"


def known_classes(record: dict[str, Any], data: object) -> list[str] | None:
    """The names of the classes: those that the run recorded, else those of the data, or None."""
    return as_names(record.get("classes")) or class_names(data)


def as_names(classes: object) -> list[str]:
    return list(map(str, classes)) if isinstance(classes, list) else []


def known_shape(
    config: dict[str, Any],
    source: str,
    facts: dict[str, Any],
    trusted: bool,
    folders: Sequence[Path] = (),
) -> tuple[int, ...] | None:
    """The shape of one input by the checkpoint or else the config's data; None if unknown."""
    if "input_shape" not in facts:
        facts = facts_of_config(config, source, trusted, folders)
    return facts.get("input_shape")


def channels_last(
    shape: Sequence[int] | None, layout: str | None, known: Sequence[int] | None
) -> tuple[Sequence[int] | None, str]:
    """(a shape given by the user, with the channels last; the layout that callers pass).

    The number of channels, which is that of the `known` shape, shows where a shape has them.
    """
    if shape is None or len(shape) != 3:
        return shape, layout or "nhwc"
    channels = known[-1] if known and len(known) == 3 else None
    first, last = shape[0] == channels != shape[2], shape[0] != channels == shape[2]
    channels_moved = (*shape[1:], shape[0])
    if layout is None and first:
        layout = "nchw"
        print(f"{as_input(shape)} has the channels first, so the files take images in nchw")
    if layout == "nchw" and last:
        fix = as_input((shape[2], *shape[:2]))
        raise UserError(f"{as_input(shape)}: --input-layout nchw has the channels first: {fix}")
    if layout == "nhwc" and first:
        fix = f"{as_input(channels_moved)}, or --input-layout nchw"
        raise UserError(f"{as_input(shape)}: --input-layout nhwc has the channels last: {fix}")
    return (channels_moved, layout) if layout == "nchw" else (shape, "nhwc")


def as_input(shape: Sequence[int]) -> str:
    """The option for a shape of one input."""
    return f"--input {' '.join(map(str, (1, *shape)))}"


def input_specs(
    parts: Any, facts: dict[str, Any], shape: Sequence[int] | None
) -> tuple[PyTree, PyTree]:
    """(shape and dtype of one raw input, those of one input of the model); None if unknown."""
    if own := own_inputs(parts.model):
        if shape is not None:
            raise several_inputs(own)
        return None, own
    raw = x = raw_input(parts, facts)
    if raw is not None:
        try:
            for fn in parts.preprocess:
                x = jax.eval_shape(fn, x)
        except Exception as error:  # preprocessing may be the user's own code
            raise UserError(f"preprocess: does not fit the inputs: {first_line(error)}") from error
        if shape is None or tuple(shape) == getattr(x, "shape", None):
            return raw, x
        if not hasattr(x, "shape"):
            raise several_inputs(x)
        return None, jax.ShapeDtypeStruct(tuple(shape), x.dtype)
    shape = shape or facts.get("input_shape")
    if shape is None:
        return None, None
    dtype = jnp.int32 if "vocab_size" in facts else jnp.float32
    return None, jax.ShapeDtypeStruct(tuple(shape), dtype)


def raw_input(parts: Any, facts: dict[str, Any]) -> PyTree:
    """The shape and dtype of one raw input of the data, or of a row with the columns that a
    checkpoint has recorded of its table; None if unknown."""
    if isinstance(parts.example, tuple | list):
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype), parts.example[0]
        )
    columns = facts.get("columns")
    return jax.ShapeDtypeStruct((len(columns),), jnp.float32) if columns else None


def own_inputs(model: Model) -> PyTree:
    """The shapes of one example that the model declares; None if it takes those of the data."""
    inputs = getattr(model, "inputs", None)
    return inputs() if inputs else None


def several_inputs(inputs: PyTree) -> UserError:
    names = ", ".join(named_leaves(inputs))
    return UserError(f"--input: the model takes several inputs ({names}); leave it out")


def channels_first(inputs: PyTree) -> jax.ShapeDtypeStruct:
    """The spec of one image with its channels first."""
    leaves = jax.tree.leaves(inputs)
    if len(leaves) != 1 or len(leaves[0].shape) != 3:
        shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
        raise UserError(
            "--input-layout nchw: needs a model with one image input of (height, width, channels); "
            f"this one takes {shapes}"
        )
    height, width, channels = inputs.shape
    return jax.ShapeDtypeStruct((channels, height, width), inputs.dtype)


def check_one(x: PyTree, wanted: PyTree, shapes: Callable[[PyTree], object]) -> None:
    """Refuse one input in place of several."""
    if wanted is not None and shapes(x) == shapes(wanted):
        fix = "this is one input; add an axis in front, as x[None]"
        raise UserError(f"predict: x must have one row per input; {fix}")


def check_shapes(x: PyTree, wanted: PyTree, shapes: Callable[[PyTree], object]) -> None:
    """Refuse inputs whose shapes are not the wanted ones, if these are known."""
    one = jax.tree.map(lambda a: a[0], x)
    if wanted is not None and shapes(one) != shapes(wanted):
        found = f"takes inputs of {forms(wanted)}, these are {forms(one)}"
        raise UserError(f"predict: the model {found}; pass them as the training data had them")


def recorded_tokenizer(record: dict[str, Any], source: object) -> Tokenizer | None:
    """The tokenizer in the record of a run, or None."""
    text = record.get("tokenizer")
    return text and from_json(text, f"{source}: tokenizer")


def exact_shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """The shape of every leaf, by name."""
    return {name: np.shape(leaf) for name, leaf in named_leaves(tree).items()}


def any_length(tree: PyTree) -> dict[str, int]:
    """The number of axes of every leaf, by name: a decoder of text takes texts of any length."""
    return {name: np.ndim(leaf) for name, leaf in named_leaves(tree).items()}


def forms(tree: PyTree) -> str:
    """The types and shapes of a tree's leaves, in words."""
    named = named_leaves(tree).items()
    return ", ".join(f"{name} {a.dtype}{list(a.shape)}".strip() for name, a in named)


def check_tokens(
    arrays: Mapping[str, np.ndarray], vocab_size: int | None, name_of: Callable[[int], str]
) -> None:
    """Raise for the first token outside the vocabulary in the arrays {name: one row per input}.

    `name_of(row)` is the name of an input in messages. The tokens are the only array, or the one
    that is called so, as beside the numbers of documents. Without a `vocab_size`, nothing is known.
    """
    tokens = next(iter(arrays.values())) if len(arrays) == 1 else arrays.get("tokens")
    if type(vocab_size) is not int or tokens is None or tokens.dtype.kind not in "iu":
        return
    outside = (tokens < 0) | (tokens >= vocab_size)
    if outside.any():
        row, *place = map(int, np.argwhere(outside)[0])
        found = f"token {', '.join(map(str, place))} is {tokens[(row, *place)]}"
        raise UserError(
            f"{name_of(row)}: {found}, outside the vocabulary 0..{vocab_size - 1}; encode the text "
            "with the tokenizer of the run"
        )
