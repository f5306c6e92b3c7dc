"""Reading and writing files: JSON, bounded reads, and writes that are whole or do not happen.

Every file of a run or a sweep is written by a function of this module. The folder may come from
anyone: check_links refuses one that leads elsewhere before anything in it is written.
"""

import errno
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import IO, Any, BinaryIO

from utils import WINDOWS, RunError, UserError, format_bytes, printable

DEEPEST = 64  # levels of nesting in JSON; what Python can handle ends at a thousand


class Unreadable(OSError):
    """A file that must not be read, or not be written through; `strerror` says why."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EINVAL, why)

    def __str__(self) -> str:
        return printable(str(self.strerror))


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """The value of JSON text; ValueError if it is none, or nested too deeply to be worked with."""
    try:
        value = json.loads(text, **hooks)
        if not is_deep(value):
            return value
    except RecursionError:
        pass
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise ValueError("it has an integer of thousands of digits") from error
        raise
    raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def is_deep(value: Any, left: int = DEEPEST) -> bool:
    """Whether a JSON value is nested more deeply than `left` levels."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    nests = [item for item in inner if isinstance(item, dict | list)]
    return left == 0 or any(is_deep(item, left - 1) for item in nests)


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file; UserError if it cannot be read."""
    try:
        value = parse_json(read_file(path).decode("utf-8-sig"))
        if isinstance(value, dict):
            return value
        error = "it does not hold an object"
    except (OSError, ValueError) as failure:
        error = failure
    raise UserError(f"{path}: cannot be read: {error}; restore the file")


def read_value(path: str | Path, absent: str, **hooks: Any) -> Any:
    """The value in a JSON file of the user's; a UserError names the place of a mistake. `absent`
    says what to do if there is no such file."""
    try:
        text = read_file(path).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; {absent}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    try:
        return parse_json(text, **hooks)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: {place_of(error, text)}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def place_of(error: json.JSONDecodeError, text: str) -> str:
    """Where and why a text is not JSON, for a message, with the line that is wrong."""
    if not text.strip():
        return "the file is empty"
    if not text[error.pos :].strip():
        lines = text.rstrip().split("\n")
        why = f"line {len(lines)}: not JSON: the file ends before its last bracket is closed"
        return f"{why}\n  {lines[-1][-80:].strip()}"
    line = [*text.split("\n"), ""][error.lineno - 1]
    line = line[max(0, error.colno - 40) :][:80].strip()  # a file may be a single long line
    advice = "(JSON has no comments, and no comma before a closing bracket)"
    where = f"line {error.lineno}, column {error.colno}"
    return f"{where}: not JSON: {error.msg}\n  {line}\n  {advice}"


def is_alike(value: Any, example: Any) -> bool:
    """Whether a JSON value has the form of an example, in which null stands for anything."""
    if isinstance(example, dict):
        keys = isinstance(value, dict) and example.keys() <= value.keys()
        return keys and all(is_alike(value[key], inner) for key, inner in example.items())
    if isinstance(example, int | float) and not isinstance(example, bool):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return example is None or type(value) is type(example) or isinstance(example, tuple)


def is_count(value: Any, below: int = 2**53) -> bool:
    return type(value) is int and 0 <= value < below


def is_number(value: Any) -> bool:
    """Whether this is a number that fits a float."""
    return type(value) in (int, float) and abs(value) < 2**1000


def is_text(value: Any) -> bool:
    return type(value) is str


def is_list(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    """Whether this is a list of valid entries."""
    return type(value) is list and all(map(is_valid, value))


def is_object(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    """Whether this is an object of valid values."""
    return type(value) is dict and all(map(is_valid, value.values()))


MOST_JSON = 32 * 2**20  # bytes of a JSON file; hostile JSON takes thirty times its length in memory


MOST_LINES = 2**30  # bytes of a file that is read line by line


LONGEST_LINE = 4 * 2**20


def open_file(path: str | Path, most: int | None = None) -> BufferedReader:
    """A regular file, opened for reading; Unreadable if it is none, or has more than `most` bytes.

    Opening a pipe would wait for a writer, and a device may have no end.
    """
    size = check_kind(path).st_size
    if most is not None and size > most:
        raise too_large(format_bytes(size), most)
    return open(path, "rb")


def check_kind(path: str | Path) -> os.stat_result:
    """The status of a regular file or a folder; Unreadable if it is a pipe or a device."""
    status = os.stat(path)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise Unreadable("it is a pipe or a device, not a regular file")
    return status


def read_file(path: str | Path, most: int = MOST_JSON) -> bytes:
    """The bytes of a regular file; Unreadable if there are more than `most`."""
    with open_file(path, most) as file:
        data = file.read(most + 1)
    if len(data) > most:  # the file grows, or the system reports no size for it
        raise too_large("more", most)
    return data


def too_large(size: str, most: int) -> Unreadable:
    return Unreadable(f"it has {size}, and at most {format_bytes(most)} are read")


class Pieces:
    """An open file of which at most `most` bytes are read at once: a length that the file claims,
    such as that of a header, could fill the memory."""

    def __init__(self, file: IO[bytes] | BufferedIOBase, most: int) -> None:
        self.file, self.most = file, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def read(self, size: int = -1) -> bytes:
        data = b"" if size > self.most else self.file.read(size if size >= 0 else self.most + 1)
        if max(size, len(data)) > self.most:
            raise Unreadable(f"a header of {format_bytes(max(size, len(data)))}")
        return data


def lines_of(path: str | Path, most: int | None = None) -> Iterator[bytes]:
    """The lines of a regular file, as bytes; of a line that is too long, only its beginning."""
    with open_file(path, most) as file:
        while line := file.readline(LONGEST_LINE):
            yield line
            while len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)


def inside(folder: str | Path, *names: str) -> Path:
    """The path of a file in the folder of a run; Unreadable if there is a link in it, since the
    folder may come from anyone and must not decide what is shown from outside of it."""
    path = Path(folder)
    for part in Path(*names).parts:
        path /= part
        if path.is_symlink():
            raise Unreadable(f"{path} is a link, which is not followed; remove it")
    return path


# A link that W&B makes to its own log. No other file is ever written at this place.
OF_WANDB = "wandb/*/logs/debug-*.log"


def check_links(folder: str | Path) -> None:
    """Raise a UserError if a link below a folder leads out of it: what is written there, or
    deleted, would be a file of the user's own."""

    def unlisted(error: OSError) -> None:  # one that has been deleted meanwhile holds no links
        if isinstance(error, PermissionError):
            raise error

    real = os.path.realpath(folder)
    for place, folders, files in os.walk(folder, onerror=unlisted):
        for path in [Path(place, name) for name in folders + files]:
            leads_out = path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(real)
            if leads_out and (path.is_dir() or not path.match(OF_WANDB)):
                raise UserError(
                    f"{path}: is a link that leads out of {folder}, where nothing may be written; "
                    "replace it by what it leads to, or remove it"
                )


