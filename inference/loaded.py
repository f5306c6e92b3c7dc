"""A trained model in Python, as `load` of inference/load.py returns it."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from data_loader.tokenizers.saved import from_json
from inference.generate import text_pieces
from inference.lowering.trace import describe
from inference.token_check import check_tokens
from model.base import Model
from model.sampling import Sampling
from training.objective import outputs
from utils import UserError, named_leaves


@dataclass(frozen=True, eq=False, repr=False)
class Loaded:
    """A trained model with all that is needed to use it."""

    path: Any  # of the checkpoint
    model: Model  # model.apply(params, state, x) takes preprocessed inputs
    params: Any
    state: Any  # the model's running statistics
    config: dict  # of the run, with all defaults; after `fit`, what was passed to it
    classes: list[str]  # the class names, as far as they are known
    preprocess: tuple  # functions of one raw input
    inputs: Any  # shape and dtype of one raw input; None if unknown
    record: dict  # the metadata of the checkpoint: epoch, step, metrics
    model_inputs: Any = None  # shape and dtype of one input of the model; None if unknown

    def __repr__(self):
        size = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return f"Loaded({str(self.path)!r}, {size:,} parameters, step {self.record.get('step')})"

    def predict(self, x, batch_size=64):
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

    def outputs(self, batch, x):
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

    def generate(self, prompt="", tokens=200, **options):
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
    def tokenizer(self):
        """The tokenizer that the run has recorded; None if it was not trained on text."""
        return recorded_tokenizer(self.record, self.path)

    @property
    def shapes(self):
        """The function that returns the shapes that must be equal; texts may have any length."""
        return any_length if getattr(self.model, "cache", None) else exact_shapes

    @cached_property
    def program(self):
        return jax.jit(partial(outputs, self.model, self.preprocess))

    def checked_length(self, x):
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
        return next(iter(lengths.values()))


def check_one(x, wanted, shapes):
    """Refuse one input in place of several."""
    if wanted is not None and shapes(x) == shapes(wanted):
        fix = "this is one input; add an axis in front, as x[None]"
        raise UserError(f"predict: x must have one row per input; {fix}")


def check_shapes(x, wanted, shapes):
    """Refuse inputs whose shapes are not the wanted ones, if these are known."""
    one = jax.tree.map(lambda a: a[0], x)
    if wanted is not None and shapes(one) != shapes(wanted):
        found = f"takes inputs of {forms(wanted)}, these are {forms(one)}"
        raise UserError(f"predict: the model {found}; pass them as the training data had them")


def recorded_tokenizer(record, source):
    """The tokenizer in the record of a run, or None."""
    text = record.get("tokenizer")
    return text and from_json(text, f"{source}: tokenizer")


def exact_shapes(tree):
    """The shape of every leaf, by name."""
    return {name: np.shape(leaf) for name, leaf in named_leaves(tree).items()}


def any_length(tree):
    """The number of axes of every leaf, by name: a decoder of text takes texts of any length."""
    return {name: np.ndim(leaf) for name, leaf in named_leaves(tree).items()}


def forms(tree):
    """The types and shapes of a tree's leaves, in words."""
    named = named_leaves(tree).items()
    return ", ".join(f"{name} {a.dtype}{list(a.shape)}".strip() for name, a in named)
