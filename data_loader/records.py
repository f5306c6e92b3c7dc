"""How the bytes of a record become an example (x, y), and how examples become records.

Your own function is named in the config as `my_module.my_parse`, and is written as
`def my_parse(record, *, size: int = 8) -> Parsed`.
"""

import io
import math
import os
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.lib import format as npy

from data_loader import protobuf
from data_loader.base import Parsed
from data_loader.folder import decoded
from data_loader.npy_files import parsed
from utils import RunError, UserError


def numpy_example(record) -> Parsed:
    """A record that write_records wrote: two .npy files, x and y, one after the other."""
    x, end = _array(record, 0)
    y, end = _array(record, end)
    if end != len(record):
        raise UserError(
            f"has {len(record) - end} bytes after its two arrays; was it written by write_records?"
        )
    return x, y


def tf_example(
    record,
    *,
    x: str = "image",
    y: str = "label",
    shape: tuple[int, ...] | None = None,
    dtype: str = "uint8",
    image_size: tuple[int, int] | None = None,
    color: Literal["rgb", "gray"] = "rgb",
) -> Parsed:
    """Features `x` and `y` of a tf.train.Example; bytes are an image, or numbers with a `shape`."""
    try:
        features = protobuf.features(record)
        values = {name: protobuf.values(features[name]) for name in (x, y) if name in features}
    except (ValueError, TypeError) as error:
        raise UserError(f"is not a tf.train.Example: {error}") from error
    for name in (x, y):
        if values.get(name) is None or not len(values[name]):
            raise UserError(
                f"has no values of a feature {name!r}; its features: {', '.join(sorted(features))}"
            )
    return _input(x, values[x], shape, dtype, image_size, color), _target(y, values[y])


def write_records(path, dataset, shards=1):
    """Write the examples (x, y) of a dataset into ArrayRecord files; returns their paths.

    `data/train` with 4 shards becomes data/train-00000-of-00004.array_record and so on, in the
    order of the dataset; numpy_example reads them.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    paths = [Path(f"{path}-{i:05}-of-{shards:05}.array_record") for i in range(shards)]
    for file, rows in zip(paths, np.array_split(np.arange(len(dataset)), shards), strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        try:
            # One record per group, so that each can be read without decoding others.
            writer = ArrayRecordWriter(str(temporary), "group_size:1")
            for i in rows:
                writer.write(numpy_record(dataset[int(i)]))
            writer.close()
            os.replace(temporary, file)
        except RuntimeError as error:
            raise RunError(f"{file}: cannot be written: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
    return paths


def numpy_record(example):
    """The bytes of one example (x, y), which numpy_example reads."""
    file = io.BytesIO()
    for array in example:
        np.save(file, np.asarray(array, order="C"), allow_pickle=False)
    return file.getvalue()


def npy_array(data):
    """The array of a whole .npy file, given as its bytes."""
    array, end = _array(data, 0)
    if end != len(data):
        raise UserError(f"has {len(data) - end} bytes after its array")
    return array


def _array(record, start):
    """(the array of the .npy file that begins at `start`, the offset of its end)"""
    # Version 1.0 of the format: magic, version, length of the header, header, data.
    data = start + 10 + int.from_bytes(record[start + 8 : start + 10], "little")
    if record[start : start + 8] != b"\x93NUMPY\x01\x00" or data > len(record):
        raise UserError(
            "is not two arrays in .npy form; set `parse` to the function that reads it: "
            "tf_example, or your own"
        )
    shape, fortran, dtype = _header(record[start + 8 : data])
    size = math.prod(shape)
    end = data + size * dtype.itemsize
    if end > len(record):
        raise UserError(f"ends within an array of {dtype}{list(shape)}")
    array = np.frombuffer(record, dtype, size, data).reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=False), end  # in this machine's byte order


# All records have the same few headers, and parsing one takes longer than everything else.
@lru_cache(1000)
def _header(header):
    shape, fortran, dtype = parsed(npy.read_array_header_1_0, io.BytesIO(header))
    if dtype.hasobject:
        raise UserError(f"has an array of {dtype}; it must hold numbers")
    return shape, fortran, dtype


def _input(name, values, shape, dtype, image_size, color):
    """The model's input, from the values of a feature."""
    if isinstance(values, np.ndarray):
        return _shaped(name, _numbers(name, values), shape)
    if len(values) != 1:
        raise UserError(f"feature {name!r} has {len(values)} values of bytes, it needs one")
    if shape is not None:
        try:
            return _shaped(name, np.frombuffer(values[0], dtype), shape)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"feature {name!r}: {len(values[0])} bytes are not {dtype}{list(shape)}: {error}"
            ) from error
    try:
        return decoded(io.BytesIO(values[0]), image_size, color)
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(
            f"feature {name!r} is not a readable image ({error}); raw numbers need a `shape`"
        ) from error


def _shaped(name, values, shape):
    if shape is not None and len(values) != math.prod(shape):
        raise UserError(
            f"feature {name!r} has {len(values)} values, the shape {list(shape)} needs "
            f"{math.prod(shape)}"
        )
    return values if shape is None else values.reshape(shape)


def _target(name, values):
    """The target, from the values of a feature: one number or an array."""
    if isinstance(values, list):
        raise UserError(
            f"feature {name!r} is {values[0][:20]!r}, but a target must be numbers; "
            "write a `parse` function that converts it"
        )
    numbers = _numbers(name, values)
    return numbers[0] if len(numbers) == 1 else numbers


def _numbers(name, values):
    """int64 converted to int32, which is the integer type on devices; other types unchanged."""
    if values.dtype != np.int64:
        return values
    converted = values.astype(np.int32)
    if len(too_large := values[values != converted]):
        raise UserError(f"feature {name!r} has {too_large[0]}, which does not fit into int32")
    return converted
