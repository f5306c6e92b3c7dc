"""Drawn digits as the movements of a pen: sequences of different lengths, without files."""

import numpy as np

from data_loader.base import Arrays, Data
from data_loader.digits import BLOCK, POINTS, SIZE, strokes
from data_loader.loader import random_stream
from utils.forms import Count, CountOrZero, checked

SHORTEST = 12  # points of a digit that is drawn fast; a slow one has all POINTS
FEATURES = 3  # x and y from -1 to 1, and the distance from the previous point


@checked
def pen_digits(seed: CountOrZero = 0, train_size: Count = 10_000, test_size: Count = 2_000) -> Data:
    """Digits 0-9 as 12 to 48 points of a pen, drawn from a seed: {"sequence": (48, 3), "length"},
    for the model `rnn`. After the first `length` points there is noise, which no model may read."""

    def load():
        x, y = draw(seed, train_size + test_size)
        part = lambda rows: Arrays({k: a[rows] for k, a in x.items()}, y[rows], "pen_digits")  # noqa: E731
        return {"train": part(slice(train_size)), "test": part(slice(train_size, None))}

    empty = {"sequence": np.zeros((POINTS, FEATURES), np.float32), "length": np.int32(0)}
    sizes = {"train": train_size, "test": test_size}
    return Data((empty, np.zeros((), np.int32)), sizes, load, num_classes=10)


def draw(seed, count):
    """({"sequence": (count, 48, 3), "length": (count,)}, labels): depends only on the arguments."""
    sequence = np.empty((count, POINTS, FEATURES), np.float32)
    length, y = np.empty(count, np.int32), np.empty(count, np.int32)
    for i, start in enumerate(range(0, count, BLOCK)):
        random = random_stream(seed, i)
        rows = slice(start, min(start + BLOCK, count))
        y[rows] = random.permutation(np.arange(start, rows.stop) % 10)
        length[rows] = random.integers(SHORTEST, POINTS, len(y[rows]), endpoint=True)
        sequence[rows] = _sampled(strokes(random, y[rows]), length[rows], random)
    return {"sequence": sequence, "length": length}, y


def _sampled(points, length, random):
    """The features of `length` of each digit's points, at even distances; then noise."""
    steps, length = np.arange(POINTS), length[:, None]
    rows = np.rint(np.minimum(steps / (length - 1), 1) * (POINTS - 1)).astype(int)
    points = np.take_along_axis(points / (SIZE / 2) - 1, rows[..., None], axis=1)
    moved = np.linalg.norm(np.diff(points, axis=1, prepend=points[:, :1]), axis=2, keepdims=True)
    noise = random.uniform(-1, 1, (len(points), POINTS, FEATURES))
    return np.where((steps < length)[..., None], np.concatenate([points, moved], axis=2), noise)
