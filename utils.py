"""Small things used everywhere: user-facing errors, tree paths, sizes, atomic writes."""

import os
import re
import sys
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path

DONE, FAILED, BAD_INPUT, STOPPED = (
    0,
    1,
    2,
    75,
)  # exit codes; 75: stopped by a signal with a checkpoint written


class UserError(Exception):
    """A mistake that the user can mend; shown as one message without a traceback, exit code 2."""


class Damaged(UserError):
    """A file that is not what was written into it."""


class UnknownFact(ValueError):
    """An argument was left to a fact that nothing tells; not worth a line where what would tell it is wrong itself."""


class RunError(Exception):
    """The run cannot go on, through no mistake in the config (disk, network, divergence); one message, exit code 1."""


def first_line(error):
    """The first line of an error's message, which may be empty."""
    return (str(error).splitlines() or [""])[0]


def where_and_why(error):
    """File, line and message of an error in a user's file."""
    if isinstance(error, SyntaxError):
        return f"{os.path.relpath(error.filename)}, line {error.lineno}: {error.msg}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename
    ]
    return f"{os.path.relpath(frames[-1].filename)}, line {frames[-1].lineno}: {type(error).__name__}: {error}"


def path_name(path):
    """The name of a leaf: the keys on the way to it, joined by '/', as in `blocks/0/norm/scale`."""
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
    """{name: value of the first (regex, value) rule that matches the whole name}; a rule that matches no name is an error."""
    names = list(names)
    found = {
        name: next((i for i, (regex, _) in enumerate(rules) if re.fullmatch(regex, name)), None)
        for name in names
    }
    for regex, _ in rules:
        if not any(re.fullmatch(regex, name) for name in names):
            raise UserError(f"the rule {regex!r} matches no name; there are: {', '.join(names)}")
    return {name: default if i is None else rules[i][1] for name, i in found.items()}


def format_bytes(n):
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024


def peak_of_process():
    """The most bytes of main memory that this process has held."""
    try:  # getrusage would count what the process was before it became Python, as large as the one that started it
        with open("/proc/self/status") as file:
            return int(re.search(r"VmHWM:\s+(\d+) kB", file.read())[1]) * 1024
    except (OSError, TypeError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def user_cache():
    """The folder for what can be made again, as the user's system has it."""
    home = Path(
        os.environ.get("HOME") or "~"
    ).expanduser()  # expanduser alone raises where nobody knows the user
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "rawtree"


@contextmanager
def atomic_file(path):
    """A binary file to write into, so that `path` is either as it was or whole: temporary file, fsync, rename, fsync of the
    folder."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as error:  # an interrupt, too, leaves nothing behind
        with suppress(OSError):  # where it could not be made, there is none to remove
            temporary.unlink()
        if isinstance(error, OSError):
            raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error
        raise


def atomic_write(path, data):
    """Write bytes so that `path` is either as it was or whole."""
    with atomic_file(path) as file:
        file.write(data)
