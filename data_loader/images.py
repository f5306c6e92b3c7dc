"""Image files, decoded by Pillow: upright, resized, as bytes (height, width, channels)."""

import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from utils import UserError
from utils.files import open_file

if TYPE_CHECKING:
    from PIL import Image

ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
UNREAD = {".heic", ".heif", ".avif", ".jfif", ".jp2", ".jxl", ".svg", ".tga"}  # other images
# Pillow's names of these formats. It looks at the content, and would run Ghostscript for EPS files.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
MOST_PIXELS, MOST_BYTES = 2**26, 2**30  # of one file: 67 million pixels
MODES = {"rgb": ("RGB", 3), "gray": ("L", 1)}  # Pillow's name, channels
# JPEG files are decoded at a half, a quarter or an eighth of their size if that is at least DRAFT
# times `image_size`, and then resized: for 500 x 375 pixels at 64 x 64 in 0.57 of the time.
DRAFT = 2

ImageSize: TypeAlias = tuple[int, int] | None  # (height, width); None: as the file has it
Color: TypeAlias = Literal["rgb", "gray"]


def need_pillow(what: str | Path) -> None:
    """Raise if images cannot be read, `what` being the part or file that needs it."""
    if importlib.util.find_spec("PIL") is None:
        raise UserError(f"{what}: reading images needs Pillow; install it with: pip install pillow")


def pixels(path: str | Path, image_size: ImageSize, color: Color) -> np.ndarray:
    """The image of a file, upright and resized: uint8 (height, width, channels)."""
    try:
        with open_file(path, MOST_BYTES) as file:
            return decoded(file, image_size, color)
    except Exception as error:  # a damaged file may raise anything, as struct.error in its EXIF
        raise UserError(f"{path}: not a readable image ({error}); replace or delete it") from error


def image_in(
    data: bytes, what: str, image_size: ImageSize, color: Color, hint: str = ""
) -> np.ndarray:
    """The image in some bytes; `what` is their name in a message."""
    try:
        return decoded(io.BytesIO(data), image_size, color)
    except Exception as error:
        raise UserError(f"{what} is not a readable image ({error}){hint}") from error


def decoded(
    file: io.BytesIO | io.BufferedReader, image_size: ImageSize, color: Color
) -> np.ndarray:
    """The image of an open file, upright: uint8 (height, width, channels)."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ValueError(f"it is none of {', '.join(FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"it has too many pixels; at most {MOST_PIXELS:,} are decoded") from error
    with image:
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(
                f"it has {image.width} x {image.height} pixels; at most {MOST_PIXELS:,} are decoded"
            )
        if image_size is not None:
            side = DRAFT * max(image_size)  # either side may become the height
            image.draft(None, (side, side))
        upright = with_8_bits(ImageOps.exif_transpose(image), image.format)
        upright = upright.convert(MODES[color][0])
    if image_size is not None:
        upright = upright.resize((image_size[1], image_size[0]), Image.Resampling.BILINEAR)
    return np.asarray(upright, np.uint8).reshape(upright.height, upright.width, MODES[color][1])


def with_8_bits(image: "Image.Image", format: str | None) -> "Image.Image":
    """The image with 8 bits per channel; Pillow would cut off everything above 255.

    16 bits are scaled down. The range of wider numbers is unknown, so they are a ValueError.
    """
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and format in ("PNG", "PPM")):
        return Image.fromarray(((np.asarray(image, np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = {"I": "32-bit integers", "F": "floating-point numbers"}[image.mode]
        raise ValueError(f"its pixels are {kind}, in an unknown range; convert it to 8 or 16 bits")
    return image
