"""The values that a model takes for black and white pixels, which the demo page needs."""

from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from inference.lowering.trace import describe
from utils import UserError

FIX = "include it in the exported file with --with-preprocess"


class Pixels(NamedTuple):
    """The values of black and white, one number or one per channel; grey is linear in between."""

    black: float | list
    white: float | list


UNIT, BYTES = Pixels(0, 1), Pixels(0, 255)


def pixels_of(exportable):
    """The pixel values of an image model, measured by preprocessing images of one color, and one
    drawn at random, which must agree with them.

    Models of other inputs get UNIT.
    """
    (example,) = jax.tree.leaves(exportable.inputs)
    shape, dtype = example.shape, example.dtype
    if dtype == np.uint8:
        return BYTES
    if len(shape) != 3:
        return UNIT
    if exportable.form.layout == "nchw":
        shape = (*shape[1:], shape[0])  # preprocessing takes channels last
    for kind, full in ((np.uint8, 255), (np.float32, 1)):
        drawn = np.random.default_rng(0).uniform(0, full, shape).astype(kind)
        images = *(jnp.full(shape, share * full, kind) for share in (0, 0.2, 1)), jnp.asarray(drawn)
        try:
            black, grey, white, noise = (preprocessed(exportable.preprocess, x) for x in images)
        except ValueError:  # preprocessing rejects this dtype
            continue
        except Exception as error:  # it may be the user's own, and take several inputs
            message = f"--demo: the config's preprocess fails on an image: {describe(error)}"
            raise UserError(message) from error
        if black.dtype == dtype:
            return linear_pixels(black, grey, white, noise, drawn / full)
    return UNIT


def preprocessed(preprocess, image):
    return np.asarray(reduce(lambda x, fn: fn(x), preprocess, image))


def linear_pixels(black, grey, white, noise, shares):
    """The pixel values; raises unless they are linear and the same at every position. `noise` is
    the image of these shares of white."""
    alike = "--demo: the config's preprocess does not treat all pixels alike, as the page does; "
    span, is_same_shape = white - black, black.shape == shares.shape
    if not is_same_shape or any(np.ptp(image, axis=(0, 1)).any() for image in (black, white)):
        raise UserError(alike + FIX)
    near = 1e-5 * max(np.abs(span).max(), 1e-6)
    if not np.allclose(grey, black + span / 5, atol=near):
        raise UserError(
            f"--demo: the config's preprocess is not linear in the pixels, as the page is; {FIX}"
        )
    if not np.allclose(noise, black + span * shares, atol=near):
        raise UserError(alike + FIX)
    return Pixels(black[0, 0].tolist(), white[0, 0].tolist())
