"""The weights that --exclude leaves in float32."""

import difflib
import re

from utils import UserError

NO_NAMES = (
    "--exclude: the jax2tf route gives weights in TFLite no names; use --route native, or "
    "--formats onnx"
)

MOST_NAMES = 10  # in a message


def excluded_names(names, patterns, place=""):
    """The names of the weights `place` that match one of the regexes, each of which must match
    one."""
    matching = {pattern: {n for n in names if re.fullmatch(pattern, n)} for pattern in patterns}
    for pattern, found in matching.items():
        if not found:
            message = f"--exclude: {pattern!r} matches no weight{place}"
            raise UserError(f"{message}; {known(names, pattern)}")
    return set().union(*matching.values())


def known(names, pattern):
    """The names that there are; of many, those nearest to the pattern."""
    names = sorted(names)
    if len(names) <= MOST_NAMES:
        return f"there are {', '.join(names) or 'none'}"
    near = difflib.get_close_matches(pattern, names, n=4, cutoff=0.4) or names[:4]
    return f"of the {len(names)} that there are, the nearest are {', '.join(near)}"
