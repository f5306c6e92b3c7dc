"""Files of records with random access: ArrayRecord, and TFRecord and tar with an index."""

import glob
import importlib.util
import os
import re
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate

import numpy as np

from data_loader.tar_files import TarSamples
from utils import Damaged, UserError, cut, format_bytes
from utils.files import check_kind, open_file

ARRAY_RECORD = bytes.fromhex("83af70d10d884a3f")  # the first bytes: the signature of Riegeli
MOST_BYTES = 2**31  # of one record, as in a protocol buffer
MOST_FILES = 100_000  # of one pattern
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


def paths(pattern, ending):
    """The files of a path or a pattern, sorted; the `ending` is that of the example in a message.

    Where a pattern with `*` matches files numbered `-00000-of-00010`, all of them must exist; and
    so must all of `{000..012}`.
    """
    if numbers := re.search(r"\{(\d+)\.\.(\d+)\}", pattern):
        first, last = numbers.groups()
        if not int(first) <= int(last) < int(first) + MOST_FILES:
            raise UserError(f"{pattern}: {numbers[0]} is not a range of up to {MOST_FILES} files")
        before, after = pattern[: numbers.start()], pattern[numbers.end() :]
        each = (f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1))
        return [path for i in each for path in paths(f"{before}{i}{after}", ending)]
    files = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    files = [path for path in files if not os.path.isdir(path)]
    if not files and os.path.isdir(pattern):
        inside = sorted(glob.glob(os.path.join(glob.escape(pattern), f"*{ending}")))
        likely = [path for path in inside if "train" in os.path.basename(path)] or inside
        example = [*likely, os.path.join(pattern, f"*{ending}")][0]
        raise UserError(f"{pattern}: is a folder; name the files in it, as {example}")
    if not files:
        raise UserError(
            f"{pattern}: no such file; name one file, or several with a pattern such as "
            f"data/train-*{os.path.splitext(pattern)[1] or ending}"
        )
    refuse_pipes(files)
    if "*" in pattern:
        check_numbers(files)
    return files


def check_numbers(files):
    """Refuse files numbered as `-00000-of-00010` if some are missing."""
    numbered = [re.fullmatch(r"(.*-)(\d+)(-of-0*(\d+).*)", path) for path in files]
    series = {(m[1], len(m[2]), m[3], int(m[4])) for m in numbered if m}
    counts = {}
    for before, _, _, count in sorted(series):
        if counts.setdefault(before, count) != count:
            both = f"files of {counts[before]} and files of {count}"
            raise UserError(f"{before}*: there are {both}; delete those that were written earlier")
    for before, width, after, count in sorted(series):
        names = (f"{before}{i:0{width}}{after}" for i in range(min(count, MOST_FILES + 1)))
        missing = sorted(set(names) - set(files))
        if missing:
            present = min(count, MOST_FILES + 1) - len(missing)
            raise UserError(f"{missing[0]}: is missing; {present} of the {count} files are present")


def refuse_pipes(files):
    """Raise unless all files are regular: others, such as pipes, may never end."""
    for path in files:
        try:
            check_kind(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error


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
        return _array_records(path)
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


def _array_records(path):
    if importlib.util.find_spec("array_record") is None:
        raise UserError(NEEDS.format("array_record"))
    try:
        return ArrayRecords(path)
    except (RuntimeError, ValueError) as error:
        raise Damaged(
            f"{path}: is not a complete ArrayRecord file ({error}); write or copy it again"
        ) from error


class ArrayRecords:
    """The records of an ArrayRecord file."""

    def __init__(self, path):
        status = os.stat(path)
        self.path, self.stamp = path, (status.st_mtime_ns, status.st_size)
        self.count = len(_source(path, self.stamp))

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
        if end - start > MOST_BYTES:
            raise OSError(f"it has {format_bytes(end - start)}; at most {format_bytes(MOST_BYTES)}")
        # Opened for every record, since a thousand files are too many to keep open.
        with open(self.path, "rb", buffering=0) as file:
            file.seek(start + 12)
            data = file.read(end - start - 12)
        if len(data) != end - start - 12 or _checksum(data[:-4]) != data[-4:]:
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
