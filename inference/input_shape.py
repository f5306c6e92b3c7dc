"""The shape and dtype of one input of an exported file, from the model, the data or --input, and
the axis of its channels."""

import jax
import jax.numpy as jnp
import numpy as np

from utils import UserError, first_line, named_leaves
from wiring.build import facts_of_config


def known_shape(config, source, facts, trusted, folders=()):
    """The shape of one input by the checkpoint or else the config's data; None if unknown."""
    if "input_shape" not in facts:
        facts = facts_of_config(config, source, trusted, folders)
    return facts.get("input_shape")


def channels_last(shape, layout, known):
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


def as_input(shape):
    """The option for a shape of one input."""
    return f"--input {' '.join(map(str, (1, *shape)))}"


def input_specs(parts, facts, shape):
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


def raw_input(parts, facts):
    """The shape and dtype of one raw input of the data, or of a row with the columns that a
    checkpoint has recorded of its table; None if unknown."""
    if isinstance(parts.example, tuple | list):
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype), parts.example[0]
        )
    columns = facts.get("columns")
    return jax.ShapeDtypeStruct((len(columns),), jnp.float32) if columns else None


def own_inputs(model):
    """The shapes of one example that the model declares; None if it takes those of the data."""
    inputs = getattr(model, "inputs", None)
    return inputs() if inputs else None


def several_inputs(inputs):
    names = ", ".join(named_leaves(inputs))
    return UserError(f"--input: the model takes several inputs ({names}); leave it out")


def channels_first(inputs):
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
