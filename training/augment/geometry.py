"""Random augmentations of the geometry of one image (height, width, channels).

With a target, they return (image, target). Every array of the target whose first axes are height
and width, such as a mask, is moved like the image: interpolated if it holds floats, else with the
nearest pixel. `target_fill` fills the gap in arrays of whole numbers, for example with the
`ignore_label` of the loss; other arrays, such as weights of pixels, get zeros there."""

import math
from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from training.base import Augmented, marked
from training.objective import is_image
from utils.forms import (
    Count,
    NonNegative,
    Positive,
    PositiveShare,
    Range,
    Share,
    checked,
    is_traced,
    require,
)

Slant = Annotated[float, Range("at least 0 and below 90 degrees", minimum=0, exclusiveMaximum=90)]

# change(image, whether it holds whole numbers, which must not be interpolated) -> image
Change: TypeAlias = Callable[[Array, bool], Array]


@checked
def random_crop(
    key: Array,
    x: Array,
    target: PyTree = None,
    *,
    padding: Count = 4,
    fill: Literal["zeros", "mirror"] = "zeros",
    target_fill: int = 0,
) -> Augmented:
    """Shift the image by up to `padding` pixels in each direction; zeros fill the gap (in a mask of
    whole numbers `target_fill`), or the mirror image of what is beside it."""
    image_shape(x)
    if fill == "zeros":
        check_stays(x, padding=padding)
    top, left = jax.random.randint(key, (2,), 0, 2 * padding + 1)
    modes = {"zeros": "constant", "mirror": "reflect"}

    def crop(image: Array, _whole: bool) -> Array:
        padded = jnp.pad(image, ((padding, padding), (padding, padding), (0, 0)), modes[fill])
        return jax.lax.dynamic_slice(padded, (top, left, 0), image.shape)

    return of_both(crop, x, target, target_fill)


@checked
def random_resized_crop(
    key: Array,
    x: Array,
    target: PyTree = None,
    *,
    area: tuple[PositiveShare, PositiveShare] = (0.08, 1.0),
    aspect: tuple[Positive, Positive] = (0.75, 4 / 3),
) -> Augmented:
    """A random part of the image, resized to the image's size (as in Inception). `area` is the
    range of its fraction of the image, `aspect` the range of its height / width."""
    check_area(area)
    ascending_pair(aspect=aspect)
    height, width, _ = image_shape(x)
    box = crop_box(key, height, width, area, aspect)
    return of_both(lambda image, whole: resized_crop(image, *box, whole), x, target)


@checked
def random_flip(
    key: Array, x: Array, target: PyTree = None, *, probability: Share = 0.5
) -> Augmented:
    """Mirror the image left to right, with a probability."""
    image_shape(x)
    return flipped_where(jax.random.bernoulli(key, probability), x, target)


@marked(by_epoch=True)
def alternating_flip(epoch: ArrayLike, x: Array, target: PyTree = None) -> Augmented:
    """Mirror the image left to right in every second epoch: in the odd or in the even epochs, which
    a hash of the raw image decides. In two epochs the model sees every image and its mirror image,
    which `random_flip` leaves to chance (Jordan, 2024)."""
    image_shape(x)
    raw = x.astype(jnp.uint8) if x.dtype == bool else x
    total = jax.lax.bitcast_convert_type(raw, jnp.uint8).astype(jnp.uint32).sum()
    half = total * jnp.uint32(0x9E3779B1) >> 31
    return flipped_where((half + epoch) % 2 == 1, x, target)


def flipped_where(condition: Array, x: Array, target: PyTree) -> PyTree:
    """The image, and its target if there is one, mirrored if the condition is true."""
    return of_both(lambda a, _whole: jnp.where(condition, a[:, ::-1], a), x, target)


@marked(of_values=True)
@checked
def random_erase(
    key: Array,
    x: Array,
    *,
    probability: Share = 0.5,
    area: tuple[PositiveShare, PositiveShare] = (0.02, 0.33),
    aspect: tuple[Positive, Positive] = (0.3, 3.3),
) -> Augmented:
    """Erase a rectangle to zeros (Zhong et al., 2020), with a probability.
    `area` is the range of its fraction of the image, `aspect` the range of its height / width, both
    before it is cut to the image."""
    check_area(area)
    ascending_pair(aspect=aspect)
    height, width, _ = image_shape(x)
    happens_key, size_key, aspect_key, top_key, left_key = jax.random.split(key, 5)
    size = height * width * jax.random.uniform(size_key, minval=area[0], maxval=area[1])
    low, high = jnp.log(aspect[0]), jnp.log(aspect[1])
    ratio = jnp.exp(jax.random.uniform(aspect_key, minval=low, maxval=high))
    rows = span(top_key, jnp.sqrt(size * ratio), height)
    columns = span(left_key, jnp.sqrt(size / ratio), width)
    happens = jax.random.bernoulli(happens_key, probability)
    erased = rows[:, None, None] & columns[None, :, None] & happens
    return jnp.where(erased, jnp.zeros_like(x), x)


