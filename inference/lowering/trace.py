"""A function as a jaxpr whose layers are whole ops, of a batch of any size."""

import traceback
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax import export
from jax.extend.core import ClosedJaxpr, Jaxpr

from model.layers.op import marks_shown
from utils import UserError, first_line, named_leaves

HIDDEN = (str(Path(jax.__file__).parent), __file__)  # whose frames are no place in the user's code


class Traced(NamedTuple):
    """A jaxpr over the leaves of `weights`, then of `inputs`; all dictionaries are {name: ...} in the jaxpr's order."""

    jaxpr: object
    weights: dict  # arrays on the host
    inputs: dict  # shapes and types
    outputs: dict
    precision: (
        str  # the narrowest type of floats that anything in it has: float32, float16 or bfloat16
    )


def trace(function, weights, inputs, batch=None):
    """The function (weights, inputs) -> outputs traced over examples of the shapes `inputs`, a tree; a batch of None is any size.

    `weights` are {"params": ..., "state": ...}; the names of parameters are those of the model's table, without "params".
    An input, or output, that is no tree is called so; an output that is named like an input has "output/" before its name.
    """
    shapes = of_batch(inputs, symbol() if batch is None else batch)
    try:
        traced = traced_once(function, weights, shapes)
    except UserError:
        raise
    except Exception as error:  # of the user's code: of any kind
        raise UserError(refusal(error, function, weights, inputs, batch)) from error
    names = {name.removeprefix("params/"): leaf for name, leaf in named_leaves(weights).items()}
    given = named(shapes, "input")
    return Traced(
        traced.jaxpr, names, given, named(traced.out_info, "output", given), precision(traced.jaxpr)
    )


def of_batch(inputs, size):
    """The shapes of a batch, from those of one example."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype), inputs)


def traced_once(function, weights, shapes):
    with marks_shown():
        return jax.jit(function).trace(jax.tree.map(shape_of, weights), shapes)


def refusal(error, function, weights, inputs, batch):
    """Why the function cannot be traced: that the batch is free is why, if with a batch of 2 it can."""
    told = f"{first_line(error) or type(error).__name__} ({place(error)})"
    if batch is None and (
        isinstance(error, jax.errors.InconclusiveDimensionOperation)
        or traces(function, weights, inputs, 2)
    ):
        return f"the model asks for the size of its batch, which is to stay free: {told}; fix it with --batch N"
    return f"the model cannot be traced: {type(error).__name__}: {told}"


def traces(function, weights, inputs, batch):
    try:
        traced_once(function, weights, of_batch(inputs, batch))
    except Exception:
        return False
    return True


def place(error):
    """The innermost line of the user's code that an error came from."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(HIDDEN)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the model"


def precision(jaxpr):
    """The narrowest type of floats in a jaxpr, by the digits that it keeps."""
    digits = min(mantissas(jaxpr), default=23)
    return "float32" if digits > 10 else "float16" if digits > 7 else "bfloat16"


def mantissas(jaxpr):
    """The sizes of the mantissas of all floats in a jaxpr, and in those within it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for var in (
        *jaxpr.constvars,
        *jaxpr.invars,
        *(var for eqn in jaxpr.eqns for var in eqn.outvars),
    ):
        if jax.dtypes.issubdtype(getattr(var.aval, "dtype", bool), np.floating):
            yield jax.numpy.finfo(var.aval.dtype).nmant
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "reduce_precision":
            yield eqn.params["mantissa_bits"]
        for param in eqn.params.values():
            for inner in param if isinstance(param, tuple | list) else [param]:
                if isinstance(inner, Jaxpr | ClosedJaxpr):
                    yield from mantissas(inner)


def symbol():
    """The size of a batch, of which nothing is known but that it is not 0."""
    return export.symbolic_shape("batch", constraints=["batch >= 1"])[0]


def shape_of(leaf):
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)


def named(tree, alone, taken=()):
    """The leaves of a tree by their paths; one whose name is `taken` has that of a tree that is a leaf before it."""
    leaves = named_leaves(tree)
    names, found = {"": alone}, {}
    for path, leaf in leaves.items():
        name = names.get(path, path)
        while name in taken or name in found:
            name = f"{alone}/{name}"
        found[name] = leaf
    return found
