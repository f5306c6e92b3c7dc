"""Ranges of arguments. A range is declared once, in an annotation such as `lr: Positive`; the check
of a call, that of a config and the JSON schema are all made from it."""

import functools
import inspect
import math
import operator
import re
import sys
from contextlib import suppress
from numbers import Real
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from utils import UserError


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
        """Whether this is a number, finite and in the range. An input of a compiled program is
        accepted, since its numbers were checked before (training.vary)."""
        if is_traced(x):
            return True
        try:
            inside = all(LIMITS[key](x, limit) for key, limit in self.keywords.items())
            return inside and x < math.inf
        except TypeError:
            return False


class LocalRange(Range):
    """The paths of this machine. A URL is refused, since it would be read, or made, as a folder
    such as `gs:`."""

    def holds(self, path):
        return re.match(self.keywords["pattern"], str(path)) is not None


def is_traced(x):
    """Whether this is an array that JAX is tracing, an input of a compiled program."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.core.Tracer)


class NeedsTrust:
    """Marks an argument by which a config reaches beyond its run, as by a file elsewhere or a
    server: training refuses values for which `reaches(value)` holds in a config that the user does
    not trust. `effect` says what such a value does."""

    def __init__(self, effect, reaches):
        self.effect, self.reaches = effect, reaches


def at_least(smallest, **arguments):
    """The range of numbers of `smallest` or more; arguments are checked at once."""
    limit = Range(f"at least {smallest}", minimum=smallest)
    limit(**arguments)
    return limit


def at_most(largest):
    """The range of numbers up to `largest`."""
    return Range(f"at most {largest}", maximum=largest)


positive = Range("a finite number above 0", exclusiveMinimum=0)
nonnegative = Range("a finite number, 0 or more", minimum=0)
fraction = Range("at least 0 and below 1", minimum=0, exclusiveMaximum=1)
share = Range("at least 0 and at most 1", minimum=0, maximum=1)
positive_share = Range("above 0 and at most 1", exclusiveMinimum=0, maximum=1)
between_0_and_1 = Range("above 0 and below 1", exclusiveMinimum=0, exclusiveMaximum=1)
local = LocalRange(
    "a local path (mount a bucket, as with rclone, or copy it)",
    pattern="^(?![A-Za-z][A-Za-z0-9+.-]+:/)",  # C:/ is a drive; pathlib makes gs:/ of gs://
)

# Annotations: a number with its range. A Fraction is a decay or momentum, a Share a probability.
INT32 = at_most(2**31 - 1)  # the integers of devices have 32 bits
Count = Annotated[int, at_least(1), INT32]
CountOrZero = Annotated[int, at_least(0), INT32]
Positive = Annotated[float, positive]
NonNegative = Annotated[float, nonnegative]
Fraction = Annotated[float, fraction]
Share = Annotated[float, share]
PositiveShare = Annotated[float, positive_share]
LocalPath = Annotated[str, local]


def out_of_range(name, value, annotation):
    """What is wrong with an argument by the ranges in its annotation, one message each. In a tuple
    every item is checked."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = [limit for limit in inner[1:] if isinstance(limit, Range)]
        missed = [limit.words for limit in limits if not limit.holds(value)]
        shown = repr(value) if isinstance(value, str) else value
        return [f"{name}: must be {words}, got {shown}" for words in missed]
    pairs = []
    if origin in (Union, UnionType):
        literals = [choice for choice in inner if get_origin(choice) is Literal]
        if not any(value in get_args(literal) for literal in literals):
            kind = Annotated if isinstance(value, Real | str) else tuple
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
        pairs = [(name, given[name], hints.get(name)) for name in names if name in given]
        if problems := [text for pair in pairs for text in out_of_range(*pair)]:
            raise ValueError("\n".join(problems))
        return function(*args, **kwargs)

    return call


def local_path(name, path):
    """A path that a user has named, with `~` expanded; `name` is its argument, for the error."""
    if not local.holds(path):
        raise UserError(f"{name}: must be {local.words}, got {path}")
    return Path(path).expanduser()


def check_takes(what, function, names):
    """Refuse a function that cannot be called with as many arguments as there are names."""
    with suppress(ValueError):  # it has no signature
        try:
            inspect.signature(function).bind(*names)
        except TypeError as error:
            own = getattr(function, "__name__", type(function).__name__)
            needed = f"must take ({', '.join(names)})"
            raise UserError(f"{what}: {own}{inspect.signature(function)} {needed}") from error


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
