"""The user's own arrays: .npz files, or folders of .npy files."""

import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy

from data_loader.base import Arrays, Data, check_labels
from utils import UserError


class Header(NamedTuple):
    """What is known of an array before it is read."""

    shape: tuple[int, ...]
    dtype: np.dtype


def arrays(
    train: str, test: str | None = None, x: str = "x", y: str = "y", num_classes: int | None = None
) -> Data:
    """Your own data: `train` and `test` name a .npz file with the arrays `x` and `y`, or a folder with x.npy and y.npy."""
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"num_classes: {num_classes} is too small; at least 1")
    paths = {"train": Path(train)} | ({"test": Path(test)} if test else {})
    headers = {key: {name: _header(path, name) for name in (x, y)} for key, path in paths.items()}
    for key, path in paths.items():
        _check(path, headers[key], headers["train"])
    inputs, targets = headers["train"][x], headers["train"][y]
    labels = targets.dtype.kind in "iub"
    if labels and num_classes is None:
        num_classes = 1 + max(int(_read(path, y).max()) for path in paths.values())

    def load():
        return {
            key: _load(path, x, y, num_classes if labels else None) for key, path in paths.items()
        }

    example = (
        np.zeros(inputs.shape[1:], inputs.dtype),
        np.zeros(targets.shape[1:], np.int32 if labels else targets.dtype),
    )
    return Data(
        example, {key: header[x].shape[0] for key, header in headers.items()}, load, num_classes
    )


def _load(path, x, y, num_classes):
    inputs, targets = _read(path, x), _read(path, y)
    if num_classes is not None:
        check_labels(f"{path}: {y}", targets, num_classes)
        targets = targets.astype(np.int32)
    return Arrays(inputs, targets, str(path))


def _check(path, headers, train):
    """Refuse arrays that are no numbers, or do not go together: x with y, test with train."""
    for name, (shape, dtype) in headers.items():
        if dtype.kind not in "fiub" or not shape or 0 in shape:
            raise UserError(
                f"{path}: {name} is {dtype} {list(shape)}; it needs numbers, one row for each of the examples"
            )
        expected = train[name]
        if (shape[1:], dtype) != (expected.shape[1:], expected.dtype):
            raise UserError(
                f"{path}: an example of {name} is {dtype} {list(shape[1:])}, in the training set it is "
                f"{expected.dtype} {list(expected.shape[1:])}; they need to be alike"
            )
    counts = {name: header.shape[0] for name, header in headers.items()}
    if len(set(counts.values())) > 1:
        found = " and ".join(f"{name} has {n} examples" for name, n in counts.items())
        raise UserError(f"{path}: {found}; they need equally many")


def _header(path, name):
    with _opened(path, name) as file:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(file)
        return Header(shape, dtype)


def _read(path, name):
    with _opened(path, name) as file:
        if path.is_dir():
            return np.load(
                file.name, mmap_mode="r", allow_pickle=False
            )  # may be larger than the memory
        return npy.read_array(file, allow_pickle=False)


@contextmanager
def _opened(path, name):
    """The .npy file of an array in a folder or a .npz file; what is wrong with either is a UserError."""
    if not path.exists():
        raise UserError(f"{path}: no such file; give a .npz file, or a folder of .npy files")
    try:
        root = (
            path if path.is_dir() else zipfile.Path(path)
        )  # a .npz file is a zipped folder of .npy files
        member = root / f"{name}.npy"
        if not member.exists():
            there = sorted(
                file.name.removesuffix(".npy")
                for file in root.iterdir()
                if file.name.endswith(".npy")
            )
            raise UserError(f"{path}: no array {name!r}; there are: {', '.join(there) or 'none'}")
        with member.open("rb") as file:
            yield file
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path}: {name} cannot be read ({error}); write it again with numpy.savez or numpy.save"
        ) from error
