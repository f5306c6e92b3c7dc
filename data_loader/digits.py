"""Drawn digits that look handwritten, without files or network: as images in MNIST's format, and as
the movements of a pen, which are sequences of different lengths."""

import functools
from collections.abc import Iterator

import numpy as np

from data_loader.base import Arrays, Data
from data_loader.cache import cached
from data_loader.loader import random_stream
from utils.forms import Count, CountOrZero, checked

VERSION = 1  # part of the cache's file name: increase it with every change to an image
SIZE = 28
POINTS = 48  # along the strokes of a digit: about one per pixel
BLOCK = 500  # digits drawn at once: their arrays fit into a core's cache
SHORTEST = 12  # points of a pen that draws fast; a slow one has all POINTS
FEATURES = 3  # of a pen: x and y from -1 to 1, and the distance from the previous point

# For each digit, the styles in which it is drawn. A style lists strokes, separated by commas. A
# stroke lists the points through which its curve passes, as two numbers x and y (0-9, y downwards).
STYLES = (
    ("60 31 14 17 39 68 85 82 50", "70 41 25 28 49 67 74 71 50", "40 71 85 68 39 17 14 31 70"),
    ("50 53 56 59", "33 50, 50 54 59", "32 50, 50 54 59, 29 59 79", "60 54 39"),
    ("12 30 60 82 74 46 19, 19 49 89", "12 40 72 64 37 18 27 48 79 88", "22 50 82 65 29, 29 59 89"),
    (
        "11 30 60 72 63 44, 44 65 77 58 29 18",
        "20 50 80, 80 62 44, 44 76 78 49 18",
        "12 40 72 54 34 54 77 49 18",
    ),
    ("20 14 15, 15 45 85, 71 75 79", "60 33 06, 06 46 86, 60 65 69", "20 14 26 55 74, 80 74 69"),
    (
        "80 50 20, 20 22 24, 24 53 75 77 59 29 18",
        "30 24, 24 53 86 68 39 18, 30 80",
        "71 30 23 54 76 58 29 17",
    ),
    ("70 31 15 27 49 78 76 55 26", "40 23 16 28 59 77 65 45 27", "60 43 26 28 59 78 66 45 26"),
    ("10 50 80, 80 54 49", "10 50 80, 80 53 39, 35 75", "12 20 50 80, 80 64 49"),
    ("72 50 22 34 56 78 59 29 16 44 63 72", "50 32 44 62 50, 44 27 49 76 44"),
    (
        "72 50 22 24 45 64 72, 72 75 79",
        "72 50 22 24 45 73, 72 76 59 28",
        "80 50 23 35 64 80, 80 66 49",
    ),
)


@checked
def digits(seed: CountOrZero = 0, train_size: Count = 60_000, test_size: Count = 10_000) -> Data:
    """Digits 0-9 as 28x28 grey images, drawn from a seed with varied styles, strokes and noise."""

    def load() -> dict[str, Arrays]:
        count = train_size + test_size
        kept = cached(
            f"digits-v{VERSION}-seed{seed}-{count}",
            lambda: dict(zip("xy", draw(seed, count), strict=True)),
        )
        x, y = kept["x"], kept["y"]
        return {
            "train": Arrays(x[:train_size], y[:train_size], "digits"),
            "test": Arrays(x[train_size:], y[train_size:], "digits"),
        }

    example = (np.zeros((SIZE, SIZE, 1), np.uint8), np.zeros((), np.int32))
    return Data(example, {"train": train_size, "test": test_size}, load, num_classes=10)


@checked
def pen_digits(seed: CountOrZero = 0, train_size: Count = 10_000, test_size: Count = 2_000) -> Data:
    """Digits 0-9 as 12 to 48 points of a pen, drawn from a seed: {"sequence": (48, 3), "length"},
    for the model `rnn`. After the first `length` points there is noise, which no model may read."""

    def load() -> dict[str, Arrays]:
        x, y = pen_movements(seed, train_size + test_size)
        rows = {"train": slice(train_size), "test": slice(train_size, None)}
        return {
            name: Arrays({k: a[some] for k, a in x.items()}, y[some], "pen_digits")
            for name, some in rows.items()
        }

    empty = {"sequence": np.zeros((POINTS, FEATURES), np.float32), "length": np.int32(0)}
    sizes = {"train": train_size, "test": test_size}
    return Data((empty, np.zeros((), np.int32)), sizes, load, num_classes=10)


