"""Small helpers used everywhere: errors for the user, tree paths, sizes, atomic writes."""

import functools
import inspect
import math
import operator
import os
import re
import sys
import traceback
from contextlib import contextmanager, suppress
from numbers import Real
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

# Exit codes. STOPPED: a signal stopped the run after it had written a checkpoint.
DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75


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
        return f"{os.path.relpath(error.filename)}, line {error.lineno}: {error.msg}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename
    ]
    file, line = os.path.relpath(frames[-1].filename), frames[-1].lineno
    return f"{file}, line {line}: {type(error).__name__}: {error}"


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


def format_bytes(n):
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024


def peak_of_process():
    """The peak main memory of this process, in bytes."""
    # Not getrusage: it also counts the time before the process became Python, when it was as large
    # as its parent.
    try:
        with open("/proc/self/status") as file:
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
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as error:  # also KeyboardInterrupt: the temporary file is always removed
        with suppress(OSError):  # it does not exist if it could not be created
            temporary.unlink()
        if isinstance(error, OSError):
            raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error
        raise


def atomic_write(path, data):
    """Write bytes to `path`, which is either unchanged or has the complete new content."""
    with atomic_file(path) as file:
        file.write(data)


# Ranges of arguments. A range is declared once, in an annotation such as `lr: Positive`; the check
# of a call, that of a config and the JSON schema are all made from it.


def require(arguments, is_valid, requirement):
    """Raise for the first of the arguments that is not valid, and say what it must be."""
    for name, value in arguments.items():
        if not is_valid(value):
            raise ValueError(f"{name}: must be {requirement}, got {value}")


LIMITS = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
}


class Range:
    """The numbers that an argument accepts: in words, and as keywords of JSON Schema.

    A call with arguments, as in `positive(rate=rate)`, raises a ValueError that starts with the
    name of the first one out of range.
    """

    def __init__(self, words, **keywords):
        self.words, self.keywords = words, keywords

    def __call__(self, **arguments):
        require(arguments, self.holds, self.words)

    def holds(self, x):
        """Whether a number is finite and in the range."""
        return all(LIMITS[key](x, limit) for key, limit in self.keywords.items()) and x < math.inf


def at_least(smallest, **arguments):
    """The range of numbers of `smallest` or more; arguments are checked at once."""
    limit = Range(f"at least {smallest}", minimum=smallest)
    limit(**arguments)
    return limit


positive = Range("a finite number above 0", exclusiveMinimum=0)
nonnegative = Range("a finite number, 0 or more", minimum=0)
fraction = Range("at least 0 and below 1", minimum=0, exclusiveMaximum=1)
share = Range("at least 0 and at most 1", minimum=0, maximum=1)
between_0_and_1 = Range("above 0 and below 1", exclusiveMinimum=0, exclusiveMaximum=1)

# Annotations: a number with its range. A Fraction is a decay or momentum, a Share a probability.
Count = Annotated[int, at_least(1)]
CountOrZero = Annotated[int, at_least(0)]
Positive = Annotated[float, positive]
NonNegative = Annotated[float, nonnegative]
Fraction = Annotated[float, fraction]
Share = Annotated[float, share]


def out_of_range(name, value, annotation):
    """What is wrong with an argument by the ranges in its annotation, one message each. In a tuple
    every item is checked."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = [limit for limit in inner[1:] if isinstance(limit, Range)]
        missed = [limit.words for limit in limits if not limit.holds(value)]
        return [f"{name}: must be {words}, got {value}" for words in missed]
    pairs = []
    if origin in (Union, UnionType):
        literals = [choice for choice in inner if get_origin(choice) is Literal]
        if not any(value in get_args(literal) for literal in literals):
            kind = Annotated if isinstance(value, Real) else tuple
            pairs = [(value, choice) for choice in inner if get_origin(choice) is kind]
    elif origin is tuple and isinstance(value, tuple | list):
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        pairs = zip(value, kinds, strict=False)
    return [text for item, kind in pairs for text in out_of_range(name, item, kind)]


def checked(function):
    """Check the arguments of every call of a function by the ranges in its annotations."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args, **kwargs):
        hints = get_type_hints(function, include_extras=True)
        given = dict(zip(names, args, strict=False)) | kwargs
        pairs = [(name, value, hints.get(name)) for name, value in given.items()]
        if problems := [text for pair in pairs for text in out_of_range(*pair)]:
            raise ValueError("\n".join(problems))
        return function(*args, **kwargs)

    return call


def regex(**arguments):
    """Require valid regular expressions."""
    for name, value in arguments.items():
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{name}: {value!r} is not a regular expression: {error}") from error


def check_minimums(**arguments):
    """Raise one ValueError for all arguments below their minimum; name=(value or None, minimum)."""
    errors = [
        f"{name}: must be at least {minimum}, got {value}"
        for name, (value, minimum) in arguments.items()
        if value is not None and value < minimum
    ]
    if errors:
        raise ValueError("\n".join(errors))


def check_options(options):
    """Check the choices of every Literal field of a dataclass, and the type and range of every
    field that is annotated with a range; raise all problems in one ValueError, one per line."""
    problems = []
    for name, annotation in get_type_hints(type(options), include_extras=True).items():
        value, choices = getattr(options, name), get_args(annotation)
        if get_origin(annotation) is Literal and value not in choices:
            problems.append(
                f"{name}: must be one of {', '.join(map(repr, choices))}, got {value!r}"
            )
        elif (plain := without_ranges(annotation)) != annotation and not isinstance(value, plain):
            expected = getattr(plain, "__name__", plain)
            problems.append(f"{name}: must be {expected}, got {value!r}")
        else:
            problems += out_of_range(name, value, annotation)
    if problems:
        raise ValueError("\n".join(problems))


def without_ranges(annotation):
    """An annotation of a number without its range, as in `int | None` for `Count | None`. An
    integer is also a float."""
    inner = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return int | float if inner[0] is float else inner[0]
    if get_origin(annotation) in (Union, UnionType):
        return functools.reduce(operator.or_, map(without_ranges, inner))
    return type(inner[0]) if get_origin(annotation) is Literal else annotation