@checked
def random_affine(
    key: Array,
    x: Array,
    target: PyTree = None,
    *,
    rotation: NonNegative = 10.0,
    scale: tuple[Positive, Positive] = (0.9, 1.1),
    shear: Slant = 10.0,
    shift: NonNegative = 2.0,
    target_fill: int = 0,
) -> Augmented:
    """Rotate by up to `rotation` degrees, shear by up to `shear` degrees, scale, and shift by up to
    `shift` pixels. Zeros fill the parts from outside the image, `target_fill` those of a mask of
    whole numbers."""
    ascending_pair(scale=scale)
    image_shape(x)
    check_stays(x, shift=shift)
    turn_key, shear_key, scale_key, shift_key = jax.random.split(key, 4)
    turn = rotation * (math.pi / 180) * jax.random.uniform(turn_key, minval=-1.0)
    slant = shear * (math.pi / 180) * jax.random.uniform(shear_key, minval=-1.0)
    low, high = math.log(scale[0]), math.log(scale[1])
    size = jnp.exp(jax.random.uniform(scale_key, minval=low, maxval=high))
    turned = jnp.array([[jnp.cos(turn), -jnp.sin(turn)], [jnp.sin(turn), jnp.cos(turn)]])
    sheared = jnp.array([[1.0, 0.0], [jnp.tan(slant), 1.0]])
    moved = shift * jax.random.uniform(shift_key, (2,), minval=-1.0)
    place = sheared @ turned / size, moved

    def resample(image: Array, whole: bool) -> Array:
        return (nearest if whole else resampled)(image, *place)

    return of_both(resample, x, target, target_fill)


def of_both(change: Change, x: Array, target: PyTree, fill: int = 0) -> PyTree:
    """change(x, False) of an image; with a target, (it, the target after the same change)."""
    changed = change(x, False)
    return changed if target is None else (changed, of_target(change, x, target, fill))


def of_target(change: Change, x: Array, target: PyTree, fill: int = 0) -> PyTree:
    """The target of x with every image in it changed by `change(image, whole)`; `whole` says that
    it holds whole numbers, which must not be interpolated. The zeros that it puts into these become
    `fill`."""

    height, width, _ = x.shape

    def of_leaf(leaf: Array) -> Array:
        if not is_image(leaf.shape, (height, width)):
            return leaf
        image = leaf.reshape(height, width, -1)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return change(image, False).reshape(leaf.shape)
        gap = 0 if leaf.dtype == bool else fill
        # Unsigned numbers wrap around, and come back.
        return (change(image - gap, True) + gap).astype(leaf.dtype).reshape(leaf.shape)

    return jax.tree.map(of_leaf, target)


def check_area(area: tuple[float, float]) -> None:
    if not 0 < area[0] <= area[1] <= 1:
        raise ValueError(f"area: must be two ascending fractions in (0, 1], got {area}")


def ascending_pair(**arguments: tuple[float, float]) -> None:
    """Require pairs of finite numbers above 0, the second at least as large as the first."""
    require(
        arguments, lambda x: 0 < x[0] <= x[1] < math.inf, "two ascending finite numbers above 0"
    )


def check_stays(x: Array, **pixels: int | float) -> None:
    """Refuse a shift by so many pixels that nothing of an image may be left."""
    side = min(x.shape[:2])
    below = f"below {side}, the shorter side of the images"
    require(pixels, lambda count: is_traced(count) or count < side, below)


