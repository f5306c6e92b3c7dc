"""NumPy's .npy and .npz files, whose headers may claim more than the file, or the memory, holds."""

import io
import math
import zipfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib import format as npy

from utils.files import Pieces, open_file

MOST_HEADER = 2**16  # bytes of the header of an array; NumPy refuses those of more than 10,000
MOST_DIRECTORY = 2**22  # bytes of the list of a zip file's members


# The types of Python's library call an open member of a zip file IO[bytes].
BinaryFile: TypeAlias = io.BufferedIOBase | IO[bytes]


class Header(NamedTuple):
    """The shape and type of an array, from the header of its .npy file."""

    shape: tuple[int, ...]
    dtype: np.dtype


def header_of(file: BinaryFile) -> Header:
    """The Header of the .npy file in an open file, which is left where the numbers begin."""
    pieces: Any = Pieces(file, MOST_HEADER)
    is_first = npy.read_magic(pieces) == (1, 0)
    read = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
    shape, _, dtype = parsed(read, pieces)
    return Header(shape, dtype)


def parsed(
    read: Callable[[Any], tuple[tuple[int, ...], bool, np.dtype]], file: io.BufferedIOBase | Pieces
) -> tuple[tuple[int, ...], bool, np.dtype]:
    """(shape, whether it is in Fortran order, dtype) as a function of NumPy reads them in a header,
    which is a literal of Python."""
    try:
        shape, fortran, dtype = read(file)
    except (OSError, ValueError):
        raise
    except Exception as error:  # keys of two types, a thousand signs before a number
        raise ValueError(f"its header is damaged: {type(error).__name__}: {error}") from error
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape is not valid: {shape}")
    return shape, fortran, dtype


def array_in(data: bytes, start: int = 0) -> tuple[np.ndarray, int]:
    """(the array of the .npy file that begins at `start` in some bytes, the place of its end);
    ValueError if there is none."""
    # Version 1.0 of the format: magic, version, length of the header, header, numbers.
    begin = start + 10 + int.from_bytes(data[start + 8 : start + 10], "little")
    if data[start : start + 8] != b"\x93NUMPY\x01\x00" or begin > len(data):
        raise ValueError(f"no .npy file begins at byte {start}")
    shape, fortran, dtype = _header_in(data[start + 8 : begin])
    size = math.prod(shape)
    end = begin + size * dtype.itemsize
    if end > len(data):
        raise ValueError(f"it ends within an array of {dtype}{list(shape)}")
    array = np.frombuffer(data, dtype, size, begin).reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=False), end  # in this machine's byte order


# All records have the same few headers, and parsing one takes longer than everything else.
@lru_cache(1000)
def _header_in(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    shape, fortran, dtype = parsed(npy.read_array_header_1_0, io.BytesIO(header))
    if dtype.hasobject:
        raise ValueError(f"it has an array of {dtype}; it must hold numbers")
    return shape, fortran, dtype


def zip_file(file: BinaryFile) -> zipfile.ZipFile:
    """The ZipFile of an open file. Its directory is read in pieces, as NumPy reads the members."""
    pieces: Any = Pieces(file, MOST_DIRECTORY)
    return zipfile.ZipFile(pieces)


def claimed(path: str | Path) -> dict[str, int]:
    """{name: how many bytes of memory the array takes} for a .npz file, {"": that number} for a
    .npy file, without reading arrays; {} for any other file, which NumPy refuses by its start."""
    with open_file(path) as file:
        start = file.read(len(npy.MAGIC_PREFIX))
        file.seek(0)
        if start == npy.MAGIC_PREFIX:
            return {"": size_of(file)}
        if not start.startswith(b"PK"):
            return {}
        with zip_file(file) as archive:
            return {
                info.filename.removesuffix(".npy"): size_in(archive, info)
                for info in archive.infolist()
            }


def size_of(file: BinaryFile) -> int:
    shape, dtype = header_of(file)
    return math.prod(shape) * dtype.itemsize


def size_in(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """The bytes of the array in a member of a zip file; of any other member NumPy reads all."""
    with archive.open(info) as member:
        is_array = member.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX
    if not is_array:
        return info.file_size
    with archive.open(info) as member:
        return size_of(member)
