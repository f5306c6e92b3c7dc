"""The user's own arrays: .npz files, or folders of .npy files."""

import math
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from data_loader.base import Arrays, Data, check_labels
from data_loader.nest import check_type
from data_loader.npy_files import BinaryFile, Header, header_of, zip_file
from utils import UserError, check_memory, cut
from utils.files import open_file
from utils.forms import Count, LocalPath, checked


@checked
def arrays(
    train: LocalPath,
    test: LocalPath | None = None,
    x: str = "x",
    y: str = "y",
    num_classes: Count | None = None,
    classes: tuple[str, ...] | None = None,
) -> Data:
    """Your own arrays `x` and `y`: `train` and `test` are .npz files or folders of .npy files."""
    paths = {"train": Path(train)} | ({"test": Path(test)} if test else {})
    headers = {key: {name: _header(path, name) for name in (x, y)} for key, path in paths.items()}
    for key, path in paths.items():
        _check(path, headers[key], headers["train"])
    inputs, targets = headers["train"][x], headers["train"][y]
    has_labels = targets.dtype.kind in "iub"
    for name in (x,) if has_labels else (x, y):  # labels are converted
        check_type(f"{train}: {name}", headers["train"][name].dtype)
    for key, path in paths.items() if has_labels else ():  # they are read as a whole, as int32
        check_memory(f"{path}: {y}", 4 * math.prod(headers[key][y].shape))
    if classes and num_classes is None:
        num_classes = len(classes)
    if has_labels and num_classes is None:
        num_classes = 1 + max(int(_read(path, y).max()) for path in paths.values())

    def load() -> dict[str, Arrays]:
        sets = {}
        for key, path in paths.items():
            inputs, targets = _read(path, x), _read(path, y)
            if has_labels and num_classes is not None:
                check_labels(f"{path}: {y}", targets, num_classes)
                targets = targets.astype(np.int32)
            sets[key] = Arrays(inputs, targets, str(path))
        return sets

    example = (
        np.zeros(inputs.shape[1:], inputs.dtype),
        np.zeros(targets.shape[1:], np.int32 if has_labels else targets.dtype),
    )
    sizes = {key: header[x].shape[0] for key, header in headers.items()}
    return Data(example, sizes, load, num_classes, classes=classes)


def _check(path: Path, headers: dict[str, Header], train_headers: dict[str, Header]) -> None:
    """Refuse arrays that are not numeric, or do not match each other or the training set."""
    for name, (shape, dtype) in headers.items():
        if dtype.kind not in "fiub" or not shape or 0 in shape:
            raise UserError(
                f"{path}: {name} is {dtype} {list(shape)}; it must be an array of numbers with one "
                "row per example"
            )
        train = train_headers[name]
        if (shape[1:], dtype) != (train.shape[1:], train.dtype):
            raise UserError(
                f"{path}: an example of {name} is {dtype} {list(shape[1:])}, in the training set "
                f"it is {train.dtype} {list(train.shape[1:])}; they must be the same"
            )
    counts = {name: header.shape[0] for name, header in headers.items()}
    if len(set(counts.values())) > 1:
        found = " and ".join(f"{name} has {n} examples" for name, n in counts.items())
        raise UserError(f"{path}: {found}; the numbers must be the same")


def _header(path: Path, name: str) -> Header:
    with _opened(path, name) as file:
        return header_of(file)


def _read(path: Path, name: str) -> np.ndarray:
    shape, dtype = _header(path, name)
    with _opened(path, name) as file:
        if path.is_dir():  # memory-mapped, since the array may be larger than the memory
            array = np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            file.seek(array.offset + array.nbytes)
        else:
            check_memory(f"{path}: {name}, {dtype}{list(shape)}", math.prod(shape) * dtype.itemsize)
            array = npy.read_array(file, allow_pickle=False)
        if file.read(1):  # reading to the end of a member checks its checksum in the zip file
            raise ValueError(f"there are bytes after its array of {list(array.shape)}")
        return array


@contextmanager
def _opened(path: Path, name: str) -> Iterator[BinaryFile]:
    """The .npy file of an array in a folder or a .npz file; a UserError if it cannot be read."""
    if not path.exists():
        raise UserError(f"{path}: no such file; name a .npz file or a folder of .npy files")
    try:
        with ExitStack() as stack:
            root: Any = path
            if not path.is_dir():
                archive = stack.enter_context(zip_file(stack.enter_context(open_file(path))))
                root = zipfile.Path(archive)
            member = root / f"{name}.npy"
            if not member.exists():
                files = [file.name for file in root.iterdir()]
                names = sorted(file.removesuffix(".npy") for file in files if file.endswith(".npy"))
                known = ", ".join(names) or "none"
                raise UserError(f"{path}: no array {name!r}; there are: {cut(known, 1000)}")
            file = open_file(member) if path.is_dir() else member.open("rb")
            yield stack.enter_context(file)
    except UserError:
        raise
    except Exception as error:  # a damaged file, or an unknown kind of zip file, may raise anything
        fix = "write it again with numpy.savez or numpy.save"
        if path.suffix.lower() in (".csv", ".tsv", ".txt"):
            fix = "read a table with the data `csv`"
        raise UserError(f"{path}: {name} cannot be read ({error}); {fix}") from error
