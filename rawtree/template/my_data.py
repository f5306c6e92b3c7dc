"""The dataset: points on three spirals, drawn from a seed."""

import numpy as np
from rawtree.data_loader.base import Arrays, Data


def spirals(size: int = 3000, turns: float = 1.0, noise: float = 0.03, seed: int = 0) -> Data:
    """Points (x, y) on three arms of a spiral; the class of a point is its arm."""

    def load():
        random = np.random.default_rng(seed)
        arm = np.arange(size, dtype=np.int32) % 3
        radius = random.uniform(0.1, 1, size)
        angle = 2 * np.pi * (arm / 3 + turns * radius)
        points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        points = (points + random.normal(0, noise, points.shape)).astype(np.float32)
        test = size // 5
        return {
            "train": Arrays(points[test:], arm[test:], "spirals"),
            "test": Arrays(points[:test], arm[:test], "spirals"),
        }

    example = (np.zeros(2, np.float32), np.zeros((), np.int32))
    sizes = {"train": size - size // 5, "test": size // 5}
    return Data(example, sizes, load, num_classes=3, classes=("first", "second", "third"))
