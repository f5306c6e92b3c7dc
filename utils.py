"""Small helpers used everywhere: errors for the user, tree paths, sizes, atomic writes."""

import json
import os
import re
import sys
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path

# Exit codes. STOPPED: a signal stopped the run after it had written a checkpoint.
DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75

WINDOWS = os.name == "nt"

DEEPEST = 64  # levels of nesting in JSON; what Python can handle ends at a thousand


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


def path_name(path):
    """The name of a leaf: the keys of its path joined by '/', as in `blocks/0/norm/scale`."""
    return "/".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)


def parse_json(text, **hooks):
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


def is_deep(value, left=DEEPEST):
    """Whether a JSON value is nested more deeply than so many levels."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    nests = [item for item in inner if isinstance(item, dict | list)]
    return left == 0 or any(is_deep(item, left - 1) for item in nests)


def read_json(path):
    """The object in a JSON file; UserError if it cannot be read."""
    try:
        value = parse_json(Path(path).read_text(encoding="utf-8-sig"))
        if isinstance(value, dict):
            return value
        error = "it does not hold an object"
    except (OSError, ValueError) as failure:
        error = failure
    raise UserError(f"{path}: cannot be read: {error}; restore the file")


def is_alike(value, example):
    """Whether a JSON value has the form of an example, in which null stands for anything."""
    if isinstance(example, dict):
        keys = isinstance(value, dict) and example.keys() <= value.keys()
        return keys and all(is_alike(value[key], inner) for key, inner in example.items())
    if isinstance(example, int | float) and not isinstance(example, bool):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return example is None or type(value) is type(example) or isinstance(example, tuple)


def cut(text, length):
    """Text of at most this length: of a longer one, its beginning and its end."""
    half = (length - 5) // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"


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


def user_cache():
    """The folder for files that can be created again; RuntimeError if the home is unknown."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rawtree"


@contextmanager
def atomic_file(path):
    """A binary file to write into; `path` is either unchanged or has the complete new content.

    The steps: write a temporary file, fsync it, rename it, fsync the folder.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
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
