"""Random augmentations of one image, which keep its shape and dtype. Augmentations of colours work
on the raw image, before preprocessing. Those that move pixels also move the target, if that is an
image."""

from training.augment.colors import color_jitter
from training.augment.geometry import (
    alternating_flip,
    random_affine,
    random_crop,
    random_erase,
    random_flip,
    random_resized_crop,
    resampled,
)
from training.augment.policies import rand_augment, trivial_augment

__all__ = [
    "alternating_flip",
    "color_jitter",
    "rand_augment",
    "random_affine",
    "random_crop",
    "random_erase",
    "random_flip",
    "random_resized_crop",
    "resampled",
    "trivial_augment",
]
