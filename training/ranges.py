"""Range checks of the arguments of parts: a ValueError that starts with the argument's name."""

import math
import re


def positive(**arguments):
    """Refuse an argument that is not a finite number above zero."""
    for name, value in arguments.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}: must be a finite number above 0, got {value}")


def nonnegative(**arguments):
    """Refuse an argument that is not a finite number of zero or more."""
    for name, value in arguments.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}: must be a finite number, 0 or more, got {value}")


def fraction(**arguments):
    """Refuse an argument outside [0, 1)."""
    for name, value in arguments.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}: must be at least 0 and below 1, got {value}")


def regex(**arguments):
    """Refuse an argument that is not a regular expression."""
    for name, value in arguments.items():
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{name}: {value!r} is not a regular expression: {error}") from error


def share(**arguments):
    """Refuse an argument outside [0, 1]."""
    for name, value in arguments.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: must lie in [0, 1], got {value}")
