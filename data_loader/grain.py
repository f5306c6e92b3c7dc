"""Examples in record files, more than fit into memory, which worker processes may read.

The loader decides the order of an epoch, and a batch depends only on its row of that order. So the
batches are the same for any number of workers, and a checkpoint needs no position of this reader:
the epoch and the batch, which it holds anyway, are enough.

The files have random access: ArrayRecord, and TFRecord and tar with an index. A record of a tar
file is a sample as WebDataset has it, adjacent members with one key: `dogs/17.jpg` and
`dogs/17.cls` are the members `jpg` and `cls` of the sample `dogs/17`.
"""

import importlib.util
import os
import pickle
import re
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, islice
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from data_loader.base import (
    Arrays,
    Batch,
    CollateFn,
    Data,
    DataOfHelper,
    Parsed,
    check_labels,
    named_sets,
)
from data_loader.loader import collated
from data_loader.nest import map_nest, named_nest
from data_loader.paths import paths, reading
from data_loader.records import numpy_example
from data_loader.workers import Workers
from utils import Damaged, RunError, UserError, cut, format_bytes, where_and_why
from utils.files import Pieces, open_file
from utils.forms import Count, CountOrZero, LocalPath, at_most, checked

if TYPE_CHECKING:
    from array_record.python.array_record_data_source import ArrayRecordDataSource

MEMORY_MB = 1024  # of decoded examples that are kept in memory
ARRAY_RECORD = bytes.fromhex("83af70d10d884a3f")  # the first bytes: the signature of Riegeli
MOST_BYTES = 2**31  # of one record, as in a protocol buffer
MOST_HEADER = 2**20  # bytes that are read at once between two members of a tar file, as for a name
MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)  # the key and the ending
MAX_OPEN = 512  # open files per process, half of the usual limit of a system
NEEDS = (
    "reading these files needs {}, which is not installed: "
    "run `pip install -r training/optional.txt`"
)


@checked
def grain(
    train: LocalPath,
    test: LocalPath | None = None,
    val: LocalPath | None = None,
    parse: Parsed | None = None,
    workers: Annotated[CountOrZero, at_most(1024)] = 2,
    num_classes: Count | None = None,
    vocab_size: Count | None = None,
    classes: tuple[str, ...] | None = None,
) -> Data:
    """ArrayRecord or TFRecord files, a path or a pattern per set; `parse` decodes a record.

    Without `parse`, numpy_example does.
    """
    files = {name: RecordFiles(each) for name, each in named_sets(train, val, test).items()}
    return data_of(
        files,
        parse or numpy_example,
        workers,
        num_classes=num_classes,
        vocab_size=vocab_size,
        classes=classes,
    )


@runtime_checkable
class Source(Protocol):
    """Records by their number, each of any type; `name` and `source` are for messages."""

    source: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def name(self, index: int) -> str: ...


Parse: TypeAlias = Callable[[Any], Parsed]  # a record of a Source -> its example


def data_of(
    files: Mapping[str, Source],
    parse: Parse,
    workers: int,
    memory_mb: int = 0,
    *,
    num_classes: int | None = None,
    vocab_size: int | None = None,
    classes: tuple[str, ...] | None = None,
) -> DataOfHelper:
    """The Data of {set: its records}. If all examples take at most `memory_mb`, they are read into
    the memory."""
    if classes and num_classes is None:
        num_classes = len(classes)
    sets = {name: Records(each, parse, workers, num_classes) for name, each in files.items()}
    example = map_nest(np.zeros_like, sets["train"][0])
    sizes = {name: len(dataset) for name, dataset in sets.items()}
    fits = sum(sizes.values()) * sum(a.nbytes for _, a in named_nest(example)) <= memory_mb * 2**20

    def load() -> dict[str, "Arrays | Records"]:
        return {name: in_memory(records) if fits else records for name, records in sets.items()}

    return Data(example, sizes, load, num_classes, vocab_size, classes)


