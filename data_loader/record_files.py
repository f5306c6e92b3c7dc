"""Files of records, each to be had by its number: ArrayRecord, and TFRecord by an index of where its records begin."""

import glob
import importlib.util
import os
import re
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate

import numpy as np

from utils import Damaged, UserError

ARRAY_RECORD = bytes.fromhex("83af70d10d884a3f")  # how such a file begins: the signature of Riegeli
OPEN = 512  # files at a time in a process, half of what a system usually allows
NEEDS = "reading these files needs {}, which is not installed: run `pip install -r training/requirements.txt`"


class RecordFiles:
    """The records of the files that a path or a pattern names, numbered through in the order of the files' names."""

    def __init__(self, pattern):
        with ThreadPoolExecutor(
            16
        ) as pool:  # a disk over the network answers many questions as soon as one
            self.files = list(pool.map(_opened, paths(pattern)))
        self.ends = list(accumulate(map(len, self.files)))
        if not len(self):
            raise UserError(f"{pattern}: has no records in its {len(self.files)} files")

    def __len__(self):
        return self.ends[-1]

    def place(self, index):
        """(the file of a record, its number there)"""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        file = bisect_right(self.ends, index)
        return self.files[file], index - (self.ends[file - 1] if file else 0)

    def name(self, index):
        """What a record is called in messages."""
        file, number = self.place(index)
        return f"{file.path}: record {number}"

    def __getitem__(self, index):
        file, number = self.place(index)
        try:
            return file[number]
        except (OSError, RuntimeError, ValueError) as error:
            raise Damaged(
                f"{file.path}: record {number} cannot be read ({error}); copy the file again"
            ) from error


def paths(pattern):
    """The files of a path or a pattern, sorted; of files numbered `-00000-of-00010` a pattern with `*` must find all."""
    found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    found = [path for path in found if not os.path.isdir(path)]
    if not found:
        raise UserError(
            f"{pattern}: no such file; name one, or many with a pattern such as data/train-*.array_record"
        )
    for path in found if "*" in pattern else ():
        if numbered := re.fullmatch(r"(.*-)(\d+)(-of-0*(\d+).*)", path):
            before, digits, after, count = numbered.groups()
            wanted = {f"{before}{i:0{len(digits)}}{after}" for i in range(int(count))}
            if missing := sorted(wanted - set(found)):
                raise UserError(
                    f"{missing[0]}: is missing, with {len(wanted) - len(missing)} of its {count} files there"
                )
    return found


def _opened(path):
    """The records of one file, by how it begins."""
    try:
        with open(path, "rb") as file:
            head = file.read(12)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if head.startswith(ARRAY_RECORD):
        return _array_records(path)
    if head.startswith(b"\x1f\x8b"):
        raise UserError(
            f"{path}: is compressed as a whole, so that no record can be had by itself; unpack it with gunzip"
        )
    if head and not _length_is_sound(head):
        raise UserError(
            f"{path}: is neither an ArrayRecord file nor a TFRecord file, or is damaged at its start"
        )
    return TFRecords(path)


def _array_records(path):
    if importlib.util.find_spec("array_record") is None:
        raise UserError(NEEDS.format("array_record"))
    try:
        return ArrayRecords(path)
    except (RuntimeError, ValueError) as error:
        raise Damaged(
            f"{path}: is no whole ArrayRecord file ({error}); write it anew, or copy it again"
        ) from error


class ArrayRecords:
    """The records of an ArrayRecord file."""

    def __init__(self, path):
        found = os.stat(path)
        self.path, self.stamp = path, (found.st_mtime_ns, found.st_size)
        self.count = len(_source(path, self.stamp))

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return _source(self.path, self.stamp)[number]


@lru_cache(OPEN)
def _source(path, _stamp):
    """Reads a file that it keeps open, as it is at its stamp."""
    from array_record.python.array_record_data_source import (
        ArrayRecordDataSource,
    )  # what Grain's own source derives from

    return ArrayRecordDataSource([path])


class TFRecords:
    """The records of a TFRecord file: length (8 bytes), its checksum (4), data, its checksum (4)."""

    def __init__(self, path):
        self.path, self.places = path, _index(path)

    def __len__(self):
        return len(self.places) - 1

    def __getitem__(self, number):
        start, end = map(int, self.places[number : number + 2])
        with open(
            self.path, "rb", buffering=0
        ) as file:  # each time: a thousand files would be too many to keep open
            data = os.pread(file.fileno(), end - start - 12, start + 12)
        if len(data) != end - start - 12 or _checksum(data[:-4]) != data[-4:]:
            raise OSError("its checksum does not agree")
        return data[:-4]


def _index(path):
    """Where each record of a TFRecord file begins, and where the last one ends; only the lengths are read."""
    places, size = [0], os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:
        while places[-1] < size:
            head = os.pread(file.fileno(), 12, places[-1])
            if not _length_is_sound(head):
                raise Damaged(
                    f"{path}: record {len(places) - 1} is damaged, and what follows with it; copy the file again"
                )
            places.append(places[-1] + 16 + int.from_bytes(head[:8], "little"))
    if places[-1] > size:
        raise Damaged(f"{path}: ends within record {len(places) - 2}; copy the file again")
    return np.array(places, np.int64)


def _length_is_sound(head):
    return len(head) == 12 and _checksum(head[:8]) == head[8:]


def _checksum(data):
    """The CRC of some bytes as the format has it: rotated, with a number added."""
    try:
        from crc32c import crc32c
    except ImportError as error:
        raise UserError(NEEDS.format("crc32c")) from error
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")
