"""A function as a jaxpr whose layers are whole ops, of a batch of any size."""

from typing import NamedTuple

import jax
import numpy as np
from jax import export

from model.layers.op import marks_shown
from utils import UserError, first_line, named_leaves


class Traced(NamedTuple):
    """A jaxpr over the leaves of `weights`, then of `inputs`; all dictionaries are {name: ...} in the jaxpr's order."""

    jaxpr: object
    weights: dict  # arrays on the host
    inputs: dict  # shapes and types
    outputs: dict


def trace(function, weights, inputs, batch=None):
    """The function (weights, inputs) -> outputs traced over examples of the shapes `inputs`, a tree; a batch of None is any size.

    `weights` are {"params": ..., "state": ...}; the names of parameters are those of the model's table, without "params".
    An input, or output, that is no tree is called so.
    """
    size = symbol() if batch is None else batch
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype), inputs)
    try:
        with marks_shown():
            traced = jax.jit(function).trace(jax.tree.map(shape_of, weights), shapes)
    except jax.core.InconclusiveDimensionOperation as error:
        raise UserError(
            f"the model asks for the size of its batch, which is to stay free: {first_line(error)}; fix it with --batch N"
        ) from error
    outputs = named(traced.out_info, "output")
    names = {name.removeprefix("params/"): leaf for name, leaf in named_leaves(weights).items()}
    return Traced(traced.jaxpr, names, named(shapes, "input"), outputs)


def symbol():
    """The size of a batch, of which nothing is known but that it is not 0."""
    return export.symbolic_shape("batch", constraints=["batch >= 1"])[0]


def shape_of(leaf):
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)


def named(tree, alone):
    """The leaves of a tree by their paths."""
    leaves = named_leaves(tree)
    return {alone: leaves[""]} if list(leaves) == [""] else leaves
