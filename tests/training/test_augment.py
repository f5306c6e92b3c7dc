"""Properties of the augmentations; their resampling against SciPy, and their changes against
Pillow, whose own results are rounded or cut off to whole levels of 0 to 255."""

import colorsys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from scipy import ndimage

from model.base import Model
from training.augment import (
    alternating_flip,
    color_jitter,
    colors,
    rand_augment,
    random_affine,
    random_crop,
    random_erase,
    random_flip,
    random_resized_crop,
    resampled,
    trivial_augment,
)
from training.augment.geometry import crop_box, resized_crop
from training.augment.policies import Reach, change
from training.fit import fit
from training.objective import cutmix, supervised
from training.optimizers import sgd
from utils import UserError

pytestmark = pytest.mark.contract

IMAGE = jnp.arange(1, 1 + 10 * 12 * 3, dtype=jnp.float32).reshape(10, 12, 3)
KEYS = jax.random.split(jax.random.key(0), 400)

# Smooth colours with noise, which use neither end of the range.
PHOTO = ndimage.gaussian_filter(np.random.default_rng(1).random((34, 46, 3)), (4, 4, 0.3))
PHOTO = (PHOTO - PHOTO.min()) / np.ptp(PHOTO) * 200 + 20
PHOTO = (PHOTO + np.random.default_rng(2).normal(0, 4, PHOTO.shape)).clip(0, 255).astype(np.uint8)
REACH = Reach(shear=0.3, shift=(9, 13), degrees=30, factor=0.9, bits=4)


def views(fn, image=IMAGE, **args):
    """The image under every key, through one compiled and vmapped program."""
    return np.asarray(jax.jit(jax.vmap(partial(fn, **args), in_axes=(0, None)))(KEYS, image))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn",
    [
        random_crop,
        random_resized_crop,
        random_flip,
        random_erase,
        random_affine,
        color_jitter,
        rand_augment,
        trivial_augment,
    ],
)
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_shape_and_dtype_stay_and_the_key_determines_the_view(fn, dtype):
    raw = hasattr(fn, "of_raw")  # bytes, or floats in [0, 1]
    image = PHOTO[:10, :12].astype(dtype) if raw else IMAGE.astype(dtype)
    image = image / 255 if raw and dtype != "uint8" else image
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


ROWS, COLUMNS = np.indices((10, 12))
BYTES = np.random.default_rng(3).integers(0, 256, (10, 12, 3)).astype(np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn",
    [
        random_flip,
        partial(random_crop, padding=2, target_fill=-1),
        partial(random_crop, padding=2, fill="mirror"),
        random_resized_crop,
        partial(random_affine, rotation=30.0, target_fill=-1),
        partial(rand_augment, count=1, target_fill=-1),
        partial(trivial_augment, target_fill=-1),
    ],
)
def test_every_image_in_a_target_moves_with_the_image(fn):
    """A mask of whole numbers says from which pixel each one comes; floats say the exact place."""
    target = {
        "mask": (100 * ROWS + COLUMNS).astype(np.int16),
        "place": np.stack([ROWS, COLUMNS], -1).astype(np.float32),
        "weight": np.ones((10, 12), np.float32),
        "copy": BYTES.astype(np.float32),
        "inside": np.ones((10, 12), bool),
        "label": np.int32(3),
    }
    out, moved = jax.jit(jax.vmap(fn, (0, None, None)))(KEYS[:150], BYTES, target)
    for name, leaf in target.items():
        assert moved[name].dtype == leaf.dtype and moved[name].shape == (150, *leaf.shape)
    moved = jax.tree.map(np.asarray, moved)
    unmoved = (moved["mask"] == target["mask"]).all((1, 2))  # or only its colours have changed
    assert 30 < (~unmoved).sum() < 150 or unmoved.sum() == 0
    # The image may be rounded to bytes.
    np.testing.assert_allclose(out[~unmoved], moved["copy"][~unmoved], atol=0.51)
    whole, gap = moved["weight"] > 0.9999, moved["weight"] == 0
    nearest = np.stack([moved["mask"] // 100, moved["mask"] % 100], -1)
    assert (np.abs(nearest - moved["place"])[whole] < 0.501).all()
    assert moved["inside"][whole].all() and not moved["inside"][gap].any()
    assert (moved["mask"][gap] == -1).all()
    assert (moved["label"] == 3).all()


def turned(key, x, target):
    """An augmentation of one's own, of the pair."""
    return jnp.rot90(x), jnp.rot90(target)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [supervised, cutmix])
def test_a_run_augments_its_images_together_with_their_masks(objective):
    """The loss is 0 only if each mask is still the first channel of its image."""
    x = np.random.default_rng(0).integers(0, 256, (32, 6, 6, 3)).astype(np.uint8)
    augment = [alternating_flip, partial(random_crop, padding=2), random_flip, turned]
    settings = {"optimizer": sgd(0.1), "objective": objective, "augment": augment}
    settings |= {"loss": lambda output, mask: jnp.square(output - mask).mean()}

    def apply(params, state, x, *, train=False, key=None):
        return x[..., 0] + params["zero"], state

    model = Model(lambda key: ({"zero": jnp.zeros(())}, {}), apply)
    mask = x[..., 0].astype(np.int32)
    run = fit(model, (x, mask), epochs=2, batch_size=8, metrics=[], **settings)
    assert [row["train_loss"] for row in run.history] == [0, 0]


def unmarked(key, x):
    return x + 1


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        ((8, 6), {"augment": [unmarked]}, r"unmarked gets the image alone.*unmarked.of_values = T"),
        ((4, 3), {"augment": [random_crop]}, r"target \[4, 3\] looks like an image.*, 8 and 6;"),
        ((1, 8, 6), {"augment": [alternating_flip]}, r"target \[1, 8, 6\] looks like an image"),
        ((8, 6), {"objective": partial(supervised, views="flipped")}, "outputs that are images"),
    ],
)
def test_what_cannot_be_moved_together_is_refused(target, settings, message):
    def apply(params, state, x, *, train=False, key=None):
        return x[..., 0] * params["w"], state

    model = Model(lambda key: ({"w": jnp.ones(())}, {}), apply)
    data = np.zeros((16, 8, 6, 3), np.float32), np.zeros((16, *target), np.float32)
    with pytest.raises(UserError, match=message):
        fit(model, data, data, optimizer=sgd(0.1), loss=mean_output, **settings)


