"""What a model takes for a picture's pixels, so that a page can give it that."""

from functools import reduce
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from utils import UserError

MEND = "leave it to the exported file with --with-preprocess"


class Pixels(NamedTuple):
    """What stands for black and for white: a number, or one for each channel. What is in between lies straight between them."""

    black: float | list
    white: float | list


UNIT, BYTES = Pixels(0, 1), Pixels(0, 255)


def pixels_of(shipped):
    """The pixels of a model for pictures, found by preprocessing pictures of one colour; of any other model, UNIT."""
    shape, dtype = shipped.inputs.shape, shipped.inputs.dtype
    if dtype == np.uint8:
        return BYTES
    if len(shape) != 3:
        return UNIT
    if shipped.form.layout == "nchw":
        shape = (*shape[1:], shape[0])  # preprocessing comes before
    for kind, full in ((np.uint8, 255), (np.float32, 1)):
        try:
            grey = [
                preprocessed(shipped.preprocess, jnp.full(shape, share * full, kind))
                for share in (0, 0.2, 1)
            ]
        except ValueError:  # preprocessing is particular about the type
            continue
        if grey[0].dtype == dtype:
            return straight(*grey, shape)
    return UNIT


def preprocessed(preprocess, picture):
    return np.asarray(reduce(lambda x, fn: fn(x), preprocess, picture))


def straight(black, grey, white, shape):
    """The pixels, once it is known that their place does not matter, and that a fifth of white is a fifth of the way."""
    if black.shape != shape or any(
        np.ptp(picture, axis=(0, 1)).any() for picture in (black, white)
    ):
        raise UserError(
            f"--demo: the config's preprocess does not treat all pixels alike, as the page would; {MEND}"
        )
    if not np.allclose(grey, black + (white - black) / 5, atol=1e-5 * np.abs(white - black).max()):
        raise UserError(
            f"--demo: the config's preprocess bends the scale of pixels, as the page cannot; {MEND}"
        )
    return Pixels(black[0, 0].tolist(), white[0, 0].tolist())
