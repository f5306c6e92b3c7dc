"""The shape of one input that a user passes as --input, and where it has its channels."""

from utils import UserError
from wiring.build import Builder


def known_shape(config, source, facts, trusted, folders=()):
    """The shape of one input by the checkpoint or else the config's data; None if unknown."""
    if "input_shape" not in facts:
        facts = Builder(config, source, trusted, folders).build().facts
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
