"""Blocks that are computed again in the backward pass, so that what is inside of them need not be kept until then."""

import re

import jax


def recomputed(pattern, name, block):
    """The block, computed again where the regex matches its name; None matches nothing."""
    return jax.checkpoint(block) if pattern is not None and re.fullmatch(pattern, name) else block


def check_remat(pattern, names):
    """Refuse a regex that is none, or that matches no block."""
    try:
        matched = pattern is None or any(re.fullmatch(pattern, name) for name in names)
    except re.error as error:
        raise ValueError(f"remat: {pattern!r} is no regex: {error}") from error
    if not matched:
        raise ValueError(f"remat: {pattern!r} matches none of the blocks: {', '.join(names)}")
