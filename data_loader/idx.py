"""The four IDX files of MNIST and its relatives: found or downloaded, checked, read."""

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
from utils import RunError

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
ALL_FILES = FILES["train"] + FILES["test"]
SIZES = {
    "train": 60_000,
    "test": 10_000,
}  # as published; files that are there answer for themselves
IMAGE = (28, 28)


def idx_data(name, folders, mirrors, digests, stand_in=None):
    """The Data of `name`: files found in `folders`, else downloaded into the last; `stand_in` is for where neither works."""
    found = _find(folders)
    sizes = {
        key: idx_shape(found[images], 3)[0] if images in found else SIZES[key]
        for key, (images, _) in FILES.items()
    }

    def load():
        found = _find(folders)
        try:
            paths = {
                file: found.get(file) or _download(name, folders, file, mirrors, digests[file])
                for file in digests
            }
        except Unreachable as error:
            if stand_in is None or found:
                raise
            return _replaced(name, folders, stand_in, error)
        return {
            key: _read(name, paths[images], paths[labels])
            for key, (images, labels) in FILES.items()
        }

    example = (np.zeros((*IMAGE, 1), np.uint8), np.zeros((), np.int32))
    return Data(example, sizes, load, num_classes=10)


def _find(folders):
    """{file: path} of the files that are there, plain or compressed; the first folder that has one counts."""
    found = {}
    for folder, file, end in itertools.product(folders, ALL_FILES, ("", ".gz")):
        if (path := Path(folder, file + end)).is_file():
            found.setdefault(file, path)
    return found


def _download(name, folders, file, mirrors, digest):
    path = Path(folders[-1], f"{file}.gz")
    try:
        fetch([f"{mirror}{path.name}" for mirror in mirrors], path, digest)
    except Unreachable as error:
        raise Unreachable(
            f"{name}: {file} is not in {_places(folders)}, and {error}\n"
            f"Put the files {', '.join(ALL_FILES)} (plain or .gz) into {path.parent}, or run once where there is a network"
        ) from None
    return path


def _places(folders):
    return " or ".join(str(folder) for folder in folders)


def _replaced(name, folders, stand_in, error):
    """The stand-in's datasets, announced so that nobody takes them for the real ones."""
    source = f"digits (stand-in for {name}: no files in {_places(folders)}, no mirror reachable)"
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
    shape, head = idx_shape(path, rank), 4 + 4 * rank
    with _opened(path) as file:
        data = file.read()
    if len(data) != head + math.prod(shape):
        raise damaged(
            path,
            f"has {len(data)} bytes, but its header {list(shape)} asks for {head + math.prod(shape)}",
        )
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


def idx_shape(path, rank):
    """The shape of an IDX file, from its header alone."""
    with _opened(path) as file:
        head = file.read(4 + 4 * rank)
    magic = bytes([0, 0, 8, rank])  # 8: uint8
    if len(head) < 4 + 4 * rank or not head.startswith(magic):
        raise damaged(
            path,
            f"starts with {head[:4].hex() or 'nothing'}, an IDX file of rank {rank} with {magic.hex()}",
        )
    return struct.unpack(f">{rank}I", head[4:])


@contextmanager
def _opened(path):
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with (gzip.open if packed else open)(path, "rb") as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged(path, f"holds damaged gzip data ({error})") from error
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
