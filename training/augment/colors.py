"""Random changes of the colours of one raw image: bytes, or floats in [0, 1]. The formulas are the
same as in Pillow and torchvision, on floats from 0 to 255."""

from typing import Annotated

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Shaped

from training.augment.geometry import image_shape
from training.base import Augmented, marked
from utils.forms import NonNegative, Range, checked

Turn = Annotated[float, Range("at least 0 and at most 0.5", minimum=0, maximum=0.5)]


@marked(of_raw=True, of_values=True)
@checked
def color_jitter(
    key: Array,
    x: Array,
    *,
    brightness: NonNegative = 0.4,
    contrast: NonNegative = 0.4,
    saturation: NonNegative = 0.4,
    hue: Turn = 0.1,
) -> Augmented:
    """Change brightness, contrast and saturation, in this order, each by a factor between 1 minus
    its argument (at least 0) and 1 plus its argument; then turn the hue by at most `hue` of the
    colour circle. It works on the raw image: bytes, or floats in [0, 1], and clips
    others to this range."""
    levels = as_levels("color_jitter", x)
    keys = jax.random.split(key, 4)
    changes = (adjust_brightness, brightness), (adjust_contrast, contrast)
    for i, (change, most) in enumerate((*changes, (adjust_saturation, saturation))):
        low = jnp.maximum(0.0, 1 - most)
        levels = change(levels, jax.random.uniform(keys[i], minval=low, maxval=1 + most))
    turn = jax.random.uniform(keys[3], minval=-hue, maxval=hue)
    return as_image(turn_hue(levels, turn), x)


def as_levels(name: str, x: Array) -> Float[Array, "height width channels"]:
    """A raw image as floats from 0 to 255."""
    image_shape(x)
    if x.dtype == jnp.uint8:
        return x.astype(jnp.float32)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name}: works on bytes (uint8), or floats in [0, 1], got {x.dtype}")
    return 255 * x.astype(jnp.float32)


def as_image(
    levels: Float[Array, "height width channels"], x: Array
) -> Shaped[Array, "height width channels"]:
    """Levels as an image of the dtype of x."""
    if x.dtype == jnp.uint8:
        return jnp.round(levels).astype(jnp.uint8)
    return (levels / 255).astype(x.dtype)


def blended(
    base: ArrayLike, levels: Float[Array, "height width channels"], factor: ArrayLike
) -> Float[Array, "height width channels"]:
    """The base for the factor 0, the image for 1, and an extrapolation above 1."""
    return jnp.clip(base + factor * (levels - base), 0, 255)


def gray(levels: Float[Array, "height width channels"]) -> Float[Array, "height width _"]:
    """The brightness of each pixel, as one channel; unchanged if there are not 3 channels."""
    if levels.shape[-1] != 3:
        return levels
    shares = jnp.array([0.299, 0.587, 0.114], levels.dtype)
    return jnp.sum(levels * shares, -1, keepdims=True)


def adjust_brightness(
    levels: Float[Array, "height width channels"], factor: ArrayLike
) -> Float[Array, "height width channels"]:
    return blended(0.0, levels, factor)


def adjust_contrast(
    levels: Float[Array, "height width channels"], factor: ArrayLike
) -> Float[Array, "height width channels"]:
    return blended(gray(levels).mean(), levels, factor)


def adjust_saturation(
    levels: Float[Array, "height width channels"], factor: ArrayLike
) -> Float[Array, "height width channels"]:
    return blended(gray(levels), levels, factor)


def adjust_sharpness(
    levels: Float[Array, "height width channels"], factor: ArrayLike
) -> Float[Array, "height width channels"]:
    """A factor below 1 is smoother; the pixels at the border are unchanged."""
    height, width, _ = levels.shape
    around = [levels[i : height - 2 + i, j : width - 2 + j] for i in range(3) for j in range(3)]
    smooth = (sum(around) + 4 * levels[1:-1, 1:-1]) / 13
    return blended(levels.at[1:-1, 1:-1].set(smooth), levels, factor)


def turn_hue(
    levels: Float[Array, "height width channels"], turn: ArrayLike
) -> Float[Array, "height width channels"]:
    """Turn the hue by a share of the colour circle; unchanged if there are not 3 channels."""
    if levels.shape[-1] != 3:
        return levels
    red, green, blue = jnp.moveaxis(levels, -1, 0)
    value = levels.max(-1)
    chroma = value - levels.min(-1)
    safe = jnp.where(chroma == 0, 1, chroma)
    sector = jnp.where(
        value == red,
        (green - blue) / safe,
        jnp.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )

    def channel(start: int) -> Float[Array, "height width"]:
        k = (start + sector + 6 * turn) % 6
        return value - chroma * jnp.clip(jnp.minimum(k, 4 - k), 0, 1)

    return jnp.stack([channel(5), channel(3), channel(1)], -1)


def posterize(
    levels: Float[Array, "height width channels"], bits: ArrayLike
) -> Float[Array, "height width channels"]:
    """Keep the highest bits of each level."""
    step = 2.0 ** (8 - bits)
    return jnp.floor(jnp.round(levels) / step) * step


def solarize(
    levels: Float[Array, "height width channels"], threshold: ArrayLike
) -> Float[Array, "height width channels"]:
    """Invert the levels that reach a threshold."""
    return jnp.where(jnp.round(levels) >= threshold, 255 - levels, levels)


def autocontrast(
    levels: Float[Array, "height width channels"],
) -> Float[Array, "height width channels"]:
    """Stretch each channel to the whole range."""
    low, high = levels.min((0, 1)), levels.max((0, 1))
    stretched = (levels - low) * (255 / jnp.where(high > low, high - low, 1))
    return jnp.where(high > low, stretched, levels)


def equalize(
    levels: Float[Array, "height width channels"],
) -> Float[Array, "height width channels"]:
    """Spread the levels of each channel so that all are about as frequent."""

    def channel(level: Int[Array, "height width"]) -> Int[Array, "height width"]:
        counts = jnp.zeros(256, int).at[level].add(1)
        # What Pillow leaves out is the count of the highest level.
        step = (level.size - counts[level.max()]) // 255
        before = jnp.cumsum(counts) - counts
        table = jnp.clip((step // 2 + before) // jnp.maximum(step, 1), 0, 255)
        return jnp.where(step > 0, table[level], level)

    whole = jnp.round(levels).astype(int)
    return jax.vmap(channel, in_axes=-1, out_axes=-1)(whole).astype(levels.dtype)