def mean_output(output, target):
    return output.mean()


@pytest.mark.parametrize("dtype", ["uint8", "float32", "bool"])
def test_alternating_flip_shows_every_image_both_ways_in_two_epochs(dtype):
    most = 2 if dtype == "bool" else 256
    images = np.random.default_rng(0).integers(0, most, (400, 4, 5, 3)).astype(dtype)
    images = images / np.float32(255) if dtype == "float32" else images
    flip = jax.jit(jax.vmap(alternating_flip, (None, 0)))
    first, second, third = (np.asarray(flip(epoch, images)) for epoch in range(3))
    flipped = (first == images[:, :, ::-1]).all((1, 2, 3))
    assert (first[~flipped] == images[~flipped]).all()
    assert 140 < flipped.sum() < 260  # six standard deviations
    np.testing.assert_array_equal(second, first[:, :, ::-1])
    np.testing.assert_array_equal(third, first)


@pytest.mark.slow
def test_a_run_mirrors_each_image_in_every_second_of_its_epochs():
    """Also where the last batch of an epoch is short, and whatever its order."""
    x = np.random.default_rng(0).integers(0, 256, (40, 2, 2, 1)).astype(np.uint8)

    def apply(params, state, x, *, train=False, key=None):
        return x.astype(float)[:, :, 0].mean((1, 2)) + 0 * params["w"], state

    model = Model(lambda key: ({"w": jnp.zeros(())}, {}), apply)
    settings = {"optimizer": sgd(0.1), "loss": lambda out, target: out, "metrics": []}
    data = x, np.zeros(40, np.int32)
    run = fit(model, data, augment=[alternating_flip], epochs=4, batch_size=16, **settings)
    left = [row["train_loss"] for row in run.history]
    np.testing.assert_allclose(left[:2], left[2:], rtol=1e-6)
    np.testing.assert_allclose(left[0] + left[1], 2 * x.mean(), rtol=1e-6)
    assert abs(left[0] - left[1]) > 1
    with pytest.raises(UserError, match=r"^augment does not fit the data: .*got the shape \(3,\)"):
        fit(model, (np.zeros((9, 3)), data[1][:9]), augment=[alternating_flip], **settings)
    batches = (data for _ in range(1))
    with pytest.raises(UserError, match=r"^augment: alternating_flip needs to know how many bat"):
        fit(model, batches, augment=[alternating_flip], epochs=1, **settings)


@pytest.mark.slow
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


