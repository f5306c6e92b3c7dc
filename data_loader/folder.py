"""Images in one folder per class, read from disk when they are used."""

import importlib.util
from pathlib import Path
from typing import Literal

import numpy as np

from data_loader.base import Data
from file_io import open_file
from utils import UserError

ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
# Pillow's names of these. It goes by the content, and would start Ghostscript for an EPS file.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
MOST_PIXELS, MOST_BYTES = 2**26, 2**30  # of one file: 67 million pixels
MODES = {"rgb": ("RGB", 3), "gray": ("L", 1)}  # Pillow's name, channels


def folder(dir: str, image_size: tuple[int, int], color: Literal["rgb", "gray"] = "rgb") -> Data:
    """Images of `dir`/{train,val,test}/<class>/ or `dir`/<class>/, resized to [height, width]."""
    if isinstance(image_size, int) or len(image_size) != 2 or min(image_size) < 1:
        raise ValueError(f"image_size: must be [height, width], both at least 1, got {image_size}")
    need_pillow("folder")
    roots = _roots(Path(dir))
    classes = _classes(roots["train"])
    sets = {
        name: Images(_files(root, classes), classes, image_size, color)
        for name, root in roots.items()
    }
    example = (np.zeros((*image_size, MODES[color][1]), np.uint8), np.zeros((), np.int32))
    sizes = {name: len(dataset) for name, dataset in sets.items()}
    named = {"num_classes": len(classes), "classes": tuple(classes)}
    return Data(example, sizes, lambda: sets, **named, resident=False)


def need_pillow(what):
    """Raise if images cannot be read, `what` being the part or file that needs it."""
    if importlib.util.find_spec("PIL") is None:
        raise UserError(f"{what}: reading images needs Pillow; install it with: pip install pillow")


class Images:
    """(image, label) of files on disk."""

    def __init__(self, files, classes, image_size, color):
        self.files = files  # [(path, label)]
        self.classes = classes
        self.image_size = image_size
        self.color = color

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, label = self.files[index]
        return pixels(path, self.image_size, self.color), np.int32(label)


def pixels(path, image_size, color):
    """The image of a file, upright and resized: uint8 (height, width, channels)."""
    try:
        with open_file(path, MOST_BYTES) as file:
            return decoded(file, image_size, color)
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{path}: not a readable image ({error}); replace or delete it") from error


def decoded(file, image_size, color):
    """The image of an open file, upright: uint8 (height, width, channels).

    It keeps its size if `image_size` is None.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ValueError(f"it is none of {', '.join(FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"it has too many pixels; at most {MOST_PIXELS:,} are decoded") from error
    with image:
        if image.width * image.height > MOST_PIXELS:
            size = f"{image.width} x {image.height} pixels"
            raise ValueError(f"it has {size}; at most {MOST_PIXELS:,} are decoded")
        upright = with_8_bits(ImageOps.exif_transpose(image), image.format)
        upright = upright.convert(MODES[color][0])
    if image_size is not None:
        upright = upright.resize((image_size[1], image_size[0]), Image.Resampling.BILINEAR)
    return np.asarray(upright, np.uint8).reshape(upright.height, upright.width, MODES[color][1])


def with_8_bits(image, format):
    """The image with 8 bits per channel; Pillow would cut off everything above 255.

    16 bits are scaled down. The range of wider numbers is unknown, so they are a ValueError.
    """
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and format in ("PNG", "PPM")):
        return Image.fromarray(((np.asarray(image, np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = {"I": "32-bit integers", "F": "floating-point numbers"}[image.mode]
        raise ValueError(f"its pixels are {kind}, of an unknown range; convert it to 8 or 16 bits")
    return image


def _roots(root):
    """{set: its folder of class folders}; without a train folder, `root` is the training set."""
    names = _classes(root)
    if "train" not in names:
        return {"train": root}
    unknown = sorted(set(names) - {"train", "val", "test"})
    if unknown:
        raise UserError(
            f"{root}: has the folder {unknown[0]!r} beside train; allowed: train, val, test"
        )
    return {name: root / name for name in names}


def _classes(root):
    """The sorted names of the class folders; a class's label is its index in this list."""
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; it should hold one folder of images per class")
    classes = sorted(
        path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    if not classes:
        raise UserError(f"{root}: no folders in it; it should hold one folder of images per class")
    return classes


def _files(root, classes):
    """[(path, label)] of the images under root; a new class or one without images is an error."""
    unknown = sorted(set(_classes(root)) - set(classes))
    if unknown:
        raise UserError(
            f"{root}: has the class {unknown[0]!r}, training has only {', '.join(classes)}"
        )
    files = []
    for label, name in enumerate(classes):
        images = sorted(path for path in (root / name).glob("*") if path.suffix.lower() in ENDINGS)
        if not images and (root / name).is_dir():  # a class may be missing in the test set
            raise UserError(
                f"{root / name}: no images in it; known endings: {', '.join(sorted(ENDINGS))}"
            )
        files += [(path, label) for path in images]
    return files
