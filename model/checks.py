"""Argument checks that models share; each message starts with the argument's name.

A range is declared once, in an annotation such as `depth: Count`: `checked` reads it there, as the
checks of a config and the JSON schema do. ranges.py has the same for all other parts; a model
imports nothing but model/, so that the copy in a run's folder works alone.
"""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

import jax


@dataclass(frozen=True, eq=False)  # hashed by identity, as `typing` hashes annotations
class Range:
    """The numbers that an argument accepts: in words, as JSON Schema's keywords, as a test."""

    words: str
    keywords: dict
    holds: Callable


AT_LEAST_1 = Range("at least 1", {"minimum": 1}, lambda x: x >= 1)
INT32 = Range("at most 2147483647", {"maximum": 2**31 - 1}, lambda x: x < 2**31)
Count = Annotated[int, AT_LEAST_1, INT32]
AT_LEAST_0 = Range("at least 0", {"minimum": 0}, lambda x: x >= 0)
CountOrZero = Annotated[int, AT_LEAST_0, INT32]
POSITIVE = Range("a finite number above 0", {"exclusiveMinimum": 0}, lambda x: 0 < x < math.inf)
Positive = Annotated[float, POSITIVE]
# A number of blocks, each of which is traced and compiled separately.
Depth = Annotated[int, AT_LEAST_1, Range("at most 1000", {"maximum": 1000}, lambda x: x <= 1000)]
Rate = Annotated[
    float,
    Range("at least 0 and below 1", {"minimum": 0, "exclusiveMaximum": 1}, lambda x: 0 <= x < 1),
]


def checked(factory):
    """Check the arguments of every call of a model's factory by the ranges in its annotations."""
    signature = inspect.signature(factory)
    hints = get_type_hints(factory, include_extras=True)

    @functools.wraps(factory)
    def model(*args, **kwargs):
        for name, value in [*zip(signature.parameters, args, strict=False), *kwargs.items()]:
            check(name, value, hints.get(name))
        return factory(*args, **kwargs)

    return model


def check(name, value, annotation):
    """Raise if a number, or one in a tuple of them, is not in the range of its annotation, or a
    value is not among its choices."""
    inner = get_args(annotation)
    if get_origin(annotation) is Literal and value not in inner:
        raise ValueError(f"{name}: must be one of {', '.join(map(repr, inner))}, got {value!r}")
    if get_origin(annotation) in (UnionType, Union):  # Count | None
        if value is not None:
            check(name, value, inner[0])
        return
    if get_origin(annotation) is tuple:
        for item in value:
            check(name, item, inner[0])
    elif get_origin(annotation) is Annotated:
        for limit in inner[1:]:
            # The number of a traced value, an input of a program, was checked before it was traced.
            if not isinstance(value, jax.core.Tracer) and not limit.holds(value):
                raise ValueError(f"{name}: must be {limit.words}, got {value}")


def check_image(input_shape):
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ValueError(f"input_shape: needs (height, width, channels), got {tuple(input_shape)}")


def check_widths(name, widths):
    if not widths:
        raise ValueError(f"{name}: needs at least one width, got ()")
