"""Augmentations of one image (height, width, channels): another view for every key, of the same shape and type."""

import jax
import jax.numpy as jnp

from training.base import Augmented
from training.ranges import share


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
    key, x, *, probability: float = 0.5, area: tuple[float, float] = (0.02, 0.33), aspect: tuple[float, float] = (0.3, 3.3)
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
    ratio = jnp.exp(jax.random.uniform(aspect_key, minval=jnp.log(aspect[0]), maxval=jnp.log(aspect[1])))
    rows = span(top_key, jnp.sqrt(size * ratio), height)
    columns = span(left_key, jnp.sqrt(size / ratio), width)
    erased = rows[:, None, None] & columns[None, :, None] & jax.random.bernoulli(happens, probability)
    return jnp.where(erased, jnp.zeros_like(x), x)


def span(key, length, count):
    """Which of `count` positions lie in a random stretch of about `length`, at least one and all of it inside."""
    length = jnp.clip(jnp.round(length).astype(int), 1, count)
    start = jax.random.randint(key, (), 0, count - length + 1)
    positions = jnp.arange(count)
    return (start <= positions) & (positions < start + length)


def image_shape(x):
    """(height, width, channels), of nothing but an image."""
    if x.ndim != 3:
        raise ValueError(f"augment: an image has the axes (height, width, channels), got the shape {x.shape}")
    return x.shape
