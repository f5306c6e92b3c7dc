"""How the bytes of a record become an example (x, y), and how examples become records.

A function of one's own is named in the config as `my_module.my_parse`: `def my_parse(record, *, size: int = 8) -> Parsed`.
"""

import io
import math
import os
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.lib import format as npy

from data_loader import protobuf
from data_loader.base import Parsed
from data_loader.folder import decoded
from utils import RunError, UserError


def numpy_example(record) -> Parsed:
    """What write_records wrote: two .npy files in a row, x and y."""
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
    """The features `x` and `y` of a tf.train.Example; bytes are an encoded image, or with a `shape` the numbers themselves."""
    try:
        found = protobuf.features(record)
        values = {name: protobuf.values(found[name]) for name in (x, y) if name in found}
    except (ValueError, TypeError) as error:
        raise UserError(f"is no tf.train.Example: {error}") from error
    for name in (x, y):
        if values.get(name) is None or not len(values[name]):
            raise UserError(
                f"has no values of a feature {name!r}; its features: {', '.join(sorted(found))}"
            )
    return _input(x, values[x], shape, dtype, image_size, color), _target(y, values[y])


def write_records(path, dataset, shards=1):
    """Write the examples (x, y) of a dataset into ArrayRecord files for numpy_example; the paths of the files.

    `data/train` and 4 shards are data/train-00000-of-00004.array_record and so on, in the dataset's order.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    paths = [Path(f"{path}-{i:05}-of-{shards:05}.array_record") for i in range(shards)]
    for place, rows in zip(paths, np.array_split(np.arange(len(dataset)), shards), strict=True):
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
        try:
            writer = ArrayRecordWriter(
                str(temporary), "group_size:1"
            )  # each record can then be read by itself
            for i in rows:
                writer.write(numpy_record(dataset[int(i)]))
            writer.close()
            os.replace(temporary, place)
        except RuntimeError as error:
            raise RunError(f"{place}: cannot be written: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
    return paths


def numpy_record(example):
    """The bytes of one example (x, y), as numpy_example reads them."""
    file = io.BytesIO()
    for part in example:
        np.save(file, np.asarray(part), allow_pickle=False)
    return file.getvalue()


def _array(record, at):
    """(the .npy file that begins there, where it ends)"""
    start = (
        at + 10 + int.from_bytes(record[at + 8 : at + 10], "little")
    )  # version 1.0: magic, version, length of the header
    if record[at : at + 8] != b"\x93NUMPY\x01\x00" or start > len(record):
        raise UserError(
            "is not two arrays in .npy form; name with `parse` how to read it: tf_example, or a function of your own"
        )
    shape, dtype = _header(record[at + 8 : start])
    size = math.prod(shape)
    end = start + size * dtype.itemsize
    if end > len(record):
        raise UserError(f"ends within an array of {dtype}{list(shape)}")
    return np.frombuffer(record, dtype, size, start).reshape(shape), end


@cache  # all records have the same few, and reading one takes longer than all else
def _header(header):
    shape, fortran, dtype = npy.read_array_header_1_0(io.BytesIO(header))
    if dtype.hasobject or fortran:
        raise UserError(
            f"has an array of {dtype}{' in Fortran order' if fortran else ''}; write it with write_records"
        )
    return shape, dtype


def _input(name, values, shape, dtype, image_size, color):
    """The feature that goes into the model."""
    if isinstance(values, np.ndarray):
        return _shaped(name, _numbers(name, values), shape)
    if len(values) != 1:
        raise UserError(f"feature {name!r} has {len(values)} values of bytes, it needs one")
    if shape is not None:
        try:
            return _shaped(name, np.frombuffer(values[0], dtype), shape)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"feature {name!r}: {len(values[0])} bytes are no {dtype}{list(shape)}: {error}"
            ) from error
    try:
        return decoded(io.BytesIO(values[0]), image_size, color)
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(
            f"feature {name!r} is no readable image ({error}); raw numbers need a `shape`"
        ) from error


def _shaped(name, values, shape):
    if shape is not None and len(values) != math.prod(shape):
        raise UserError(
            f"feature {name!r} has {len(values)} values, the shape {list(shape)} needs {math.prod(shape)}"
        )
    return values if shape is None else values.reshape(shape)


def _target(name, values):
    """The feature to be predicted: one number, or a row of them."""
    if isinstance(values, list):
        raise UserError(
            f"feature {name!r} is {values[0][:20]!r}, and a target needs numbers; write a `parse` that makes them"
        )
    numbers = _numbers(name, values)
    return numbers[0] if len(numbers) == 1 else numbers


def _numbers(name, values):
    """int64 as int32, which is what devices hold."""
    if values.dtype != np.int64:
        return values
    if (values != values.astype(np.int32)).any():
        raise UserError(
            f"feature {name!r} has {values[np.argmax(np.abs(values))]}, which is no int32"
        )
    return values.astype(np.int32)
