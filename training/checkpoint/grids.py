"""Position embeddings of an image, resized to another number of patches."""

import math

import numpy as np


def resized(array, shape):
    """An array of (places, features), whose places are the rows of a square grid of patches,
    perhaps after a class token, resized to another such grid like `torch`'s bicubic. Unchanged if
    that is impossible."""
    if array.ndim != 2 or len(shape) != 2 or array.shape == shape:
        return array
    for extra in (0, 1):  # a class token keeps its vector
        old, new = (math.isqrt(rows - extra) for rows in (array.shape[0], shape[0]))
        if (old * old + extra, new * new + extra) == (array.shape[0], shape[0]):
            weights = bicubic(old, new)
            grid = array[extra:].reshape(old, old, -1).astype(np.float64)
            grid = np.einsum("ih,jw,hwc->ijc", weights, weights, grid, optimize=True)
            grid = grid.reshape(new * new, -1).astype(array.dtype)
            return np.concatenate([array[:extra], grid])
    return array


def bicubic(old, new, a=-0.75):
    """The matrix (new, old) that resizes a line of points by cubic convolution (Keys, 1981)."""
    weights = np.zeros((new, old))
    for i in range(new):
        place = (i + 0.5) * old / new - 0.5
        for j in range(math.floor(place) - 1, math.floor(place) + 3):
            d = abs(place - j)
            near = ((a + 2) * d - (a + 3)) * d * d + 1
            far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
            weights[i, min(max(j, 0), old - 1)] += near if d <= 1 else far
    return weights
