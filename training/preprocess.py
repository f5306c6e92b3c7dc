"""Preprocessing of one example, the same in training, evaluation and, if wanted, exports."""

import jax.numpy as jnp

from training.base import Preprocessed
from utils import Positive, checked


def to_unit(x) -> Preprocessed:
    """Bytes as floats in [0, 1]."""
    if x.dtype != jnp.uint8:
        fix = "leave it out for other dtypes"
        raise ValueError(f"to_unit: divides bytes (uint8) by 255, got {x.dtype}; {fix}")
    return x.astype(float) / 255


@checked
def normalize(x, *, mean: tuple[float, ...], std: tuple[Positive, ...]) -> Preprocessed:
    """Subtract the mean of each channel (the last axis) and divide by its standard deviation."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"normalize: works on floats, got {x.dtype}; put to_unit before it")
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != x.shape[-1]:
            needed = f"one number for each of the {x.shape[-1]} channels"
            raise ValueError(f"{name}: must hold {needed}, got {len(values)}")
    return (x - jnp.asarray(mean, x.dtype)) / jnp.asarray(std, x.dtype)
