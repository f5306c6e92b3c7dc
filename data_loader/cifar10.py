"""CIFAR-10, Krizhevsky's small colour photographs, in the binary version."""

import gzip
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_loader.base import Arrays, Data, check_labels
from data_loader.download import Unreachable, damaged, fetch
from utils import RunError
from utils.files import Unreadable, open_file, read_file
from utils.forms import LocalPath, checked

MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
ARCHIVE = "cifar-10-binary.tar.gz"
DIGEST = "c32a1d4ab5d03f1284b67883e8d87530"  # md5 of the archive
FOLDER = "cifar-10-batches-bin"  # inside the archive
FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
CLASSES = ("airplane", "automobile", "bird", "cat", "deer")
CLASSES += ("dog", "frog", "horse", "ship", "truck")
MOST_PACKED, MOST_UNPACKED = 2**28, 2**30  # bytes; the archive has 170 million, and unpacked 184
PER_FILE = 10_000
RECORD = 1 + 3 * 32 * 32  # a label, then the red, green and blue planes


@checked
def cifar10(dir: LocalPath = "data") -> Data:
    """CIFAR-10 from `dir`, as the archive or its unpacked folder; downloaded if missing."""

    def load() -> dict[str, Arrays]:
        contents = _contents(Path(dir))
        return {key: _decode(Path(dir), files, contents) for key, files in FILES.items()}

    example = (np.zeros((32, 32, 3), np.uint8), np.zeros((), np.int32))
    sizes = {key: PER_FILE * len(files) for key, files in FILES.items()}
    return Data(example, sizes, load, num_classes=10, classes=CLASSES)


def _contents(dir: Path) -> dict[str, bytes]:
    """{file: bytes} from the unpacked folder or the archive; if both are missing, downloaded."""
    for folder in (dir, dir / FOLDER):
        if (folder / FILES["test"][0]).is_file():
            return {file: _read(folder / file) for files in FILES.values() for file in files}
    archive = dir / ARCHIVE
    if not archive.is_file():
        try:
            fetch([f"{mirror}{ARCHIVE}" for mirror in MIRRORS], archive, DIGEST)
        except Unreachable as error:
            raise Unreachable(
                f"cifar10: neither {ARCHIVE} nor {FOLDER} is in {dir}, and {error}\n"
                f"Put one of them into {dir}, or run once with a network connection"
            ) from None
    return _unpack(archive)


def _read(path: Path) -> bytes:
    try:
        return read_file(path, PER_FILE * RECORD)
    except FileNotFoundError as error:
        raise damaged(path, "is missing") from error
    except Unreadable as error:
        raise damaged(path, f"cannot be read: {error}") from error
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error


def _unpack(archive: Path) -> dict[str, bytes]:
    """{file: bytes} of an archive's members, read in one pass to the very end, where the checksum
    of gzip is, without extracting anything to disk."""
    files = {f"{FOLDER}/{file}": file for files in FILES.values() for file in files}
    contents, size = {}, PER_FILE * RECORD
    try:
        with open_file(archive, MOST_PACKED) as file:
            # Any: tarfile's types ask for more than it uses.
            unpacked: Any = UpTo(gzip.GzipFile(fileobj=file), MOST_UNPACKED)
            with tarfile.open(fileobj=unpacked, mode="r|", bufsize=2**20) as tar:
                for member in tar:
                    if member.name in files and member.size == size and member.isfile():
                        opened = tar.extractfile(member)
                        assert opened
                        contents[files[member.name]] = opened.read()
            while unpacked.read(2**20):
                pass
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise damaged(archive, f"is not the complete archive ({error})") from error
    except OSError as error:
        raise RunError(f"{archive}: cannot be read: {error.strerror or error}") from error
    for file in files.values():
        if file not in contents:
            raise damaged(
                archive,
                f"is not the complete archive (it has no file {FOLDER}/{file} of {size} bytes)",
            )
    return contents


class UpTo:
    """A file that ends in an error after `most` bytes, since a few may unpack to terabytes."""

    def __init__(self, file: gzip.GzipFile, most: int) -> None:
        self.file, self.left = file, most

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise ValueError("it unpacks to more than the archive")
        return data


def _decode(dir: Path, files: Sequence[str], contents: dict[str, bytes]) -> Arrays:
    """The images and labels of some files, in the order of the files."""
    for file in files:
        if len(contents[file]) != PER_FILE * RECORD:
            raise damaged(
                dir / file, f"has {len(contents[file])} bytes, expected {PER_FILE * RECORD}"
            )
    data = b"".join(contents[file] for file in files)
    records = np.frombuffer(data, np.uint8).reshape(-1, RECORD)
    check_labels("cifar10", records[:, 0], 10)
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Arrays(np.ascontiguousarray(images), records[:, 0].astype(np.int32), "cifar10")