def in_memory(records: "Records") -> "Arrays | Records":
    """The examples (x, y) of Records as Arrays; the Records themselves if they differ in shape."""
    first, rows = records[0], np.arange(len(records))
    shapes = [np.shape(leaf) for leaf in first]
    x, y = (np.empty((len(rows), *np.shape(leaf)), np.asarray(leaf).dtype) for leaf in first)

    def read(some: np.ndarray) -> None:
        for i in some.tolist():
            example = records[i]
            if [np.shape(leaf) for leaf in example] != shapes:
                raise ValueError("another shape")
            x[i], y[i] = example

    try:
        with ThreadPoolExecutor() as pool:  # Pillow decodes in parallel
            list(pool.map(read, np.split(rows, range(64, len(rows), 64))))
    except ValueError:
        return records
    return Arrays(x, y, records.source)


class Records:
    """The examples of record files, or of another Source; worker processes read batches of them."""

    def __init__(
        self, files: Source, parse: Parse, workers: int, num_classes: int | None = None
    ) -> None:
        self.files, self.source = files, files.source
        self.parse = parse
        self.workers = workers
        self.num_classes = num_classes
        self.advice = f"use more data.args.workers (now {workers}), if there are more cores"

    def __len__(self) -> int:
        return len(self.files)

    @cached_property
    def types(self) -> dict[str, np.dtype]:
        """{leaf: its type} in the first record."""
        return types_of(self.parse(self.files[0]))

    def __getitem__(self, index: int) -> Parsed:
        record = self.files[index]
        try:
            example = self.parse(record)
            self.check(example)
            return example
        except UserError as error:
            raise UserError(f"{self.files.name(index)}: {error}") from error
        except Exception as error:  # a user's function may raise anything
            raise UserError(
                f"{self.files.name(index)}: parse fails: {where_and_why(error)}"
            ) from error

    def check(self, example: Parsed) -> None:
        """Refuse a label outside the classes, and numbers of another kind than in the first record:
        one example of floats would turn a batch of bytes into a batch of floats."""
        if self.num_classes is not None and isinstance(example, tuple):
            label = example[1]
            if np.ndim(label) == 0 and not 0 <= label < self.num_classes:
                check_labels("its target", [label], self.num_classes)
        for name, dtype in types_of(example).items():
            first = self.types.get(name, dtype)
            is_wider = dtype.kind in "iu" and not np.can_cast(dtype, first)
            if dtype.kind != first.kind or is_wider:
                raise UserError(
                    f"{name or 'its example'} is {dtype}, but {first} in {self.files.name(0)}; "
                    "write one type"
                )

    def batch(self, task: tuple[CollateFn, np.ndarray]) -> Batch:
        """One batch of a (collate_fn, row of indices)."""
        collate_fn, row = task
        return collated([self[int(i)] for i in row], collate_fn)

    def read_batches(self, order: Iterable[np.ndarray], collate_fn: CollateFn) -> Iterator[Batch]:
        """One batch for each row of `order`."""
        tasks = [(collate_fn, row) for row in order]
        if not self.workers:
            yield from map(self.batch, tasks)
            return
        try:
            pickle.dumps((self.parse, collate_fn))
        except Exception as error:
            raise UserError(
                f"workers: {error}; worker processes need functions that a module has under a "
                "name; or set workers to 0"
            ) from error
        try:
            yield from self.processes.mapped(tasks)
        except RunError:  # a process has died; the next pass starts others
            vars(self).pop("processes", None)
            raise

    @cached_property
    def processes(self) -> Workers:
        """The Workers, which are kept until this dataset is deleted. They get a copy of it, so that
        it holds no reference to itself."""
        return Workers(copy(self).batch, self.workers)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "processes"}


def types_of(example: Parsed) -> dict[str, np.dtype]:
    return {name: np.asarray(leaf).dtype for name, leaf in named_nest(example)}


