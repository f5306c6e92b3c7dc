"""Properties of the augmentations, and their resampling against SciPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import ndimage

from training.augment import random_affine, random_crop, random_erase, random_flip, resampled

IMAGE = jnp.arange(1, 1 + 10 * 12 * 3, dtype=jnp.float32).reshape(10, 12, 3)
KEYS = jax.random.split(jax.random.key(0), 400)


def views(fn, image=IMAGE, **args):
    """The image under every key, through one compiled and vmapped program."""
    return np.asarray(jax.jit(jax.vmap(partial(fn, **args), in_axes=(0, None)))(KEYS, image))


@pytest.mark.slow
@pytest.mark.parametrize("fn", [random_crop, random_flip, random_erase, random_affine])
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_shape_and_dtype_stay_and_the_key_determines_the_view(fn, dtype):
    image = IMAGE.astype(dtype)
    out = fn(KEYS[0], image)
    assert out.shape == image.shape and out.dtype == image.dtype
    np.testing.assert_array_equal(out, fn(KEYS[0], image))
    assert len({view.tobytes() for view in views(fn, image)}) > 1


def test_a_crop_is_a_window_of_the_padded_image_and_every_window_occurs():
    padded = np.pad(IMAGE, ((2, 2), (2, 2), (0, 0)))
    windows = {
        padded[top : top + 10, left : left + 12].tobytes() for top in range(5) for left in range(5)
    }
    assert {view.tobytes() for view in views(random_crop, padding=2)} == windows


def test_a_flip_mirrors_left_to_right_half_the_time():
    flipped = (views(random_flip) == np.asarray(IMAGE)[:, ::-1]).all((1, 2, 3))
    assert (views(random_flip)[~flipped] == np.asarray(IMAGE)).all()
    assert 140 < flipped.sum() < 260  # six standard deviations
    twice = random_flip(KEYS[1], random_flip(KEYS[0], IMAGE, probability=1.0), probability=1.0)
    np.testing.assert_array_equal(twice, IMAGE)
    assert (views(random_flip, probability=0.0) == np.asarray(IMAGE)).all()


@pytest.mark.slow
def test_random_erase_erases_one_rectangle_of_a_size_in_range():
    erased = views(random_erase, probability=1.0, area=(0.1, 0.3), aspect=(0.5, 2.0)) == 0
    assert (erased.any(-1) == erased.all(-1)).all()  # all channels alike
    rows, columns = erased.any((2, 3)), erased.any((1, 3))
    np.testing.assert_array_equal(erased[..., 0], rows[:, :, None] & columns[:, None, :])
    for line in (rows, columns):
        edges = np.abs(np.diff(np.pad(line, ((0, 0), (1, 1))).astype(int)))
        assert (edges.sum(1) == 2).all()  # one stretch
        assert not line.all(0).any() and line.any(0).all()  # each position in some, none in all
    heights, widths = rows.sum(1), columns.sum(1)
    areas, aspects = heights * widths / 120, heights / widths
    assert areas.min() >= 0.1 * 0.7 and areas.max() <= 0.3 * 1.3  # sides are rounded to pixels
    assert heights.min() <= 4 and heights.max() >= 7
    assert aspects.min() < 1 < aspects.max()


@pytest.mark.slow
def test_random_erase_happens_with_its_probability():
    touched = (views(random_erase, probability=0.25) != np.asarray(IMAGE)).any((1, 2, 3))
    assert 48 < touched.sum() < 152  # six standard deviations
    assert not (views(random_erase, probability=0.0) == 0).any()


@pytest.mark.parametrize(
    "matrix", [[[1.0, 0.0], [0.0, 1.0]], [[0.9, -0.4], [0.3, 1.2]], [[2.5, 0.0], [0.0, -2.5]]]
)
def test_resampling_agrees_with_scipy(matrix):
    matrix, shift, middle = np.asarray(matrix), np.array([1.3, -0.6]), np.array([4.5, 5.5])
    offset = middle + shift - matrix @ middle
    reference = [
        ndimage.affine_transform(channel, matrix, offset, order=1, mode="grid-constant")
        for channel in np.moveaxis(IMAGE, -1, 0)
    ]
    np.testing.assert_allclose(
        resampled(IMAGE, jnp.asarray(matrix), jnp.asarray(shift)),
        np.stack(reference, -1),
        atol=1e-3,
    )


def moments(view):
    """Mass, centre and covariance of the brightness."""
    positions = np.indices(view.shape[:2]).reshape(2, -1)
    weight = view.sum(-1).ravel()
    centre = positions @ weight / weight.sum()
    return weight.sum(), centre, np.cov(positions, aweights=weight, bias=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "args, measure, reach",
    [
        (
            {"rotation": 20.0},
            lambda mass, centre, spread: (
                np.degrees(np.arctan2(2 * spread[0, 1], spread[0, 0] - spread[1, 1])) / 2
            ),
            20,
        ),
        ({"shift": 3.0}, lambda mass, centre, spread: centre[1] - 15, 3),
        (
            {"scale": (0.8, 1.25)},
            lambda mass, centre, spread: np.log(mass / 100) / 2 / np.log(1.25),
            1,
        ),
        (
            {"shear": 20.0},
            lambda mass, centre, spread: np.degrees(np.arctan(spread[0, 1] / spread[0, 0])),
            20,
        ),
    ],
)
def test_affine_views_use_the_whole_range_and_stay_in_it(args, measure, reach):
    bar = jnp.zeros((31, 31, 1)).at[3:28, 13:18].set(100 / 125)
    still = {"rotation": 0.0, "scale": (1.0, 1.0), "shear": 0.0, "shift": 0.0}
    np.testing.assert_allclose(random_affine(KEYS[0], bar, **still), bar, atol=1e-5)
    values = np.array(
        [measure(*moments(view)) for view in views(random_affine, bar, **still | args)]
    )
    assert np.abs(values).max() <= 1.05 * reach
    assert values.min() < -0.9 * reach and values.max() > 0.9 * reach


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: random_crop(KEYS[0], x, padding=0), "^padding: .* got 0"),
        (lambda x: random_flip(KEYS[0], x, probability=1.5), "^probability: .* got 1.5"),
        (lambda x: random_erase(KEYS[0], x, probability=-1.0), "^probability: .* got -1.0"),
        (lambda x: random_erase(KEYS[0], x, area=(0.5, 0.2)), "^area: "),
        (lambda x: random_erase(KEYS[0], x, aspect=(0.0, 2.0)), "^aspect: "),
        (lambda x: random_affine(KEYS[0], x, rotation=-1.0), "^rotation: .* got -1.0"),
        (lambda x: random_affine(KEYS[0], x, scale=(1.1, 0.9)), "^scale: "),
        (lambda x: random_affine(KEYS[0], x, shear=90.0), "^shear: .* got 90.0"),
        (lambda x: random_flip(KEYS[0], x[0]), r"got the shape \(12, 3\)"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(IMAGE)
