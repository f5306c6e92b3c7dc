"""Files of records with random access: ArrayRecord, and TFRecord and tar with an index.

A record of a tar file is a sample as WebDataset has it, adjacent members with one key:
`dogs/17.jpg` and `dogs/17.cls` are the members `jpg` and `cls` of the sample `dogs/17`.
"""

import importlib.util
import os
import re
import tarfile
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate, groupby, islice

import numpy as np

from data_loader.paths import paths
from utils import Damaged, UserError, cut, format_bytes
from utils.files import Pieces, open_file

ARRAY_RECORD = bytes.fromhex("83af70d10d884a3f")  # the first bytes: the signature of Riegeli
MOST_BYTES = 2**31  # of one record, as in a protocol buffer
MOST_HEADER = 2**20  # bytes that are read at once between two members of a tar file, as for a name
MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)  # the key and the ending
MAX_OPEN = 512  # open files per process, half of the usual limit of a system
NEEDS = (
    "reading these files needs {}, which is not installed: "
    "run `pip install -r training/optional.txt`"
)


class RecordFiles:
    """The records of all files of a path or pattern, numbered in the order of the file names."""

    def __init__(self, pattern, ending=".array_record"):
        with ThreadPoolExecutor(16) as pool:  # a network disk serves many requests at once
            self.files = list(pool.map(_opened, paths(pattern, ending)))
        self.ends = list(accumulate(map(len, self.files)))
        self.source = f"{pattern} ({len(self.files)} files)"
        if not len(self):
            raise UserError(f"{pattern}: has no records in its {len(self.files)} files")

    def __len__(self):
        return self.ends[-1]

    def locate(self, index):
        """(the file that holds a record, the record's number in that file)"""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        i = bisect_right(self.ends, index)
        return self.files[i], index - (self.ends[i - 1] if i else 0)

    def name(self, index):
        """The name of a record in messages."""
        file, number = self.locate(index)
        key = f" ({cut(file.key(number), 80)})" if isinstance(file, TarSamples) else ""
        return f"{file.path}: record {number}{key}"

    def __getitem__(self, index):
        file, number = self.locate(index)
        try:
            return file[number]
        except (OSError, RuntimeError, ValueError) as error:
            raise Damaged(
                f"{file.path}: record {number} cannot be read ({error}); copy the file again"
            ) from error


def _opened(path):
    """The records of one file, whose format is recognized by its first bytes."""
    try:
        with open_file(path) as file:
            head = file.read(512)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
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

    def __init__(self, path):
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

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return _source(self.path, self.stamp)[number]


@lru_cache(MAX_OPEN)
def _source(path, _stamp):
    """A reader that keeps its file open; a changed stamp (time, size) opens the file again."""
    # The class from which Grain's own source derives.
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    return ArrayRecordDataSource([path])


class TFRecords:
    """The records of a TFRecord file: length (8 bytes), checksum of it (4), data, checksum (4)."""

    def __init__(self, path):
        self.path, self.offsets = path, _index(path)

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, number):
        start, end = map(int, self.offsets[number : number + 2])
        data = _read(self.path, start + 12, end - start - 12)
        if _checksum(data[:-4]) != data[-4:]:
            raise OSError("its checksum is wrong")
        return data[:-4]


def _index(path):
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


def _length_is_valid(head):
    return len(head) == 12 and _checksum(head[:8]) == head[8:]


def _checksum(data):
    """The masked CRC of the TFRecord format: rotated, then a constant is added."""
    try:
        from crc32c import crc32c
    except ImportError as error:
        raise UserError(NEEDS.format("crc32c")) from error
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")


class TarSamples:
    """The samples of a tar file, each {ending: bytes}; only their places are kept in memory."""

    def __init__(self, path):
        self.path, starts, endings, members = path, [], {}, []
        for _, sample in _samples(path):
            starts.append(len(members))
            for ending, offset, size in sample:
                members.append((endings.setdefault(ending, len(endings)), offset, size))
        self.endings = list(endings)
        self.starts = np.array([*starts, len(members)], np.int64)
        self.members = np.array(members, np.int64).reshape(-1, 3)

    def __len__(self):
        return len(self.starts) - 1

    def __getitem__(self, number):
        places = self.members[self.starts[number] : self.starts[number + 1]].tolist()
        first = places[0][1]
        size = sum(places[-1][1:]) - first
        data = _read(self.path, first, size)
        begins = ((self.endings[i], offset - first, size) for i, offset, size in places)
        return {ending: data[begin : begin + size] for ending, begin, size in begins}

    def key(self, number):
        """The key of a sample."""
        return next(islice(_samples(self.path), number, None))[0]


def _samples(path):
    """(key, [(ending, offset, size)]) of each sample."""
    for key, group in groupby(_members(path), lambda member: member[0]):
        sample = [member[1:] for member in group]
        endings = [ending for ending, _, _ in sample]
        if twice := [ending for ending in endings if endings.count(ending) > 1]:
            raise UserError(f"{path}: the sample {key!r} has two members .{twice[0]}; delete one")
        yield key, sample


def _members(path):
    """(key, ending, offset, size) of each member that is a regular file with an ending."""
    count = 0
    try:
        headers = Pieces(file := open_file(path), MOST_HEADER)
        with file, tarfile.open(fileobj=headers, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # or the list would grow with every member
                count += 1
                named = MEMBER.fullmatch(member.name)
                if member.isreg() and not member.issparse() and named:
                    yield *named.groups(), member.offset_data, member.size
            # tarfile also ends where a header is damaged.
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise tarfile.ReadError("a damaged header")
    except (tarfile.TarError, OSError, ValueError, ArithmeticError, RecursionError) as error:
        why = f"is not a whole tar file: after {count} members: {error}; copy it again"
        raise Damaged(f"{path}: {why}") from error


def _read(path, start, size):
    """A record, from the file that is opened for each one: a thousand are too many to keep open."""
    if size > MOST_BYTES:
        raise OSError(f"it has {format_bytes(size)}; at most {format_bytes(MOST_BYTES)}")
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        data = file.read(size)
    if len(data) < size:
        raise OSError("the file ends within it")
    return data