# Files.


class RecordFiles:
    """The records of all files of a path or pattern, numbered in the order of the file names."""

    def __init__(self, pattern: str, ending: str = ".array_record") -> None:
        with ThreadPoolExecutor(16) as pool:  # a network disk serves many requests at once
            self.files = list(pool.map(_opened, paths(pattern, ending)))
        self.ends = list(accumulate(map(len, self.files)))
        self.source = f"{pattern} ({len(self.files)} files)"
        if not len(self):
            raise UserError(f"{pattern}: has no records in its {len(self.files)} files")

    def __len__(self) -> int:
        return self.ends[-1]

    def locate(self, index: int) -> "tuple[RecordFile, int]":
        """(the file that holds a record, the record's number in that file)"""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        i = bisect_right(self.ends, index)
        return self.files[i], index - (self.ends[i - 1] if i else 0)

    def name(self, index: int) -> str:
        """The name of a record in messages."""
        file, number = self.locate(index)
        key = f" ({cut(file.key(number), 80)})" if isinstance(file, TarSamples) else ""
        return f"{file.path}: record {number}{key}"

    def __getitem__(self, index: int) -> bytes | dict[str, bytes]:
        file, number = self.locate(index)
        try:
            return file[number]
        except (OSError, RuntimeError, ValueError) as error:
            raise Damaged(
                f"{file.path}: record {number} cannot be read ({error}); copy the file again"
            ) from error


def _opened(path: str) -> "RecordFile":
    """The records of one file, whose format is recognized by its first bytes."""
    with reading(path), open_file(path) as file:
        head = file.read(512)
    if not head and path.endswith((".tar", ".array_record")):
        raise UserError(f"{path}: is empty; write or copy it again")
    if head[257:262] == b"ustar":
        return TarSamples(path)
    if head.startswith(ARRAY_RECORD):
        return ArrayRecords(path)
    if head.startswith(b"\x1f\x8b"):
        raise UserError(
            f"{path}: the whole file is compressed, so that no single record can be read; "
            "unpack it with gunzip"
        )
    if head and not _length_is_valid(head[:12]):
        raise UserError(
            f"{path}: is neither an ArrayRecord file nor a TFRecord file nor a tar file, or is "
            "damaged at its start; copy it again"
        )
    return TFRecords(path)


class ArrayRecords:
    """The records of an ArrayRecord file."""

    def __init__(self, path: str) -> None:
        if importlib.util.find_spec("array_record") is None:
            raise UserError(NEEDS.format("array_record"))
        status = os.stat(path)
        self.path, self.stamp = path, (status.st_mtime_ns, status.st_size)
        try:
            self.count = len(_source(path, self.stamp))
        except (RuntimeError, ValueError) as error:
            raise Damaged(
                f"{path}: is not a complete ArrayRecord file ({error}); write or copy it again"
            ) from error

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> bytes:
        return _source(self.path, self.stamp)[number]


@lru_cache(MAX_OPEN)
def _source(path: str, _stamp: tuple[int, int]) -> "ArrayRecordDataSource":
    """A reader that keeps its file open; a changed stamp (time, size) opens the file again."""
    # The class from which Grain's own source derives.
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    return ArrayRecordDataSource([path])


class TFRecords:
    """The records of a TFRecord file: length (8 bytes), checksum of it (4), data, checksum (4)."""

    def __init__(self, path: str) -> None:
        self.path, self.offsets = path, _index(path)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> bytes:
        start, end = map(int, self.offsets[number : number + 2])
        data = _read(self.path, start + 12, end - start - 12)
        if _checksum(data[:-4]) != data[-4:]:
            raise OSError("its checksum is wrong")
        return data[:-4]