def as_bytes(levels):
    return np.rint(np.asarray(levels)).astype(int)


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 1.9])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (colors.adjust_brightness, ImageEnhance.Brightness),
        (colors.adjust_contrast, ImageEnhance.Contrast),
        (colors.adjust_saturation, ImageEnhance.Color),
        (colors.adjust_sharpness, ImageEnhance.Sharpness),
    ],
)
def test_colour_changes_agree_with_pillow_to_two_levels(ours, theirs, factor):
    reference = np.asarray(theirs(Image.fromarray(PHOTO)).enhance(factor), int)
    difference = as_bytes(ours(jnp.asarray(PHOTO, float), factor)) - reference
    # It cuts off fractions twice: of the base, and of the mixture.
    assert np.abs(difference).max() <= 2 and np.abs(difference).mean() < 1


@pytest.mark.slow
@pytest.mark.parametrize("image", [PHOTO, PHOTO // 2, np.full_like(PHOTO, 7), 255 * (PHOTO // 128)])
def test_tables_of_levels_agree_with_pillow(image):
    levels, picture = jnp.asarray(image, float), Image.fromarray(image)
    for bits in (1, 4, 8):
        reference = ImageOps.posterize(picture, bits)
        np.testing.assert_array_equal(colors.posterize(levels, bits), reference)
    for threshold in (0, 77, 178.5, 255):
        reference = ImageOps.solarize(picture, threshold)
        np.testing.assert_array_equal(colors.solarize(levels, threshold), reference)
    np.testing.assert_array_equal(colors.equalize(levels), ImageOps.equalize(picture))
    # Pillow cuts off the fraction of a stretched level.
    stretched = np.floor(np.asarray(colors.autocontrast(levels)) + 1e-3)
    assert np.abs(stretched - np.asarray(ImageOps.autocontrast(picture), int)).max() <= 1


@pytest.mark.parametrize("turn", [-0.5, -0.1, 0.0, 0.3])
def test_the_hue_agrees_with_colorsys(turn):
    def turned(pixel):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        return colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)

    reference = [turned(pixel) for pixel in (PHOTO / 255).reshape(-1, 3)]
    ours = colors.turn_hue(jnp.asarray(PHOTO, float), turn) / 255
    np.testing.assert_allclose(np.asarray(ours).reshape(-1, 3), reference, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strength", [0.3, 1.0])
@pytest.mark.parametrize("sign", [-1, 1])
def test_geometric_changes_agree_with_pillow(sign, strength):
    """Up to one pixel in a hundred, which lies between two of the original."""
    signed = sign * strength
    shear, down, right = 0.3 * signed, int(9 * signed), int(13 * signed)
    picture = Image.fromarray(PHOTO)
    affine = [
        (1, 0, 0, 0, 1, 0),  # x = a * column + b * row + c, then y
        (1, -shear, 0, 0, 1, 0),
        (1, 0, 0, -shear, 1, 0),
        (1, 0, -right, 0, 1, 0),
        (1, 0, 0, 0, 1, -down),
    ]
    references = [
        picture.transform(picture.size, Image.Transform.AFFINE, matrix) for matrix in affine
    ]
    references.append(picture.rotate(30 * signed))
    for which, reference in enumerate(references):
        ours = change(jnp.asarray(PHOTO, float), which, strength, sign, REACH)
        assert (np.asarray(ours) != reference).any(-1).mean() < 0.01, which


@pytest.mark.slow
def test_the_policies_have_the_strengths_of_torchvision():
    levels, picture = jnp.asarray(PHOTO, float), Image.fromarray(PHOTO)
    references = {
        6: (ImageEnhance.Brightness(picture).enhance(1 - 0.9 * 0.3), 2),
        7: (ImageEnhance.Color(picture).enhance(1 - 0.9 * 0.3), 2),
        8: (ImageEnhance.Contrast(picture).enhance(1 - 0.9 * 0.3), 2),
        9: (ImageEnhance.Sharpness(picture).enhance(1 - 0.9 * 0.3), 2),
        10: (ImageOps.posterize(picture, 7), 0),
        11: (ImageOps.solarize(picture, 255 * 0.7), 0),
        12: (ImageOps.autocontrast(picture), 1),
        13: (ImageOps.equalize(picture), 0),
    }
    for which, (reference, most) in references.items():
        difference = as_bytes(change(levels, which, 0.3, -1, REACH)) - np.asarray(reference, int)
        assert np.abs(difference).max() <= most, which


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("which", range(14))
def test_the_policies_work_under_x64(which, dtype):
    levels, pixels = jnp.asarray(PHOTO, float), PHOTO if dtype == "uint8" else PHOTO / 255
    expected = change(levels, which, 0.3, -1, REACH)
    with jax.enable_x64(True):
        found = change(jnp.asarray(PHOTO, jnp.float32), which, 0.3, -1, REACH)
        for policy in (rand_augment, trivial_augment):
            view = policy(jax.random.key(which), pixels.astype(dtype))
            assert view.shape == PHOTO.shape and view.dtype == dtype
    assert found.dtype == jnp.float32
    # A geometric change takes the nearest pixel, which a rounding can move by one.
    assert (np.abs(found - expected) > 1e-3).mean() < 0.01


@pytest.mark.slow
def test_a_resized_crop_agrees_with_pillow_to_one_level():
    for top, left, rows, columns in [(3, 5, 20, 11), (0, 0, 34, 46), (33, 45, 1, 1), (7, 0, 9, 46)]:
        picture = Image.fromarray(PHOTO).crop((left, top, left + columns, top + rows))
        reference = np.asarray(picture.resize((46, 34), Image.Resampling.BILINEAR), int)
        ours = resized_crop(jnp.asarray(PHOTO), top, left, rows, columns)
        assert np.abs(np.asarray(ours, int) - reference).max() <= 1


@pytest.mark.slow
def test_boxes_of_crops_have_their_area_and_aspect_and_lie_in_the_image():
    box = jax.vmap(lambda key: jnp.stack(crop_box(key, 100, 140, (0.1, 0.6), (0.5, 2.0))))
    top, left, rows, columns = np.asarray(box(KEYS)).T
    assert top.min() >= 0 and (top + rows).max() <= 100
    assert left.min() >= 0 and (left + columns).max() <= 140
    areas, aspects = rows * columns / 14000, rows / columns
    assert 0.095 < areas.min() < 0.15 and 0.5 < areas.max() < 0.61
    assert 0.48 < aspects.min() < 0.6 and 1.5 < aspects.max() < 2.05
    # Where nothing of this aspect fits, it is the largest part in the middle that does.
    wide = np.asarray(crop_box(KEYS[0], 100, 140, (0.9, 1.0), (0.1, 0.2)))
    np.testing.assert_array_equal(wide, [36, 0, 28, 140])


@pytest.mark.slow
def test_color_jitter_uses_its_whole_ranges_and_only_those_that_are_set():
    still = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}
    assert (np.abs(views(color_jitter, PHOTO, **still).astype(int) - PHOTO) <= 1).all()
    flat = np.full((4, 4, 3), 0.5, np.float32)
    values = views(color_jitter, flat, **still | {"brightness": 0.4})[:, 0, 0, 0]
    assert 0.3 <= values.min() < 0.31 and 0.69 < values.max() <= 0.7
    red = np.broadcast_to(np.float32([1, 0, 0]), (4, 4, 3))
    hues = [
        colorsys.rgb_to_hsv(*v[0, 0])[0] for v in views(color_jitter, red, **still | {"hue": 0.2})
    ]
    hues = (np.array(hues) + 0.5) % 1 - 0.5
    assert -0.201 < hues.min() < -0.19 and 0.19 < hues.max() < 0.201


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn, strengths",
    [
        (random_affine, {"rotation": 20.0, "shear": 5.0, "shift": 3.0}),
        (color_jitter, {"brightness": 0.3, "contrast": 1.5, "saturation": 0.2, "hue": 0.1}),
    ],
)
def test_strengths_can_be_inputs_of_a_program(fn, strengths):
    """As with training.vary."""
    image = IMAGE / IMAGE.max()
    expected = fn(KEYS[0], image, **strengths)
    found = jax.jit(lambda image, given: fn(KEYS[0], image, **given))(image, strengths)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: random_erase(KEYS[0], x, area=(0.5, 0.2)), "^area: "),
        (lambda x: random_resized_crop(KEYS[0], x, aspect=(2.0, 1.0)), "^aspect: "),
        (lambda x: color_jitter(KEYS[0], x.astype(int)), "^color_jitter: .* got int32"),
        (lambda x: random_crop(KEYS[0], x, padding=12), "^padding: must be below 10, .* got 12"),
        (lambda x: random_affine(KEYS[0], x, shift=12.0), "^shift: must be below 10, .* got 12.0"),
        (lambda x: random_affine(KEYS[0], x, scale=(1.1, 0.9)), "^scale: "),
        (lambda x: random_flip(KEYS[0], x[0]), r"got the shape \(12, 3\)"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(IMAGE)
