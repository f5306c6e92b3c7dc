"""Handwritten-looking digits drawn from a seed: a dataset of MNIST's form that needs neither files nor network."""

import functools
import io
import logging
import os
import zipfile
from pathlib import Path

import numpy as np

from data_loader.base import Arrays, Data
from data_loader.loader import random_stream
from utils import RunError, atomic_write

VERSION = 1  # of the drawing; a change to any image must raise it, for the cache is keyed by it
SIZE = 28
POINTS = 48  # along a whole digit: about one a pixel
CHUNK = 500  # images drawn at once: their arrays fit a core's cache

# The hands that wrote each digit: strokes separated by commas, a stroke as the xy of the points (0-9, y down) its curve passes.
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


def digits(seed: int = 0, train_size: int = 60_000, test_size: int = 10_000) -> Data:
    """Digits 0-9 as 28x28 grey images, drawn by the program with strokes, hands and noise that vary."""
    for name, value, least in (
        ("seed", seed, 0),
        ("train_size", train_size, 1),
        ("test_size", test_size, 1),
    ):
        if value < least:
            raise ValueError(f"{name}: {value} is too small; at least {least}")

    def load():
        x, y = _cached(seed, train_size + test_size)
        return {
            "train": Arrays(x[:train_size], y[:train_size], "digits"),
            "test": Arrays(x[train_size:], y[train_size:], "digits"),
        }

    example = (np.zeros((SIZE, SIZE, 1), np.uint8), np.zeros((), np.int32))
    return Data(example, {"train": train_size, "test": test_size}, load, num_classes=10)


def draw(seed, count):
    """(images (count, 28, 28, 1) uint8, labels (count,) int32): a pure function of its arguments."""
    x = np.empty((count, SIZE, SIZE, 1), np.uint8)
    y = np.empty(count, np.int32)
    for i, start in enumerate(range(0, count, CHUNK)):
        random = random_stream(seed, i)
        part = slice(start, min(start + CHUNK, count))
        y[part] = random.permutation(np.arange(start, part.stop) % 10)
        x[part, :, :, 0] = _ink(random, _strokes(random, y[part]))
    return x, y


def _strokes(random, labels):
    """The points of each digit in pixels (n, POINTS, 2): a hand chosen, its points moved by a tremor, then an affine map."""
    n = len(labels)
    points = np.empty((n, POINTS, 2), np.float32)
    style = random.integers(
        0, 12, n
    )  # 12: a multiple of 2, 3 and 4, so that a digit's hands are equally frequent
    for digit, hands in enumerate(_glyphs()):
        for i, (weights, controls) in enumerate(hands):
            rows = np.flatnonzero((labels == digit) & (style % len(hands) == i))
            tremor = random.normal(0, 0.07, (len(rows), *controls.shape)).astype(np.float32)
            points[rows] = weights @ (controls + tremor)
    turn, slant = random.normal(0, 0.13, n), random.normal(-0.12, 0.17, n)
    wide, high = random.uniform(5.5, 8.5, n), random.uniform(8, 10, n)
    rows = [
        wide * np.cos(turn),
        wide * np.sin(turn),
        high * (slant - np.sin(turn)),
        high * np.cos(turn),
    ]
    affine = np.stack(rows, -1).reshape(n, 2, 2)
    shift = random.normal((SIZE - 1) / 2, 0.9, (n, 1, 2))
    return points @ affine.astype(np.float32) + shift.astype(np.float32)


def _ink(random, points):
    """The image of a pen with a Gaussian tip. A Gaussian is a product over rows and columns, so a digit is one matmul."""
    n = len(points)

    def uniform(low, high):
        return random.uniform(low, high, (n, 1, 1)).astype(np.float32)

    tip, pressure, brightness, grain = (
        uniform(0.6, 1.25),
        uniform(0.9, 1.8),
        uniform(0.6, 1),
        uniform(0, 0.16),
    )
    pixels = np.arange(SIZE, dtype=np.float32)
    x, y = (
        np.exp(-0.5 * ((points[:, :, i, None] - pixels) / tip) ** 2) for i in (0, 1)
    )  # (n, POINTS, SIZE)
    steps = np.linalg.norm(np.diff(points, axis=1), axis=2)
    spacing = (
        np.minimum(steps, 2).mean(1).reshape(n, 1, 1)
    )  # at most 2: a jump to the next stroke is no step of the pen
    ink = (
        y.transpose(0, 2, 1) @ x * (pressure * spacing / (tip * np.float32(np.sqrt(2 * np.pi))))
    )  # 1: a line in full ink
    noise = random.standard_normal((n, SIZE, SIZE), np.float32) * grain
    return (np.clip(np.minimum(ink, 1) * brightness + noise, 0, 1) * 255).astype(np.uint8)


@functools.cache
def _glyphs():
    return [[_glyph(style) for style in styles] for styles in STYLES]


def _glyph(style):
    """(weights (POINTS, c), control points (c, 2) in -1..1) of one hand: points = weights @ controls, evenly spaced."""
    strokes = [
        np.array([[int(p[0]), int(p[1])] for p in s.split()], np.float32) / 4.5 - 1
        for s in style.split(",")
    ]
    controls = np.concatenate(strokes)
    ends = np.cumsum([len(stroke) for stroke in strokes])[:-1]
    curves = [
        _curve(unit) for unit in np.split(np.eye(len(controls)), ends)
    ]  # of unit vectors: a curve's weights
    steps = [
        np.r_[0, np.linalg.norm(np.diff(curve @ controls, axis=0), axis=1)] for curve in curves
    ]  # 0: the pen is lifted
    way = np.cumsum(np.concatenate(steps))
    even = np.searchsorted(way, (np.arange(POINTS) + 0.5) / POINTS * way[-1])
    return np.concatenate(curves)[even].astype(np.float32), controls


def _curve(points):
    """Places on the Catmull-Rom curve through points (n, d): 64 on each of its n - 1 pieces."""
    padded = np.concatenate([points[:1], points, points[-1:]])
    a, b, c, d = (
        padded[i : i + len(points) - 1, None] for i in range(4)
    )  # each piece runs from b to c; (n - 1, 1, d)
    u = np.arange(64)[:, None] / 64
    curve = (
        b
        + u * (c - a) / 2
        + u**2 * (a - 2.5 * b + 2 * c - d / 2)
        + u**3 * (1.5 * (b - c) + (d - a) / 2)
    )
    return curve.reshape(-1, points.shape[1])


def _cached(seed, count):
    """draw(seed, count), kept in the user's cache folder from the first call on."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rawtree"
    path = folder / f"digits-v{VERSION}-seed{seed}-{count}.npz"
    try:
        with np.load(path, allow_pickle=False) as file:
            return file["x"], file["y"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        x, y = draw(seed, count)  # absent or damaged
    buffer = io.BytesIO()
    np.savez(buffer, x=x, y=y)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, buffer.getvalue())
    except (OSError, RunError) as error:
        logging.getLogger("main").warning("digits: not kept for the next run: %s", error)
    return x, y
