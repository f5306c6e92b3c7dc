"""A checkpoint in one safetensors file, which any safetensors reader opens, with its own SHA-256 and a record in its header.

Both written and read by hand, for the format is simple: eight bytes tell the length of the JSON header, the header where each
array lies, and the arrays follow without gap. So what is handed out is the very bytes that were hashed, read once, and
float8 comes back, too, for which the stock reader asks NumPy in vain."""

import hashlib
import json
import math
import os
import re
import reprlib
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np

from utils import Damaged, UserError, atomic_file, format_bytes

TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "BOOL": np.bool_,
}
TYPES |= {"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8}
TYPES |= {"U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8}
TYPES |= {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
TYPES |= {"F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz}
CODES = {np.dtype(dtype).name: code for code, dtype in TYPES.items()}

LONGEST_HEADER = 16 * 2**20  # hostile JSON takes thirty times its length in memory
NO_DIGEST = b"0" * 64  # is hashed in the place of the digest, which cannot be part of itself
# Looked for besides `rawtree`: one damaged byte in that word must not make ours a file of others, which is not verified.
# Others may put a hash of their own under this name, but hardly as the first of several metadata.
SIGNED = re.compile(rb'\{"__metadata__":\{"sha256":"([0-9a-f]{64})","')
TEXT = re.compile(rb"[\t\n\r -~]{8}")
FOREIGN = {
    rb"\x80[\x02-\x05][^\0]": "a pickle",
    rb"PK[\3\5][\4\6]": "a zip file, as torch.save and numpy.savez write",
}


def write(path, arrays, record):
    """Write {name: array} and the record, hash and all, so that `path` is either as it was or whole."""
    arrays = {name: np.asarray(leaf) for name, leaf in arrays.items()}
    # The widest first, as the stock writer does: so each lies at a multiple of its own width.
    arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize))
    header = make_header(path, arrays, record)
    start = len(header).to_bytes(8, "little") + header
    digest = hashlib.sha256(start)
    with atomic_file(path) as file:
        file.write(start)
        for array in arrays.values():
            data = raw_bytes(
                little_endian(array)
            )  # one by one, so that one copy at a time is in memory, where any is needed
            digest.update(data)  # like file.write, it lets other threads run meanwhile
            file.write(data)
        file.seek(start.index(NO_DIGEST))
        file.write(digest.hexdigest().encode())


def read(path, verified=False):
    """({name: array}, record), once its hash is found right, unless it is `verified`; a file that others wrote has none, and {}
    as its record."""
    with opened(path) as file:
        raw, header, metadata = read_header(path, file)
        signed = SIGNED.match(raw)
        if "rawtree" in metadata and not signed:
            raise Damaged(f"{path}: is damaged: it has no SHA-256 at its place")
        blank = raw[: signed.start(1)] + NO_DIGEST + raw[signed.end(1) :] if signed else raw
        digest = hashlib.sha256(len(raw).to_bytes(8, "little") + blank)
        arrays = make_room(path, header, os.fstat(file.fileno()).st_size - file.tell())
        for array in arrays.values():
            data = raw_bytes(array)
            if file.readinto(data) != len(data):
                raise not_whole(path, "it became shorter while it was read")
            if signed and not verified:
                digest.update(data)
    if signed and not verified and digest.hexdigest() != signed[1].decode():
        raise Damaged(f"{path}: is damaged: its SHA-256 is not the one written into it")
    return arrays, parse_record(path, metadata)


def read_record(path):
    """The record alone; neither the arrays nor the hash are looked at."""
    with opened(path) as file:
        return parse_record(path, read_header(path, file)[2])


def make_header(path, arrays, record):
    """The JSON header, the hash still blank and at a place that does not depend on what follows."""
    metadata = {"sha256": NO_DIGEST.decode(), "rawtree": json.dumps(record)}
    header, end = {"__metadata__": metadata}, 0
    for name, array in arrays.items():
        if array.dtype.name not in CODES:
            raise UserError(
                f"{path}: cannot hold {name}, an array of {array.dtype}; it holds {', '.join(CODES)}"
            )
        assert name not in header, f"{name}: means something else in a safetensors file"
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": CODES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise UserError(
            f"{path}: its names and record take {format_bytes(len(text))}, of {format_bytes(LONGEST_HEADER)} at most"
        )
    return text


def little_endian(array):
    """The array as the format has it, row after row and the low byte first; itself where it is so already."""
    return np.asarray(
        array, dtype=array.dtype.newbyteorder("<"), order="C"
    )  # ascontiguousarray would make () to (1,)


def raw_bytes(array):
    """The memory of a contiguous array; as uint8, since Python's buffers know no bfloat16."""
    return memoryview(array.reshape(-1).view(np.uint8))


@contextmanager
def opened(path):
    """The file, to be read; what is no file, or fails to be read, is told."""
    try:
        if not Path(path).exists():
            raise UserError(f"{path}: there is no such checkpoint")
        if not Path(path).is_file():  # a pipe would be waited for, a device has no end
            raise Damaged(
                f"{path}: is {'a folder' if Path(path).is_dir() else 'no plain file'}, not a safetensors file"
            )
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise Damaged(f"{path}: cannot be read: {error.strerror or error}") from error


def not_whole(path, why):
    """The error of a file that is no safetensors file, or a part of one."""
    return Damaged(f"{path}: is not a whole safetensors file: {why}")


def read_header(path, file):
    """(its bytes, {name: type, shape and place}, metadata); the file is left at its first array."""
    start, size = file.read(8), os.fstat(file.fileno()).st_size
    length = int.from_bytes(start, "little")
    if size < 8 or length > min(size - 8, LONGEST_HEADER):
        for magic, what in FOREIGN.items():
            if re.match(magic, start):
                raise Damaged(
                    f"{path}: is {what}; it is not read, since that could run code: save its arrays as safetensors"
                )
        if TEXT.match(start):
            raise not_whole(path, "it begins as a text")
        claim = (
            f"its header claims {length} bytes, of {LONGEST_HEADER} at most; " if size >= 8 else ""
        )
        raise not_whole(path, f"{claim}it has {size} bytes in all")
    raw = file.read(length)
    try:
        header = json.loads(raw.decode(), object_pairs_hook=without_duplicates)
        metadata = header.pop("__metadata__", None)
        metadata = {} if metadata is None else metadata
        "".join(
            [*header, *metadata, *metadata.values()]
        ).encode()  # no number, and no half of a surrogate pair
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise not_whole(path, f"its header is not JSON of the right form: {error}") from error
    return raw, header, metadata


def without_duplicates(pairs):
    """A JSON object; of two values under one name, readers would disagree on which counts."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name stands there twice")
    return dict(pairs)


def make_room(path, header, size):
    """{name: array to be filled} in the order of their bytes, which must fill `size` without gap or overlap."""
    wanted, end = {}, 0
    for begin, stop, name, code, shape in sorted(
        parse_entry(path, *item) for item in header.items()
    ):
        length = math.prod(shape) * np.dtype(TYPES[code]).itemsize
        if (begin, stop) != (end, end + length):
            raise not_whole(
                path, f"{name[:80]!r} lies at {begin} to {stop} instead of {end} to {end + length}"
            )
        wanted[name], end = (shape, TYPES[code]), stop
    if end != size:
        raise not_whole(path, f"its arrays take {end} bytes, and it has {size} of them")
    try:
        return {name: np.empty(*of) for name, of in wanted.items()}
    except (
        ValueError
    ) as error:  # an empty array may be longer along another axis than NumPy can count
        raise not_whole(path, error) from error
    except MemoryError as error:
        raise UserError(
            f"{path}: its arrays take {format_bytes(size)}, for which there is no memory"
        ) from error


def parse_entry(path, name, entry):
    """(begin, end, name, type, shape) of one array."""
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [begin, end]}:
            # As NumPy has it; also, multiplying a million long numbers would take forever.
            if (
                code in TYPES
                and len(shape) <= 64
                and all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end))
            ):
                return begin, end, name, code, shape
    raise not_whole(path, f"{name[:80]!r} is no array that can be read: {reprlib.repr(entry)}")


def parse_record(path, metadata):
    """The record, which is text in the metadata."""
    try:
        record = json.loads(metadata.get("rawtree", "{}"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: is damaged: its record is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise Damaged(f"{path}: is damaged: its record is no JSON object")
    return record
