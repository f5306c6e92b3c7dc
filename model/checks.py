"""Argument checks that models share; each message starts with the argument's name."""

from typing import Annotated

from utils.forms import at_least, at_most

# A number of blocks, each of which is traced and compiled separately.
Depth = Annotated[int, at_least(1), at_most(1000)]


def check_image(input_shape: tuple[int, ...]) -> None:
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ValueError(f"input_shape: needs (height, width, channels), got {tuple(input_shape)}")


def check_widths(name: str, widths: tuple[int, ...]) -> None:
    if not widths:
        raise ValueError(f"{name}: needs at least one width, got ()")