def remove(path: Path) -> None:
    """Delete a file, a folder or a link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """A new folder to fill, which then replaces whatever is at `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    remove(temporary)
    try:
        temporary.mkdir()
        yield temporary
        remove(path)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def append(path: str | Path, text: str) -> None:
    """Append a text to a file, all of it or nothing."""
    with open(path, "ab", buffering=0, opener=without_links) as file:
        before = file.tell()
        try:
            data = text.encode()
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(before)
            raise


def without_links(path: str, flags: int) -> int:
    """Open a file to write, but do not follow a link, nor wait for the reader of a pipe."""
    plain = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        return os.open(path, flags | plain, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):  # EMLINK: on FreeBSD
            raise Unreadable("it is a link, which is not followed; remove it") from error
        raise


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """A binary file to write into; `path` is either unchanged or has the complete new content.

    The steps: write a temporary file, fsync it, rename it, fsync the folder.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:  # x: a link of this name is not followed
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        to_disk(path.parent)
    except BaseException as error:  # also KeyboardInterrupt: the temporary file is always removed
        with suppress(OSError):  # it does not exist if it could not be created
            temporary.unlink()
        if isinstance(error, OSError):
            raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error
        raise


def to_disk(path: str | Path) -> None:
    """Make sure that a file, or the names in a folder, survive a loss of power."""
    if WINDOWS and os.path.isdir(path):
        return  # a folder cannot be opened there
    opened = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def locked(folder: str | Path, shared: bool = False, wait: float = 0.0) -> int:
    """Lock a folder until the returned descriptor is closed or this process ends.

    BlockingIOError if another process has locked it, also after `wait` seconds.
    """
    until = time.monotonic() + wait
    if WINDOWS:
        import msvcrt

        opened = os.open(Path(folder) / ".lock", os.O_RDWR | os.O_CREAT)
        lock, taken = (lambda: msvcrt.locking(opened, msvcrt.LK_NBLCK, 1)), OSError
    else:
        import fcntl

        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        opened = os.open(folder, os.O_RDONLY)
        lock, taken = (lambda: fcntl.flock(opened, kind | fcntl.LOCK_NB)), BlockingIOError
    while True:
        try:
            lock()
        except taken as error:
            if time.monotonic() < until:
                time.sleep(0.02)
                continue
            os.close(opened)
            raise BlockingIOError(f"{folder} is locked") from error
        except OSError:  # a file system without locks
            pass
        return opened


def atomic_write(path: str | Path, data: bytes | bytearray) -> None:
    """Write bytes to `path`, which is either unchanged or has the complete new content."""
    with atomic_file(path) as file:
        file.write(data)