def crop_box(
    key: Array,
    height: int,
    width: int,
    area: tuple[float, float],
    aspect: tuple[float, float],
    tries: int = 10,
) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """(top, left, height, width) of a random part: the first of ten that lies in the image, else
    the largest one in the middle whose aspect is allowed; as in torchvision."""
    size_key, aspect_key, top_key, left_key = jax.random.split(key, 4)
    low, high = aspect
    size = jax.random.uniform(size_key, (tries,), minval=area[0], maxval=area[1])
    ratio = jnp.exp(
        jax.random.uniform(aspect_key, (tries,), minval=math.log(low), maxval=math.log(high))
    )
    root = jnp.sqrt(ratio)
    side = jnp.sqrt(size * height * width)
    rows, columns = (jnp.round(a).astype(int) for a in (side * root, side / root))
    fits = (rows > 0) & (rows <= height) & (columns > 0) & (columns <= width)
    limit = min(max(height / width, low), high)
    tallest = min(height, max(1, round(width * limit)))
    widest = min(width, max(1, round(height / limit)))
    largest = [tallest, widest]
    box = jnp.where(fits.any(), jnp.stack([rows, columns])[:, fits.argmax()], jnp.array(largest))
    top = jax.random.randint(top_key, (), 0, height - box[0] + 1)
    left = jax.random.randint(left_key, (), 0, width - box[1] + 1)
    top = jnp.where(fits.any(), top, (height - tallest) // 2)
    left = jnp.where(fits.any(), left, (width - widest) // 2)
    return top, left, box[0], box[1]


def resized_crop(
    x: Shaped[Array, "height width channels"],
    top: ArrayLike,
    left: ArrayLike,
    rows: ArrayLike,
    columns: ArrayLike,
    to_nearest: bool = False,
) -> Shaped[Array, "height width channels"]:
    """A part of the image, enlarged to the image's size: bilinearly, or to the nearest pixels."""

    def places(
        start: ArrayLike, count: ArrayLike, size: int
    ) -> Float[Array, "size"]:  # of the pixels of the result in x, along one axis
        position = start + (jnp.arange(size) + 0.5) * (count / size) - 0.5
        return jnp.clip(position, start, start + count - 1)

    def weights(
        position: Float[Array, "size"],
    ) -> Float[Array, "size size"]:  # (pixels of the result, pixels of x)
        return jnp.maximum(0, 1 - jnp.abs(position[:, None] - jnp.arange(len(position))))

    down, right = places(top, rows, x.shape[0]), places(left, columns, x.shape[1])
    if to_nearest:
        down, right = (jnp.floor(position + 0.5).astype(int) for position in (down, right))
        return x[down[:, None], right]
    down, right = weights(down), weights(right)
    y = jnp.einsum("ir,rcd->icd", down, x.astype(jnp.float32), precision="highest")
    return rounded_to(x.dtype, jnp.einsum("jc,icd->ijd", right, y, precision="highest"))


def resampled(
    x: Array, matrix: Float[Array, "2 2"], shift: Float[Array, "2"]
) -> Shaped[Array, "height width channels"]:
    """The image whose pixel `p` is x at `matrix @ p + shift`, interpolated bilinearly. Positions
    are relative to the centre; outside x there are zeros."""
    height, width, channels = image_shape(x)
    rows, columns = positions(x, matrix, shift)
    # From here on, positions in the image with a border of zeros; it is two wide below and to the
    # right, so that the pixels of the border have a neighbour there too.
    rows, columns = jnp.clip(rows, -1, height) + 1, jnp.clip(columns, -1, width) + 1
    pixels = jnp.pad(x, ((1, 2), (1, 2), (0, 0))).reshape(-1, channels)
    top, left = jnp.floor(rows), jnp.floor(columns)
    down, right = (rows - top)[..., None], (columns - left)[..., None]
    first = (top * (width + 3) + left).astype(int)

    def row(i: int) -> Float[Array, "height width channels"]:
        pixel = first + i * (width + 3)
        return (1 - right) * pixels[pixel] + right * pixels[pixel + 1]

    y = (1 - down) * row(0) + down * row(1)
    return rounded_to(x.dtype, y)


def nearest(
    x: Array, matrix: Float[Array, "2 2"], shift: Float[Array, "2"]
) -> Shaped[Array, "height width channels"]:
    """Like `resampled`, but each pixel is the nearest one of x."""
    height, width, channels = image_shape(x)
    rows, columns = jnp.floor(positions(x, matrix, shift) + 0.5).astype(int)
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    pixels = x.reshape(-1, channels)[jnp.where(inside, rows * width + columns, 0)]
    return jnp.where(inside[..., None], pixels, 0)


def positions(
    x: Array, matrix: Float[Array, "2 2"], shift: Float[Array, "2"]
) -> Float[Array, "2 height width"]:
    """matrix @ p + shift for all pixels p, relative to the centre, as rows and columns of x."""
    height, width, _ = image_shape(x)
    centre = jnp.array([(height - 1) / 2, (width - 1) / 2])
    grid = jnp.meshgrid(jnp.arange(height), jnp.arange(width), indexing="ij")
    relative = jnp.stack(grid) - centre[:, None, None]
    moved = jnp.einsum("ij,jhw->ihw", matrix, relative, precision="highest")
    return moved + (centre + shift)[:, None, None]


def rounded_to(dtype: DTypeLike, y: Array) -> Array:
    return (jnp.round(y) if jnp.issubdtype(dtype, jnp.integer) else y).astype(dtype)


def span(key: Array, length: Float[Array, ""], count: int) -> Bool[Array, "count"]:
    """A mask over `count` positions: a random stretch of about `length`, never empty."""
    length = jnp.clip(jnp.round(length).astype(int), 1, count)
    start = jax.random.randint(key, (), 0, count - length + 1)
    positions = jnp.arange(count)
    return (start <= positions) & (positions < start + length)


def image_shape(x: Array) -> tuple[int, int, int]:
    """(height, width, channels) of an image; anything else is an error."""
    if x.ndim != 3:
        axes = "(height, width, channels)"
        raise ValueError(f"augment: an image has the axes {axes}, got the shape {x.shape}")
    height, width, channels = x.shape
    return height, width, channels
