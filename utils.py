"""Small helpers used everywhere: errors for the user, tree paths, sizes, reading and writing."""

import errno
import os
import re
import shlex
import stat
import sys
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path

# Exit codes. STOPPED: a signal stopped the run after it had written a checkpoint.
DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75

WINDOWS = os.name == "nt"


class UserError(Exception):
    """A mistake that the user can fix; printed as one message without a traceback, exit code 2."""


class Damaged(UserError):
    """A file whose content is not what was written into it."""


class UnknownFact(ValueError):
    """An argument was to be inferred from a fact of the run that is unknown.

    Not reported where the config has another problem, since that may be why the fact is unknown.
    """


class RunError(Exception):
    """A run cannot continue for a reason outside its config, such as disk, network or divergence.

    Printed as one message without a traceback, exit code 1.
    """


class Unreadable(OSError):
    """A file that must not be read, or not be written through; `strerror` says why."""

    def __init__(self, why):
        super().__init__(errno.EINVAL, why)

    def __str__(self):
        return self.strerror


def first_line(error):
    """The first line of an error's message, which may be empty."""
    return (str(error).splitlines() or [""])[0]


def where_and_why(error):
    """File, line and message of an error that was raised in a user's file."""
    if isinstance(error, SyntaxError):
        return f"{relative_path(error.filename)}, line {error.lineno}: {error.msg}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename
    ]
    file, line = relative_path(frames[-1].filename), frames[-1].lineno
    return f"{file}, line {line}: {type(error).__name__}: {error}"


def quoted(path):
    """A path in a command, or a hint, that a user may copy into a shell."""
    return shlex.quote(str(path))


def path_name(path):
    """The name of a leaf: the keys of its path joined by '/', as in `blocks/0/norm/scale`."""
    return "/".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)


def named_leaves(tree):
    """All leaves of a tree as {name: leaf}, in the tree's order."""
    from jax.tree_util import tree_flatten_with_path

    return {path_name(path): leaf for path, leaf in tree_flatten_with_path(tree)[0]}


def map_named(fn, tree, *rest):
    """Like jax.tree.map, but fn receives (name, leaf, ...)."""
    from jax.tree_util import tree_map_with_path

    return tree_map_with_path(lambda path, *leaves: fn(path_name(path), *leaves), tree, *rest)


def match_rules(rules, names, default=None):
    """{name: value of the first (regex, value) rule that matches the whole name}.

    A rule that matches no name is an error.
    """
    names = list(names)
    for regex, _ in rules:
        if not any(re.fullmatch(regex, name) for name in names):
            raise UserError(f"the rule {regex!r} matches no name; there are: {', '.join(names)}")
    return {
        name: next((value for regex, value in rules if re.fullmatch(regex, name)), default)
        for name in names
    }


def open_closed_streams():
    """Open standard input, output and error on the null device where they are closed, as by `2>&-`.
    Else the next file that is opened gets their number, and what C++ prints is written into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free, so this one
            os.set_inheritable(number, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def format_bytes(n):
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024


def peak_of_process():
    """The peak main memory of this process, in bytes; None on Windows."""
    if WINDOWS:
        return None
    # Not getrusage: it also counts the time before the process became Python, when it was as large
    # as its parent.
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            return int(re.search(r"VmHWM:\s+(\d+) kB", file.read())[1]) * 1024
    except (OSError, TypeError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def main_memory():
    """The bytes of main memory that this process can use at most; infinity if that is unknown."""
    sizes = [float("inf")]
    with suppress(AttributeError, ValueError, OSError):  # no sysconf on Windows
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(ValueError, OSError), open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
        sizes.append(int(file.read()))  # "max" in a container without a limit
    return min(sizes)


def check_memory(what, size):
    """Refuse to read what claims to be larger than the main memory."""
    if size > (memory := main_memory()):
        sizes = f"{format_bytes(size)}, and this machine has {format_bytes(memory)}"
        raise UserError(f"{what}: would need {sizes} of main memory")


def user_cache():
    """The folder for files that can be created again; RuntimeError if the home is unknown."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rawtree"


MOST_JSON = 32 * 2**20  # bytes of a JSON file; hostile JSON takes thirty times its length in memory
MOST_LINES = 2**30  # bytes of a file that is read line by line
LONGEST_LINE = 4 * 2**20


def open_file(path, most=None):
    """A regular file, opened for reading; Unreadable if it is none, or has more than `most` bytes.

    Opening a pipe would wait for a writer, and a device may have no end.
    """
    status = os.stat(path)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise Unreadable("it is a pipe or a device, not a regular file")
    if most is not None and status.st_size > most:
        raise too_large(format_bytes(status.st_size), most)
    return open(path, "rb")


def read_file(path, most=MOST_JSON):
    """The bytes of a regular file; Unreadable if there are more than `most`."""
    with open_file(path, most) as file:
        data = file.read(most + 1)
    if len(data) > most:  # it grows, or the system does not know its size
        raise too_large("more", most)
    return data


def too_large(size, most):
    return Unreadable(f"it has {size}, and at most {format_bytes(most)} are read")


def lines_of(path, most=None):
    """The lines of a regular file, as bytes; of a line that is too long, only its beginning."""
    with open_file(path, most) as file:
        while line := file.readline(LONGEST_LINE):
            yield line
            while len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)


def inside(folder, *names):
    """The path of a file in the folder of a run; Unreadable if a link in it leads elsewhere.

    The folder may come from anyone, and must not decide what is written, or shown, outside of it.
    """
    path = Path(folder)
    for part in Path(*names).parts:
        path /= part
        if path.is_symlink():
            raise Unreadable(f"{path} is a link, which is not followed; remove it")
    return path


@contextmanager
def atomic_file(path):
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


def to_disk(path):
    """Make sure that a file, or the names in a folder, survive a loss of power."""
    if WINDOWS and os.path.isdir(path):
        return  # a folder cannot be opened there
    opened = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def locked(folder, shared=False):
    """Lock a folder until the returned descriptor is closed or this process ends.

    BlockingIOError if another process has locked it.
    """
    if WINDOWS:
        import msvcrt

        opened = os.open(Path(folder) / ".lock", os.O_RDWR | os.O_CREAT)
        lock, taken = (lambda: msvcrt.locking(opened, msvcrt.LK_NBLCK, 1)), OSError
    else:
        import fcntl

        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        opened = os.open(folder, os.O_RDONLY)
        lock, taken = (lambda: fcntl.flock(opened, kind | fcntl.LOCK_NB)), BlockingIOError
    try:
        lock()
    except taken as error:
        os.close(opened)
        raise BlockingIOError(f"{folder} is locked") from error
    except OSError:  # a file system without locks
        pass
    return opened


def relative_path(path, start=os.curdir):
    """A path as seen from a folder; the path itself if it is on another drive, on Windows."""
    try:
        return os.path.relpath(path, start)
    except ValueError:
        return str(path)


def atomic_write(path, data):
    """Write bytes to `path`, which is either unchanged or has the complete new content."""
    with atomic_file(path) as file:
        file.write(data)
