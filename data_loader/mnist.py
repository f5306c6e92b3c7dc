"""MNIST, the handwritten digits of LeCun, Cortes and Burges, and Fashion-MNIST, Zalando's images of
clothes: four IDX files in a folder, which are downloaded if they are missing."""

import gzip
import io
import itertools
import logging
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from data_loader.base import Arrays, Data, DataOfHelper, check_labels
from data_loader.digits import digits
from data_loader.download import Unreachable, damaged, fetch
from utils import RunError, format_bytes
from utils.files import open_file
from utils.forms import LocalPath, checked

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
ALL_FILES = FILES["train"] + FILES["test"]
SIZES = {"train": 60_000, "test": 10_000}  # as published, for files that are still to be downloaded
IMAGE = (28, 28)
MOST_BYTES = 2**31  # of an unpacked file: 2.7 million images
MOST_PACKED = 2**26  # of one that is compressed; the largest has 26 million

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
DIGESTS = {  # md5 of the unpacked files
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
FASHION_MIRRORS = (
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)
FASHION_DIGESTS = {  # md5 of the gzip-compressed files
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat")
CLOTHES += ("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@checked
def mnist(dir: LocalPath = "data", offline: Literal["digits", "error"] = "error") -> Data:
    """MNIST from `dir` or `dir`/mnist, else downloaded; `offline` is the fallback if that fails."""
    stand_in = digits if offline == "digits" else None
    return idx_data("mnist", (dir, f"{dir}/mnist"), MIRRORS, DIGESTS, stand_in)


@checked
def fashion_mnist(dir: LocalPath = "data/fashion_mnist") -> Data:
    """Fashion-MNIST from `dir`, else downloaded; its file names are the same as those of MNIST."""
    return idx_data("fashion_mnist", (dir,), FASHION_MIRRORS, FASHION_DIGESTS, classes=CLOTHES)


def idx_data(
    name: str,
    folders: Sequence[str],
    mirrors: Sequence[str],
    digests: dict[str, str],
    stand_in: Callable[[], Data] | None = None,
    classes: tuple[str, ...] | None = None,
) -> DataOfHelper:
    """The Data of `name`: files in `folders`, else downloaded into the last of them.

    `stand_in` is the dataset factory to use if there are no files and no mirror can be reached.
    """
    local, where = _find(folders), " or ".join(map(str, folders))
    sizes = {
        key: idx_shape(local[images], 3)[0] if images in local else SIZES[key]
        for key, (images, _) in FILES.items()
    }

    def load() -> dict[str, Arrays]:
        local = _find(folders)
        paths = {file: local.get(file) or Path(folders[-1], f"{file}.gz") for file in ALL_FILES}
        for file, path in paths.items():
            if file in local:
                continue
            try:
                fetch([f"{mirror}{path.name}" for mirror in mirrors], path, digests[file])
            except Unreachable as error:
                message = (
                    f"{name}: {file} is not in {where}, and {error}\n"
                    f"Put the files {', '.join(ALL_FILES)} (plain or .gz) into {path.parent}, "
                    "or run once with a network connection"
                )
                if stand_in is None or local:
                    raise Unreachable(message) from None
                return _replaced(name, where, stand_in, message)
        return {
            key: _read(name, paths[images], paths[labels])
            for key, (images, labels) in FILES.items()
        }

    example = (np.zeros((*IMAGE, 1), np.uint8), np.zeros((), np.int32))
    return Data(example, sizes, load, num_classes=10, classes=classes)


def _find(folders: Sequence[str]) -> dict[str, Path]:
    """{file: path} of the existing files, plain or compressed; the first folder has priority."""
    paths = {}
    for folder, file, end in itertools.product(folders, ALL_FILES, ("", ".gz")):
        if (path := Path(folder, file + end)).is_file():
            paths.setdefault(file, path)
    return paths


def _replaced(
    name: str, where: str, stand_in: Callable[[], Data], message: str
) -> dict[str, Arrays]:
    """The stand-in's datasets, with a warning so that they are not mistaken for the real ones."""
    source = f"digits (stand-in for {name}: no files in {where}, no mirror reachable)"
    line = "!" * 100
    logging.getLogger("main").warning(
        "%s\nNOT %s, but %s\n%s\n%s", line, name.upper(), source, message, line
    )
    sets = {}
    for key, dataset in stand_in().load().items():
        assert isinstance(dataset, Arrays)
        sets[key] = Arrays(*dataset.arrays, source)
    return sets


def _read(name: str, images: Path, labels: Path) -> Arrays:
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if x.shape[1:] != IMAGE:
        raise damaged(images, f"has images of {x.shape[1:]}, expected {IMAGE}")
    if len(x) != len(y):
        raise damaged(labels, f"has {len(y)} labels for the {len(x)} images of {images}")
    check_labels(labels, y, 10)
    return Arrays(x[..., None], y.astype(np.int32), name)


def read_idx(path: str | Path, rank: int) -> np.ndarray:
    """The uint8 array of an IDX file, plain or gzip-compressed."""
    shape, header_size = idx_shape(path, rank), 4 + 4 * rank
    expected = header_size + math.prod(shape)
    if expected > MOST_BYTES:
        most = format_bytes(MOST_BYTES)
        raise damaged(path, f"claims {format_bytes(expected)} by its header; at most {most} fit")
    with _opened(path) as file:
        data = file.read(expected + 1)
    if len(data) != expected:
        more = " or more" if len(data) > expected else ""
        raise damaged(
            path, f"has {len(data)} bytes{more}, but its header {list(shape)} needs {expected}"
        )
    return np.frombuffer(data, np.uint8, offset=header_size).reshape(shape)


def idx_shape(path: str | Path, rank: int) -> tuple[int, ...]:
    """The shape of an IDX file, read from its header."""
    with _opened(path) as file:
        header = file.read(4 + 4 * rank)
    magic = bytes([0, 0, 8, rank])  # 8: uint8
    if len(header) < 4 + 4 * rank or not header.startswith(magic):
        raise damaged(
            path,
            f"starts with {header[:4].hex() or 'nothing'}, "
            f"an IDX file of rank {rank} starts with {magic.hex()}",
        )
    return struct.unpack(f">{rank}I", header[4:])


@contextmanager
def _opened(path: str | Path) -> Iterator[io.BufferedIOBase]:
    try:
        with open_file(path) as file:
            packed = file.read(2) == b"\x1f\x8b"
        # gzip looks at each byte that follows its data, so there must not be many.
        with open_file(path, MOST_PACKED if packed else None) as file:
            yield gzip.GzipFile(fileobj=file) if packed else file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged(path, f"holds damaged gzip data ({error})") from error
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