def draw(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(images (count, 28, 28, 1) uint8, labels (count,) int32): depends only on the arguments."""
    x = np.empty((count, SIZE, SIZE, 1), np.uint8)
    y = np.empty(count, np.int32)
    for random, rows, labels in _blocks(seed, count):
        y[rows] = labels
        x[rows, :, :, 0] = _ink(random, strokes(random, labels))
    return x, y


def pen_movements(seed: int, count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """({"sequence": (count, 48, 3), "length": (count,)}, labels): depends only on the arguments."""
    sequence = np.empty((count, POINTS, FEATURES), np.float32)
    length, y = np.empty(count, np.int32), np.empty(count, np.int32)
    for random, rows, labels in _blocks(seed, count):
        y[rows] = labels
        length[rows] = random.integers(SHORTEST, POINTS, len(labels), endpoint=True)
        sequence[rows] = _sampled(strokes(random, labels), length[rows], random)
    return {"sequence": sequence, "length": length}, y


def _blocks(seed: int, count: int) -> Iterator[tuple[np.random.Generator, slice, np.ndarray]]:
    """(random generator, rows, labels) of each block of digits."""
    for i, start in enumerate(range(0, count, BLOCK)):
        random = random_stream(seed, i)
        rows = slice(start, min(start + BLOCK, count))
        yield random, rows, random.permutation(np.arange(start, rows.stop) % 10)


def strokes(random: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """The points of each digit in pixels (n, POINTS, 2): a random style, tremor and affine map."""
    n = len(labels)
    points = np.empty((n, POINTS, 2), np.float32)
    # 12 is a multiple of 2, 3 and 4, so that all styles of a digit are equally frequent.
    style = random.integers(0, 12, n)
    for digit, styles in enumerate(STYLES):
        for i, glyph in enumerate(styles):
            weights, controls = _glyph(glyph)
            rows = np.flatnonzero((labels == digit) & (style % len(styles) == i))
            tremor = random.normal(0, 0.07, (len(rows), *controls.shape)).astype(np.float32)
            points[rows] = weights @ (controls + tremor)
    turn, slant = random.normal(0, 0.13, n), random.normal(-0.12, 0.17, n)
    width, height = random.uniform(5.5, 8.5, n), random.uniform(8, 10, n)
    x_axis = [width * np.cos(turn), width * np.sin(turn)]
    y_axis = [height * (slant - np.sin(turn)), height * np.cos(turn)]
    affine = np.stack(x_axis + y_axis, -1).reshape(n, 2, 2)
    shift = random.normal((SIZE - 1) / 2, 0.9, (n, 1, 2))
    return points @ affine.astype(np.float32) + shift.astype(np.float32)


def _ink(random: np.random.Generator, points: np.ndarray) -> np.ndarray:
    """The images (n, SIZE, SIZE) that a pen with a Gaussian tip draws along the points.

    A Gaussian is a product of a row and a column factor, so a digit is one matmul.
    """
    n = len(points)

    def uniform(low: float, high: float) -> np.ndarray:
        return random.uniform(low, high, (n, 1, 1)).astype(np.float32)

    tip, pressure = uniform(0.6, 1.25), uniform(0.9, 1.8)
    brightness, grain = uniform(0.6, 1.0), uniform(0.0, 0.16)
    pixels = np.arange(SIZE, dtype=np.float32)
    # Both (n, POINTS, SIZE).
    x, y = (np.exp(-0.5 * ((points[:, :, i, None] - pixels) / tip) ** 2) for i in (0, 1))
    distances = np.linalg.norm(np.diff(points, axis=1), axis=2)
    # At most 2 pixels, since a jump to the next stroke leaves no ink.
    spacing = np.minimum(distances, 2).mean(1).reshape(n, 1, 1)
    # Scaled so that 1 is a line in full ink.
    ink = y.transpose(0, 2, 1) @ x * (pressure * spacing / (tip * np.float32(np.sqrt(2 * np.pi))))
    noise = random.standard_normal((n, SIZE, SIZE), np.float32) * grain
    return (np.clip(np.minimum(ink, 1) * brightness + noise, 0, 1) * 255).astype(np.uint8)


def _sampled(points: np.ndarray, length: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The features of `length` of each digit's points, at even distances; then noise."""
    steps, length = np.arange(POINTS), length[:, None]
    rows = np.rint(np.minimum(steps / (length - 1), 1) * (POINTS - 1)).astype(int)
    points = np.take_along_axis(points / (SIZE / 2) - 1, rows[..., None], axis=1)
    moved = np.linalg.norm(np.diff(points, axis=1, prepend=points[:, :1]), axis=2, keepdims=True)
    noise = random.uniform(-1, 1, (len(points), POINTS, FEATURES))
    return np.where((steps < length)[..., None], np.concatenate([points, moved], axis=2), noise)


@functools.cache
def _glyph(style: str) -> tuple[np.ndarray, np.ndarray]:
    """(weights (POINTS, c), control points (c, 2) in -1..1) of one style.

    `weights @ controls` are points with even spacing along the strokes.
    """
    strokes = [
        np.array([[int(x), int(y)] for x, y in stroke.split()], np.float32) / 4.5 - 1
        for stroke in style.split(",")
    ]
    controls = np.concatenate(strokes)
    ends = np.cumsum([len(stroke) for stroke in strokes])[:-1]
    # The curve through unit vectors gives the weight of each control point.
    weights = [_curve(unit) for unit in np.split(np.eye(len(controls)), ends)]
    # Each stroke starts with distance 0, since the pen is lifted between strokes.
    distances = [np.r_[0, np.linalg.norm(np.diff(w @ controls, axis=0), axis=1)] for w in weights]
    travelled = np.cumsum(np.concatenate(distances))
    even = np.searchsorted(travelled, (np.arange(POINTS) + 0.5) / POINTS * travelled[-1])
    return np.concatenate(weights)[even].astype(np.float32), controls


def _curve(points: np.ndarray) -> np.ndarray:
    """Samples of the Catmull-Rom curve through points (n, d): 64 on each of its n - 1 pieces."""
    padded = np.concatenate([points[:1], points, points[-1:]])
    # Each piece runs from b to c; all four are (n - 1, 1, d).
    a, b, c, d = (padded[i : i + len(points) - 1, None] for i in range(4))
    u = np.arange(64)[:, None] / 64
    curve = (
        b
        + u * (c - a) / 2
        + u**2 * (a - 2.5 * b + 2 * c - d / 2)
        + u**3 * (1.5 * (b - c) + (d - a) / 2)
    )
    return curve.reshape(-1, points.shape[1])
