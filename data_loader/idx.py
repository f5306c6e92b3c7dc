"""The four IDX files of MNIST and similar datasets: find or download, check, read."""

import gzip
import itertools
import logging
import math
import struct
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from data_loader.base import Arrays, Data, check_labels
from data_loader.download import Unreachable, damaged, fetch
from utils import RunError, format_bytes
from utils.files import open_file

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
ALL_FILES = FILES["train"] + FILES["test"]
SIZES = {"train": 60_000, "test": 10_000}  # as published, for files that are still to be downloaded
IMAGE = (28, 28)
MOST_BYTES = 2**31  # of an unpacked file: 2.7 million images
MOST_PACKED = 2**26  # of one that is compressed; the largest has 26 million


def idx_data(name, folders, mirrors, digests, stand_in=None, classes=None):
    """The Data of `name`: files in `folders`, else downloaded into the last of them.

    `stand_in` is the dataset factory to use if there are no files and no mirror can be reached.
    """
    local, where = _find(folders), " or ".join(map(str, folders))
    sizes = {
        key: idx_shape(local[images], 3)[0] if images in local else SIZES[key]
        for key, (images, _) in FILES.items()
    }

    def load():
        local = _find(folders)
        try:
            paths = {
                file: local.get(file)
                or _download(name, folders[-1], where, file, mirrors, digests[file])
                for file in digests
            }
        except Unreachable as error:
            if stand_in is None or local:
                raise
            return _replaced(name, where, stand_in, error)
        return {
            key: _read(name, paths[images], paths[labels])
            for key, (images, labels) in FILES.items()
        }

    example = (np.zeros((*IMAGE, 1), np.uint8), np.zeros((), np.int32))
    return Data(example, sizes, load, num_classes=10, classes=classes)


def _find(folders):
    """{file: path} of the existing files, plain or compressed; the first folder has priority."""
    paths = {}
    for folder, file, end in itertools.product(folders, ALL_FILES, ("", ".gz")):
        if (path := Path(folder, file + end)).is_file():
            paths.setdefault(file, path)
    return paths


def _download(name, folder, where, file, mirrors, digest):
    path = Path(folder, f"{file}.gz")
    try:
        fetch([f"{mirror}{path.name}" for mirror in mirrors], path, digest)
    except Unreachable as error:
        raise Unreachable(
            f"{name}: {file} is not in {where}, and {error}\n"
            f"Put the files {', '.join(ALL_FILES)} (plain or .gz) into {path.parent}, "
            "or run once with a network connection"
        ) from None
    return path


def _replaced(name, where, stand_in, error):
    """The stand-in's datasets, with a warning so that they are not mistaken for the real ones."""
    source = f"digits (stand-in for {name}: no files in {where}, no mirror reachable)"
    line = "!" * 100
    logging.getLogger("main").warning(
        "%s\nNOT %s, but %s\n%s\n%s", line, name.upper(), source, error, line
    )
    return {key: Arrays(*dataset.arrays, source) for key, dataset in stand_in().load().items()}


def _read(name, images, labels):
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if x.shape[1:] != IMAGE:
        raise damaged(images, f"has images of {x.shape[1:]}, expected {IMAGE}")
    if len(x) != len(y):
        raise damaged(labels, f"has {len(y)} labels for the {len(x)} images of {images}")
    check_labels(labels, y, 10)
    return Arrays(x[..., None], y.astype(np.int32), name)


def read_idx(path, rank):
    """The uint8 array of an IDX file, plain or gzip-compressed."""
    shape, header_size = idx_shape(path, rank), 4 + 4 * rank
    expected = header_size + math.prod(shape)
    if expected > MOST_BYTES:
        most = format_bytes(MOST_BYTES)
        raise damaged(path, f"claims {format_bytes(expected)} by its header; at most {most} fit")
    with _opened(path) as file:
        data = file.read(expected + 1)
    if len(data) != expected:
        found = f"{len(data)} bytes{' or more' if len(data) > expected else ''}"
        raise damaged(path, f"has {found}, but its header {list(shape)} needs {expected}")
    return np.frombuffer(data, np.uint8, offset=header_size).reshape(shape)


def idx_shape(path, rank):
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
def _opened(path):
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
