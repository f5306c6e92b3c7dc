"""A checkpoint as a safetensors file, which holds its own SHA-256 and a record in its header.

Any safetensors reader opens it: 8 bytes with the length of the JSON header, the header with the
place of each array, and the arrays without gaps. The stock reader checks the header and says where
the arrays are. Their bytes are read and written here, once, together with the digest, which the
stock library does not know, and into NumPy arrays also of bfloat16 and float8.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from utils import Damaged, UserError, check_memory, cut, format_bytes
from utils.files import atomic_file, open_file, parse_json

TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
TYPES |= {"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "BOOL": np.bool_}
TYPES |= {"U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8}
TYPES |= {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz}
TYPES |= {"F8_E5M2": ml_dtypes.float8_e5m2, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz}
TYPES |= {"F8_E8M0": ml_dtypes.float8_e8m0fnu}
CODES = {np.dtype(dtype).name: code for code, dtype in TYPES.items()}

Form = tuple[list[int], DTypeLike]  # the shape and type of an array

LONGEST_HEADER = 16 * 2**20  # bytes; hostile JSON takes many times its length in memory
NO_DIGEST = b"0" * 64  # hashed in place of the digest, which cannot contain itself
# A header that begins like this has our digest. Checking `rawtree` alone is not enough: one damaged
# byte in that word would make our file look like another program's, which is not verified. Another
# program may store its own hash under "sha256", but hardly as the first of several entries.
SIGNED = re.compile(rb'\{"__metadata__":\{"sha256":"([0-9a-f]{64})","')
FOREIGN = {
    rb"\x80[\x02-\x05][^\0]": "a pickle",
    rb"PK[\3\5][\4\6]": "a zip file, as torch.save and numpy.savez write",
}
FROM_TORCH = (
    'for a file of PyTorch: python -c "import sys, torch; from safetensors.torch import save_file; '
    "tensors = torch.load(sys.argv[1], 'cpu', weights_only=True); "
    'save_file({k: v.clone().contiguous() for k, v in tensors.items()}, sys.argv[2])" '
    "FROM.bin TO.safetensors"
)


def write(path: str | Path, arrays: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Write {name: array}, the record and the digest, all of it or nothing."""
    arrays = {name: np.asarray(leaf) for name, leaf in arrays.items()}
    # Widest types first, like the stock writer, so that each array is aligned to its element size.
    arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize))
    header = make_header(path, arrays, record)
    start = len(header).to_bytes(8, "little") + header
    digest = hashlib.sha256(start)
    with atomic_file(path) as file:
        file.write(start)
        for array in arrays.values():
            # At most one copy is in memory; np.ascontiguousarray would turn shape () into (1,).
            little_endian = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
            data = raw_bytes(little_endian)
            digest.update(data)  # like file.write, it lets other threads run meanwhile
            file.write(data)
        file.seek(start.index(NO_DIGEST))
        file.write(digest.hexdigest().encode())


def read(path: str | Path, verified: bool = False) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """({name: array}, record), checked against the digest, if there is one, unless `verified`."""
    with opened(path) as file:
        raw, forms, metadata = read_header(path, file)
        signed = SIGNED.match(raw)
        if "rawtree" in metadata and not signed:
            raise Damaged(f"{path}: is damaged: its header does not begin with a SHA-256")
        blank = raw[: signed.start(1)] + NO_DIGEST + raw[signed.end(1) :] if signed else raw
        digest = hashlib.sha256(len(raw).to_bytes(8, "little") + blank)
        arrays = allocate(path, forms, os.fstat(file.fileno()).st_size - file.tell())
        for array in arrays.values():
            data = raw_bytes(array)
            if file.readinto(data) != len(data):  # pyright: ignore[reportAttributeAccessIssue]  # open() makes a file with it
                raise not_valid(path, "it became shorter while it was being read")
            if signed and not verified:
                digest.update(data)
    if signed and not verified and digest.hexdigest() != signed[1].decode():
        raise Damaged(f"{path}: is damaged: its content does not match the SHA-256 in its header")
    return arrays, parse_record(path, metadata)


