"""Checks of arguments and options: each raises a ValueError that starts with its name."""

import math
import re
from typing import Literal, get_args, get_origin, get_type_hints


def require(arguments, is_valid, requirement):
    """Raise for the first of the arguments that is not valid, and say what it must be."""
    for name, value in arguments.items():
        if not is_valid(value):
            raise ValueError(f"{name}: must be {requirement}, got {value}")


def positive(**arguments):
    """Require finite numbers above 0."""
    require(arguments, lambda x: 0 < x < math.inf, "a finite number above 0")


def nonnegative(**arguments):
    """Require finite numbers of 0 or more."""
    require(arguments, lambda x: 0 <= x < math.inf, "a finite number, 0 or more")


def at_least(smallest, **arguments):
    """Require numbers of `smallest` or more."""
    require(arguments, lambda x: x >= smallest, f"at least {smallest}")


def fraction(**arguments):
    """Require numbers in [0, 1), such as the decay of a moving average."""
    require(arguments, lambda x: 0 <= x < 1, "at least 0 and below 1")


def share(**arguments):
    """Require numbers in [0, 1], such as a probability."""
    require(arguments, lambda x: 0 <= x <= 1, "at least 0 and at most 1")


def between_0_and_1(**arguments):
    """Require numbers in (0, 1)."""
    require(arguments, lambda x: 0 < x < 1, "above 0 and below 1")


def ascending_pair(**arguments):
    """Require pairs of finite numbers above 0, the second at least as large as the first."""
    require(
        arguments, lambda x: 0 < x[0] <= x[1] < math.inf, "two ascending finite numbers above 0"
    )


def regex(**arguments):
    """Require valid regular expressions."""
    for name, value in arguments.items():
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{name}: {value!r} is not a regular expression: {error}") from error


def check_options(options, **smallest):
    """Check the choices of every Literal field of a dataclass, and the type and smallest value of
    the fields named in `smallest`; raise all problems in one ValueError, one per line."""
    problems = []
    for name, annotation in get_type_hints(type(options)).items():
        value, choices = getattr(options, name), get_args(annotation)
        if get_origin(annotation) is Literal and value not in choices:
            problems.append(
                f"{name}: must be one of {', '.join(map(repr, choices))}, got {value!r}"
            )
        elif name in smallest and not isinstance(value, annotation):
            expected = getattr(annotation, "__name__", annotation)
            problems.append(f"{name}: must be {expected}, got {value!r}")
        elif name in smallest and value is not None and value < smallest[name]:
            problems.append(f"{name}: must be at least {smallest[name]}, got {value}")
    if problems:
        raise ValueError("\n".join(problems))