def _index(path: str) -> np.ndarray:
    """The offset of each record of a TFRecord file and of its end; reads only the lengths."""
    offsets, size = [0], os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:
        while offsets[-1] < size:
            file.seek(offsets[-1])
            head = file.read(12)
            if not _length_is_valid(head):
                raise Damaged(
                    f"{path}: record {len(offsets) - 1} is damaged, so that the records after it "
                    "cannot be found; copy the file again"
                )
            offsets.append(offsets[-1] + 16 + int.from_bytes(head[:8], "little"))
    if offsets[-1] > size:
        raise Damaged(f"{path}: ends within record {len(offsets) - 2}; copy the file again")
    return np.array(offsets, np.int64)


def _length_is_valid(head: bytes) -> bool:
    return len(head) == 12 and _checksum(head[:8]) == head[8:]


def _checksum(data: bytes) -> bytes:
    """The masked CRC of the TFRecord format: rotated, then a constant is added."""
    try:
        from crc32c import crc32c
    except ImportError as error:
        raise UserError(NEEDS.format("crc32c")) from error
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")


class TarSamples:
    """The samples of a tar file, each {ending: bytes}; only their places are kept in memory."""

    def __init__(self, path: str) -> None:
        self.path = path
        starts: list[int] = []
        endings: dict[str, int] = {}
        members: list[tuple[int, int, int]] = []
        for _, sample in _samples(path):
            starts.append(len(members))
            for ending, offset, size in sample:
                members.append((endings.setdefault(ending, len(endings)), offset, size))
        self.endings = list(endings)
        self.starts = np.array([*starts, len(members)], np.int64)
        self.members = np.array(members, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> dict[str, bytes]:
        places = self.members[self.starts[number] : self.starts[number + 1]].tolist()
        first = places[0][1]
        size = sum(places[-1][1:]) - first
        data = _read(self.path, first, size)
        begins = ((self.endings[i], offset - first, size) for i, offset, size in places)
        return {ending: data[begin : begin + size] for ending, begin, size in begins}

    def key(self, number: int) -> str:
        """The key of a sample."""
        return next(islice(_samples(self.path), number, None))[0]


RecordFile: TypeAlias = ArrayRecords | TFRecords | TarSamples


def _samples(path: str) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """(key, [(ending, offset, size)]) of each sample."""
    for key, group in groupby(_members(path), lambda member: member[0]):
        sample = [member[1:] for member in group]
        endings = [ending for ending, _, _ in sample]
        if twice := [ending for ending in endings if endings.count(ending) > 1]:
            raise UserError(f"{path}: the sample {key!r} has two members .{twice[0]}; delete one")
        yield key, sample


def _members(path: str) -> Iterator[tuple[str, str, int, int]]:
    """(key, ending, offset, size) of each member that is a regular file with an ending."""
    count = 0
    try:
        headers: Any = Pieces(file := open_file(path), MOST_HEADER)
        with file, tarfile.open(fileobj=headers, mode="r:") as archive:
            while (member := archive.next()) is not None:
                # Or this list, which tarfile's types lack, would grow with every member.
                archive.members = []  # pyright: ignore[reportAttributeAccessIssue]
                count += 1
                named = MEMBER.fullmatch(member.name)
                if member.isreg() and not member.issparse() and named:
                    yield named[1], named[2], member.offset_data, member.size
            # tarfile also ends where a header is damaged.
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise tarfile.ReadError("a damaged header")
    except (tarfile.TarError, OSError, ValueError, ArithmeticError, RecursionError) as error:
        raise Damaged(
            f"{path}: is not a whole tar file: after {count} members: {error}; copy it again"
        ) from error


def _read(path: str, start: int, size: int) -> bytes:
    """A record, from the file that is opened for each one: a thousand are too many to keep open."""
    if size > MOST_BYTES:
        raise OSError(f"it has {format_bytes(size)}; at most {format_bytes(MOST_BYTES)}")
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        data = file.read(size)
    if len(data) < size:
        raise OSError("the file ends within it")
    return data