def read_record(path: str | Path) -> dict[str, Any]:
    """The record alone; neither the arrays nor the digest are read."""
    with opened(path) as file:
        return parse_record(path, read_header(path, file)[2])


def make_header(
    path: str | Path, arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]
) -> bytes:
    """The JSON header, with a blank digest at a position that is independent of the rest."""
    metadata = {"sha256": NO_DIGEST.decode(), "rawtree": json.dumps(record)}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, array in arrays.items():
        if array.dtype.name not in CODES:
            raise UserError(
                f"{path}: cannot store {name}, an array of {array.dtype}; the format has "
                f"{', '.join(CODES)}"
            )
        assert name not in header, f"{name}: is reserved in a safetensors file"
        begin, end = end, end + array.nbytes
        code = CODES[array.dtype.name]
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        size, limit = format_bytes(len(text)), format_bytes(LONGEST_HEADER)
        raise UserError(f"{path}: its names and record take {size}; the limit is {limit}")
    return text


def raw_bytes(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array; as uint8, since Python buffers do not support bfloat16."""
    return array.reshape(-1).view(np.uint8).data


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """The file, opened for reading; any failure is an error that names it."""
    try:
        with open_file(path) as file:
            yield file
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such checkpoint") from error
    except OSError as error:
        raise Damaged(f"{path}: cannot be read: {error.strerror or error}") from error


def not_valid(path: str | Path, why: str | Exception) -> Damaged:
    """The error for a file that is not a safetensors file, or only a part of one."""
    return Damaged(f"{path}: is not a valid safetensors file: {cut(str(why), 200)}")


def read_header(path: str | Path, file: BinaryIO) -> tuple[bytes, dict[str, Form], dict[str, str]]:
    """(the bytes of the header, {name: (shape, type)} in the order of the file, metadata); leaves
    the file at its first array."""
    from safetensors import SafetensorError, safe_open

    start = file.read(8)
    length = int.from_bytes(start, "little")
    if length > LONGEST_HEADER:  # or these are not the bytes of a length
        for magic, what in FOREIGN.items():
            if re.match(magic, start):
                raise Damaged(
                    f"{path}: is {what}; it is not read, since that could run code: save its "
                    f"arrays as safetensors; {FROM_TORCH}"
                )
        raise not_valid(path, f"its header claims {length} bytes (the limit is {LONGEST_HEADER})")
    raw = file.read(length)
    try:
        with safe_open(path, framework="numpy") as stock:
            slices = {name: stock.get_slice(name) for name in stock.offset_keys()}
            codes = {name: part.get_dtype() for name, part in slices.items()}
            if unknown := [name for name, code in codes.items() if code not in TYPES]:
                raise not_valid(path, f"{unknown[0]} has the type {codes[unknown[0]]}")
            forms = {name: (part.get_shape(), TYPES[codes[name]]) for name, part in slices.items()}
            return raw, forms, stock.metadata() or {}
    except SafetensorError as error:
        raise not_valid(path, error) from error


def allocate(path: str | Path, forms: dict[str, Form], size: int) -> dict[str, np.ndarray]:
    """{name: empty array}, which take this number of bytes together."""
    check_memory(str(path), size)
    try:
        return {name: np.empty(*form) for name, form in forms.items()}
    except ValueError as error:  # more axes, or a longer one, than NumPy has
        raise not_valid(path, error) from error
    except MemoryError as error:
        needed = format_bytes(size)
        raise UserError(f"{path}: there is not enough memory for its arrays ({needed})") from error


def parse_record(path: str | Path, metadata: dict[str, str]) -> dict[str, Any]:
    """The record, which is JSON text in the metadata."""
    try:
        record = parse_json(metadata.get("rawtree", "{}"))
    except ValueError as error:
        raise Damaged(f"{path}: is damaged: its record is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise Damaged(f"{path}: is damaged: its record is not a JSON object")
    return record
