"""Augmentations of one image (height, width, channels): another view for every key, of the same shape and type."""

import math

import jax
import jax.numpy as jnp

from training.base import Augmented
from training.ranges import nonnegative, share


def random_crop(key, x, *, padding: int = 4) -> Augmented:
    """The image moved by up to `padding` pixels each way; zeros move in."""
    if padding < 1:
        raise ValueError(f"padding: must be at least 1, got {padding}")
    height, width, channels = image_shape(x)
    top, left = jax.random.randint(key, (2,), 0, 2 * padding + 1)
    padded = jnp.pad(x, ((padding, padding), (padding, padding), (0, 0)))
    return jax.lax.dynamic_slice(padded, (top, left, 0), (height, width, channels))


def random_flip(key, x, *, probability: float = 0.5) -> Augmented:
    """The image, or its mirror image left to right."""
    share(probability=probability)
    image_shape(x)
    return jnp.where(jax.random.bernoulli(key, probability), x[:, ::-1], x)


def random_erase(
    key,
    x,
    *,
    probability: float = 0.5,
    area: tuple[float, float] = (0.02, 0.33),
    aspect: tuple[float, float] = (0.3, 3.3),
) -> Augmented:
    """The image with a rectangle of zeros (Zhong et al., 2020), of some share `area` of it and some `aspect`, height / width."""
    share(probability=probability)
    if not 0 < area[0] <= area[1] <= 1:
        raise ValueError(f"area: must be two ascending shares in (0, 1], got {area}")
    if not 0 < aspect[0] <= aspect[1]:
        raise ValueError(f"aspect: must be two ascending numbers above 0, got {aspect}")
    height, width, _ = image_shape(x)
    happens, size_key, aspect_key, top_key, left_key = jax.random.split(key, 5)
    size = height * width * jax.random.uniform(size_key, minval=area[0], maxval=area[1])
    ratio = jnp.exp(
        jax.random.uniform(aspect_key, minval=jnp.log(aspect[0]), maxval=jnp.log(aspect[1]))
    )
    rows = span(top_key, jnp.sqrt(size * ratio), height)
    columns = span(left_key, jnp.sqrt(size / ratio), width)
    erased = (
        rows[:, None, None] & columns[None, :, None] & jax.random.bernoulli(happens, probability)
    )
    return jnp.where(erased, jnp.zeros_like(x), x)


def random_affine(
    key,
    x,
    *,
    rotation: float = 10.0,
    scale: tuple[float, float] = (0.9, 1.1),
    shear: float = 10.0,
    shift: float = 2.0,
) -> Augmented:
    """The image turned and sheared by up to so many degrees, scaled, and moved by up to `shift` pixels; zeros move in."""
    nonnegative(rotation=rotation, shift=shift)
    if not 0 < scale[0] <= scale[1] < math.inf:
        raise ValueError(f"scale: must be two ascending numbers above 0, got {scale}")
    if not 0 <= shear < 90:
        raise ValueError(f"shear: must be at least 0 and below 90 degrees, got {shear}")
    image_shape(x)
    turn_key, shear_key, scale_key, shift_key = jax.random.split(key, 4)
    turn = math.radians(rotation) * jax.random.uniform(turn_key, minval=-1.0)
    slant = math.radians(shear) * jax.random.uniform(shear_key, minval=-1.0)
    size = jnp.exp(
        jax.random.uniform(scale_key, minval=math.log(scale[0]), maxval=math.log(scale[1]))
    )
    turned = jnp.array([[jnp.cos(turn), -jnp.sin(turn)], [jnp.sin(turn), jnp.cos(turn)]])
    sheared = jnp.array([[1.0, 0.0], [jnp.tan(slant), 1.0]])
    return resampled(
        x, sheared @ turned / size, shift * jax.random.uniform(shift_key, (2,), minval=-1.0)
    )


def resampled(x, matrix, shift):
    """The pixel at `p` from the centre is what lies at `matrix @ p + shift` in x, bilinearly; around x there are zeros."""
    height, width, channels = image_shape(x)
    middle = (height - 1) / 2, (width - 1) / 2
    places = jnp.stack(
        jnp.meshgrid(jnp.arange(height) - middle[0], jnp.arange(width) - middle[1], indexing="ij")
    )
    rows, columns = (
        jnp.einsum("ij,jhw->ihw", matrix, places, precision="highest")
        + (jnp.array(middle) + shift)[:, None, None]
    )
    rows, columns = (
        jnp.clip(rows, -1, height) + 1,
        jnp.clip(columns, -1, width) + 1,
    )  # in the image with a border of zeros
    pixels = jnp.pad(x, ((1, 2), (1, 2), (0, 0))).reshape(
        -1, channels
    )  # a second one, as the right neighbour of the first
    top, left = jnp.floor(rows), jnp.floor(columns)
    down, right = (rows - top)[..., None], (columns - left)[..., None]
    first = (top * (width + 3) + left).astype(int)

    def row(i):
        return (1 - right) * pixels[first + i * (width + 3)] + right * pixels[
            first + i * (width + 3) + 1
        ]

    y = (1 - down) * row(0) + down * row(1)
    return (jnp.round(y) if jnp.issubdtype(x.dtype, jnp.integer) else y).astype(x.dtype)


def span(key, length, count):
    """Which of `count` positions lie in a random stretch of about `length`, at least one and all of it inside."""
    length = jnp.clip(jnp.round(length).astype(int), 1, count)
    start = jax.random.randint(key, (), 0, count - length + 1)
    positions = jnp.arange(count)
    return (start <= positions) & (positions < start + length)


def image_shape(x):
    """(height, width, channels), of nothing but an image."""
    if x.ndim != 3:
        raise ValueError(
            f"augment: an image has the axes (height, width, channels), got the shape {x.shape}"
        )
    return x.shape
