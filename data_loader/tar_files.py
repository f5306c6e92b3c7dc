"""Tar files of samples, as WebDataset has them: adjacent members with one key are one sample.

`dogs/17.jpg` and `dogs/17.cls` are the members `jpg` and `cls` of the sample `dogs/17`.
"""

import re
import tarfile
from itertools import groupby, islice

import numpy as np

from utils import Damaged, UserError, format_bytes
from utils.files import Pieces, open_file

MOST_BYTES = 2**31  # of one sample
MOST_HEADER = 2**20  # bytes that are read at once between two members: a name, or its attributes
MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)  # the key and the ending


class TarSamples:
    """The samples of a tar file, each {ending: bytes}; only their places are kept in memory."""

    def __init__(self, path):
        self.path, starts, endings, members = path, [], {}, []
        for _, sample in samples(path):
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
        if size > MOST_BYTES:
            raise OSError(f"it has {format_bytes(size)}; at most {format_bytes(MOST_BYTES)}")
        with open(self.path, "rb", buffering=0) as file:
            file.seek(first)
            data = file.read(size)
        if len(data) < size:
            raise OSError("the file ends within it")
        begins = ((self.endings[i], offset - first, size) for i, offset, size in places)
        return {ending: data[begin : begin + size] for ending, begin, size in begins}

    def key(self, number):
        """The key of a sample."""
        return next(islice(samples(self.path), number, None))[0]


def samples(path):
    """(key, [(ending, offset, size)]) of each sample."""
    for key, group in groupby(members(path), lambda member: member[0]):
        sample = [member[1:] for member in group]
        endings = [ending for ending, _, _ in sample]
        if twice := [ending for ending in endings if endings.count(ending) > 1]:
            raise UserError(f"{path}: the sample {key!r} has two members .{twice[0]}; delete one")
        yield key, sample


def members(path):
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
