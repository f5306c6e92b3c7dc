"""Preprocessing of one example: the same in training, in evaluation and, on request, in the exported file."""

import jax.numpy as jnp

from training.base import Preprocessed


def to_unit(x) -> Preprocessed:
    """Bytes as floats in [0, 1]."""
    if x.dtype != jnp.uint8:
        raise ValueError(
            f"to_unit: divides bytes (uint8) by 255, got {x.dtype}; leave it out for what is no longer bytes"
        )
    return x.astype(float) / 255


def normalize(x, *, mean: tuple[float, ...], std: tuple[float, ...]) -> Preprocessed:
    """Every channel (the last axis) less its mean and divided by its standard deviation."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"normalize: works on floats, got {x.dtype}; put to_unit before it")
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != x.shape[-1]:
            raise ValueError(
                f"{name}: must hold a number for each of the {x.shape[-1]} channels, got {len(values)}"
            )
    if not all(value > 0 for value in std):
        raise ValueError(f"std: must be above 0, got {std}")
    return (x - jnp.asarray(mean, x.dtype)) / jnp.asarray(std, x.dtype)
