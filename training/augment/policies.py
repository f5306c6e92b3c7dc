"""Policies: augmentations that draw from the same fourteen changes of the geometry and colours of a
raw image, with the ranges of torchvision."""

import math
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PyTree, Shaped

from training.augment.colors import (
    adjust_brightness,
    adjust_contrast,
    adjust_saturation,
    adjust_sharpness,
    as_image,
    as_levels,
    autocontrast,
    equalize,
    posterize,
    solarize,
)
from training.augment.geometry import image_shape, nearest, of_target
from training.base import Augmented, marked
from utils.forms import Count, Range, checked

BINS = 30  # strengths are 0 to 30
Strength = Annotated[int, Range("at least 0 and at most 30", minimum=0, maximum=BINS)]


class Reach(NamedTuple):
    """The largest change of each kind."""

    shear: float  # pixels per pixel
    shift: tuple[float, float]  # pixels down and to the right
    degrees: float
    factor: float  # of brightness, saturation, contrast and sharpness, around 1
    bits: int  # that posterize may remove


@marked(of_raw=True)
@checked
def rand_augment(
    key: Array,
    x: Array,
    target: PyTree = None,
    *,
    count: Count = 2,
    magnitude: Strength = 9,
    target_fill: int = 0,
) -> Augmented:
    """`count` random changes of geometry or colours, all of one magnitude (RandAugment, Cubuk et
    al., 2019). It works on the raw image: bytes, or floats in [0, 1]. `target_fill` fills the gaps
    in a mask of whole numbers."""
    levels = as_levels("rand_augment", x)
    height, width, _ = x.shape
    reach = Reach(
        shear=0.3, shift=(150 / 331 * height, 150 / 331 * width), degrees=30, factor=0.9, bits=4
    )
    for change_key in jax.random.split(key, count):
        levels, target = changed(change_key, levels, target, magnitude / BINS, reach, target_fill)
    return as_image(levels, x) if target is None else (as_image(levels, x), target)


@marked(of_raw=True)
def trivial_augment(
    key: Array, x: Array, target: PyTree = None, *, target_fill: int = 0
) -> Augmented:
    """One random change of geometry or colours, of a random magnitude (TrivialAugment, Müller and
    Hutter, 2021, wide ranges). It works on the raw image: bytes, or floats in [0, 1]. `target_fill`
    fills the gaps in a mask of whole numbers."""
    levels = as_levels("trivial_augment", x)
    strength_key, key = jax.random.split(key)
    reach = Reach(shear=0.99, shift=(32, 32), degrees=135, factor=0.99, bits=6)
    strength = jax.random.randint(strength_key, (), 0, BINS + 1) / BINS
    levels, target = changed(key, levels, target, strength, reach, target_fill)
    return as_image(levels, x) if target is None else (as_image(levels, x), target)


def changed(
    key: Array,
    levels: Float[Array, "height width channels"],
    target: PyTree,
    strength: ArrayLike,
    reach: Reach,
    target_fill: int,
) -> tuple[Float[Array, "height width channels"], PyTree]:
    """(levels, target) after one of fourteen changes, of a strength from 0 to 1, in a random
    direction; the target gets only a change of the geometry."""
    which_key, sign_key = jax.random.split(key)
    which = jax.random.randint(which_key, (), 0, 14)
    how = which, strength, jax.random.rademacher(sign_key, ()), reach
    target = of_target(lambda image, _whole: moved(image, *how), levels, target, target_fill)
    return change(levels, *how), target


def change(
    levels: Float[Array, "height width channels"],
    which: int | Int[Array, ""],
    strength: ArrayLike,
    sign: int | Int[Array, ""],
    reach: Reach,
) -> Float[Array, "height width channels"]:
    """The change with this number: 0 is none, 1 to 5 change the geometry, the others the colours.

    Under vmap every branch is computed. So the branches of the geometry only compute a matrix, and
    the image is resampled once.
    """
    levels = moved(levels, which, strength, sign, reach)
    strength = jnp.asarray(strength, levels.dtype)  # else the branches differ in type under x64
    factor = 1 + reach.factor * sign * strength
    changes = (
        lambda x: x,
        lambda x: adjust_brightness(x, factor),
        lambda x: adjust_saturation(x, factor),
        lambda x: adjust_contrast(x, factor),
        lambda x: adjust_sharpness(x, factor),
        lambda x: posterize(x, 8 - jnp.round(reach.bits * strength)),
        lambda x: solarize(x, 255 * (1 - strength)),
        autocontrast,
        equalize,
    )
    return jax.lax.switch(jnp.maximum(which - 5, 0), changes, levels)


def moved(
    image: Shaped[Array, "height width channels"],
    which: int | Int[Array, ""],
    strength: ArrayLike,
    sign: int | Int[Array, ""],
    reach: Reach,
) -> Shaped[Array, "height width channels"]:
    """The part of the change with this number that concerns the geometry."""
    signed = sign * jnp.asarray(strength, jnp.float32)
    return nearest(
        image, *placed(jnp.where(which > 5, 0, which), signed, reach, image_shape(image))
    )


def placed(
    which: int | Int[Array, ""],
    signed: float | Float[Array, ""],
    reach: Reach,
    shape: tuple[int, int, int],
) -> tuple[Float[Array, "2 2"], Float[Array, "2"]]:
    """The (matrix, shift) with which `nearest` does nothing, shears along columns or rows, shifts
    to the right or down, or rotates."""
    height, width, _ = shape
    shear, turn = reach.shear * signed, math.radians(reach.degrees) * signed
    down, right = (jnp.trunc(most * signed) for most in reach.shift)
    one, cos, sin = jnp.ones(()), jnp.cos(turn), jnp.sin(turn)
    rows = (  # the matrix, then the shift; a shear leaves the corner at the top left in its place
        (1, 0, 0, 1, 0, 0),
        (1, 0, -shear, 1, 0, -shear * height / 2),
        (1, -shear, 0, 1, -shear * width / 2, 0),
        (1, 0, 0, 1, 0, -right),
        (1, 0, 0, 1, -down, 0),
        (cos, sin, -sin, cos, 0, 0),
    )
    numbers = jnp.stack([jnp.stack([one * number for number in row]) for row in rows])[which]
    return numbers[:4].reshape(2, 2), numbers[4:]
