"""The files that a path, a pattern or a folder means."""

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from utils import UserError
from utils.files import check_kind

MOST_FILES = 100_000  # of one pattern


def paths(pattern: str, ending: str) -> list[str]:
    """The files of a path or a pattern, sorted; the `ending` is that of the example in a message.

    Where a pattern with `*` matches files numbered `-00000-of-00010`, all of them must exist; and
    so must all of `{000..012}`. A pipe or a device is refused: it may never end.
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
    for path in files:
        with reading(path):
            check_kind(path)
    if "*" in pattern:
        check_numbers(files)
    return files


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Name the file if it cannot be read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def files_below(folder: str) -> Iterator[str]:
    """The files of a folder and of all folders in it, but for hidden ones."""
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]  # as .git
        yield from (os.path.join(path, name) for name in names if not name.startswith("."))


def check_numbers(files: list[str]) -> None:
    """Refuse files numbered as `-00000-of-00010` if some are missing, or there are two series."""
    numbered = [re.fullmatch(r"(.*-)(\d+)(-of-0*(\d+).*)", path) for path in files]
    series = {(m[1], len(m[2]), m[3], int(m[4])) for m in numbered if m}
    counts = {}
    for before, width, after, count in sorted(series):
        if counts.setdefault(before, count) != count:
            raise UserError(
                f"{before}*: there are files of {counts[before]} and files of {count}; delete "
                "those that were written earlier"
            )
        names = [f"{before}{i:0{width}}{after}" for i in range(min(count, MOST_FILES))]
        missing = sorted({*names} - {*files})
        if missing:
            raise UserError(
                f"{missing[0]}: is missing; {len(names) - len(missing)} of the {count} files are "
                "present"
            )
