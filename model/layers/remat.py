"""Rematerialization: recompute a block in the backward pass instead of keeping its values."""

import re

import jax


def recomputed(pattern, name, block):
    """The block, recomputed in the backward pass if the regex matches its name; None: never."""
    return jax.checkpoint(block) if pattern is not None and re.fullmatch(pattern, name) else block


def check_remat(pattern, names):
    """Raise for a pattern that is not a regular expression or that matches no block."""
    try:
        matches = [pattern is None or re.fullmatch(pattern, name) for name in names]
    except re.error as error:
        raise ValueError(f"remat: {pattern!r} is not a regular expression: {error}") from error
    if not any(matches):
        raise ValueError(f"remat: {pattern!r} matches none of the blocks: {', '.join(names)}")
