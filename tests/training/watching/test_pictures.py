"""Pictures, against Pillow and by their properties."""

import io

import ml_dtypes
import numpy as np
import pytest
from PIL import Image

from training.watching.pictures import RIGHT, as_picture, confusion_matrix_picture, grid, png

RANDOM = np.random.default_rng(0)


def noise(*shape):
    return RANDOM.integers(0, 256, shape).astype(np.uint8)


PICTURES = [noise(5, 7), noise(5, 7, 3), noise(1, 1), noise(64, 3)[::2, ::-1]]


@pytest.mark.parametrize("picture", [*PICTURES, noise(9, 4, 3).swapaxes(0, 1)])
def test_a_png_holds_every_pixel(picture):
    image = Image.open(io.BytesIO(png(picture)))
    image.verify()  # its checksums
    image = Image.open(io.BytesIO(png(picture)))
    assert image.mode == ("L" if picture.ndim == 2 else "RGB")
    np.testing.assert_array_equal(np.asarray(image), picture)


@pytest.mark.parametrize(
    "wrong",
    [np.zeros((3, 3)), noise(3, 3, 4), noise(3, 3, 1), noise(3), np.zeros((0, 3), np.uint8)],
)
def test_a_png_of_an_array_that_is_not_a_picture_is_refused(wrong):
    with pytest.raises(ValueError, match=r"needs uint8 of shape \(H, W\) or \(H, W, 3\), got"):
        png(wrong)


def test_examples_become_pictures():
    dots = noise(4, 6, 1)
    grey = dots[..., 0]
    half = (dots / 255).astype(ml_dtypes.bfloat16)
    for example, expected in (
        (dots, grey),
        (dots.astype(np.float32) / 255, grey),
        (half, np.rint(255 * half[..., 0])),
        (np.array([[-3.0, 0.0, 3.0]]), [[0, 128, 255]]),
        (np.array([[np.nan, np.inf, -2, 2, 0]]), [[0, 255, 0, 255, 128]]),
        (np.array([[True, False]]), [[255, 0]]),
        (np.full((2, 2), 7.0), np.zeros((2, 2))),
        (np.array([[3e38, -3e38]], np.float32), [[255, 0]]),
    ):
        np.testing.assert_array_equal(as_picture(example), expected)
    assert as_picture(np.zeros((3, 4, 3))).shape == (3, 4, 3)


def test_a_grid_shows_every_picture_enlarged():
    pictures = [noise(28, 28) for _ in range(5)]
    sheet = grid(pictures, columns=3, gap=2)
    assert sheet.shape == (2 + 2 * (84 + 2), 2 + 3 * (84 + 2))  # 28 pixels, three times as large
    for i, picture in enumerate(pictures):
        top, left = 2 + i // 3 * 86, 2 + i % 3 * 86
        shown = sheet[top + 1 : top + 84 : 3, left + 1 : left + 84 : 3]
        np.testing.assert_array_equal(shown, picture)
    assert (sheet[88:, 174:] == 255).all()  # the sixth position is empty
    assert grid([noise(300, 200)]).shape == (304, 204)
    assert grid([]).size


def test_captions_are_below_their_pictures():
    black = np.zeros((28, 28), np.uint8)
    sheet = grid([black] * 3, columns=3, captions=["1", "2", "1"])
    under = sheet[2 + 84 :]
    first, second, third = (under[:, 2 + 86 * i : 2 + 86 * i + 84] for i in range(3))
    assert (first < 255).any()
    np.testing.assert_array_equal(first, third)
    assert (first != second).any()
    ink = np.nonzero((first < 255).any(axis=0))[0]
    assert abs(ink.mean() - 42) < 3  # centred
    long = grid([black] * 2, captions=["far too long to fit \N{SNOWMAN}" * 9, ""])
    assert (long[90:, long.shape[1] // 2 + 2 :] == 255).all()  # it does not reach its neighbour


def cell(sheet, row, column, size):
    top, left = 14 + row * size, 64 + column * size
    return sheet[top : top + size, left : left + size]


def colour(sheet, row, column, size):
    """The colour of a cell, beside its number."""
    return cell(sheet, row, column, size)[3, 3].astype(int)


def test_a_matrix_has_a_row_for_each_true_label():
    sheet = confusion_matrix_picture([[90, 10, 0], [0, 50, 0], [0, 1, 1]])
    size = (sheet.shape[0] - 78) // 3
    assert sheet.shape == (3 * size + 78, 3 * size + 78, 3)
    for empty in ((0, 2), (1, 0), (1, 2), (2, 0)):
        assert (colour(sheet, *empty, size) == 255).all()
    np.testing.assert_array_equal(colour(sheet, 1, 1, size), RIGHT)
    red, _, blue = colour(sheet, 0, 1, size)
    assert blue < red, "wrong predictions are orange"
    red, _, blue = colour(sheet, 2, 2, size)
    assert red < blue, "right predictions are blue"
    half, tenth = colour(sheet, 2, 1, size), colour(sheet, 0, 1, size)
    assert half[2] < tenth[2]  # a larger share has a stronger colour
    labels = [sheet[14 + row * size : 14 + (row + 1) * size, 30:60] for row in range(3)]
    assert len({label.tobytes() for label in labels}) == 3


def test_matrices_of_many_classes_have_no_numbers_and_stay_small():
    counts = np.diag(np.full(100, 5)) + np.eye(100, k=3)
    colours = np.unique(confusion_matrix_picture(counts)[15:613, 65:663].reshape(-1, 3), axis=0)
    assert len(colours) == 4  # white, the only one of its row and right, right, wrong
    assert max(confusion_matrix_picture(np.eye(1500)).shape) < 1100
    assert (
        confusion_matrix_picture([[0]]).shape and confusion_matrix_picture(np.zeros((21, 21))).shape
    )
