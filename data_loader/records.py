"""How the bytes of a record become an example (x, y), and how examples become records.

Your own function is named in the config as `my_module.my_parse`, and is written as
`def my_parse(record, *, size: int = 8) -> Parsed`.
"""

import io
import math
import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_loader.base import Dataset, Parsed
from data_loader.images import Color, ImageSize, image_in
from data_loader.npy_files import array_in
from utils import RunError, UserError

INSTALL = "run `pip install -r training/optional.txt`"
# The messages of TensorFlow's example.proto and feature.proto.
TF_EXAMPLE = """
name: "example.proto" syntax: "proto3"
message_type { name: "Example" field { name: "features" number: 1 type_name: "Features" } }
message_type {
  name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type_name: "Entry" }
}
message_type {
  name: "Entry"
  field { name: "name" number: 1 type: TYPE_STRING }
  field { name: "feature" number: 2 type_name: "Feature" }
}
message_type {
  name: "Feature"
  field { name: "bytes_list" number: 1 type_name: "BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type_name: "FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type_name: "Int64List" oneof_index: 0 }
  oneof_decl { name: "kind" }
}
message_type {
  name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES }
}
message_type {
  name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT }
}
message_type {
  name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 }
}
"""


def numpy_example(record: bytes) -> Parsed:
    """A record that write_records wrote: two .npy files, x and y, one after the other."""
    try:
        x, end = array_in(record)
        y, end = array_in(record, end)
    except ValueError as error:
        raise UserError(
            f"is not two arrays in .npy form ({error}); set `parse` to the function that reads it: "
            "tf_example, or your own"
        ) from error
    if end != len(record):
        raise UserError(
            f"has {len(record) - end} bytes after its two arrays; was it written by write_records?"
        )
    return x, y


def write_records(path: str | Path, dataset: Dataset, shards: int = 1) -> list[Path]:
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


def numpy_record(example: Iterable[Any]) -> bytes:
    """The bytes of one example (x, y), which numpy_example reads."""
    file = io.BytesIO()
    for array in example:
        np.save(file, np.asarray(array, order="C"), allow_pickle=False)
    return file.getvalue()


def tf_example(
    record: bytes,
    *,
    x: str = "image",
    y: str = "label",
    shape: tuple[int, ...] | None = None,
    dtype: str = "uint8",
    image_size: tuple[int, int] | None = None,
    color: Literal["rgb", "gray"] = "rgb",
) -> Parsed:
    """Features `x` and `y` of a tf.train.Example; bytes are an image, or numbers with a `shape`."""
    example_class, decode_error = tf_example_class()
    try:
        features = {e.name: e.feature for e in example_class.FromString(record).features.feature}
    except decode_error as error:
        raise UserError(f"is not a tf.train.Example: {error}") from error
    found = {name: _values(name, features[name]) for name in (x, y) if name in features}
    for name in (x, y):
        if not len(found.get(name, ())):
            raise UserError(
                f"has no values of a feature {name!r}; its features: {', '.join(sorted(features))}"
            )
    if isinstance(found[y], list):
        raise UserError(
            f"feature {y!r} is {found[y][0][:20]!r}, but a target must be numbers; "
            "write a `parse` function that converts it"
        )
    target = found[y][0] if len(found[y]) == 1 else found[y]
    return _input(x, found[x], shape, dtype, image_size, color), target


@cache
def tf_example_class() -> tuple[Any, type[Exception]]:
    """(the class of the message tf.train.Example, the error of bytes that are none)"""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise UserError(f"tf_example: needs protobuf, which is not installed: {INSTALL}") from error
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(TF_EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example")), DecodeError


def _values(name: str, feature: Any) -> list[bytes] | np.ndarray:
    """A list of bytes, or an array of float32 or int32, the integer type on devices."""
    kind = feature.WhichOneof("kind")
    if kind is None:
        return []
    values = getattr(feature, kind).value
    if kind == "bytes_list":
        return list(values)
    if kind == "float_list":
        return np.array(values, np.float32)
    numbers = np.array(values, np.int64)
    converted = numbers.astype(np.int32)
    if len(too_large := numbers[numbers != converted]):
        raise UserError(f"feature {name!r} has {too_large[0]}, which does not fit into int32")
    return converted


def _input(
    name: str,
    values: list[bytes] | np.ndarray,
    shape: Sequence[int] | None,
    dtype: str,
    image_size: ImageSize,
    color: Color,
) -> np.ndarray:
    """The model's input, from the values of a feature."""
    if isinstance(values, list):
        if len(values) != 1:
            raise UserError(f"feature {name!r} has {len(values)} values of bytes, it needs one")
        if shape is None:
            return image_in(
                values[0], f"feature {name!r}", image_size, color, "; raw numbers need a `shape`"
            )
        try:
            values = np.frombuffer(values[0], dtype)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"feature {name!r}: {len(values[0])} bytes are not {dtype}{list(shape)}: {error}"
            ) from error
    if shape is not None and len(values) != math.prod(shape):
        raise UserError(
            f"feature {name!r} has {len(values)} values, the shape {list(shape)} needs "
            f"{math.prod(shape)}"
        )
    return values if shape is None else values.reshape(shape)
