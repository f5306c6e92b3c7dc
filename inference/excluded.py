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
    """The names that match one of the regexes; each regex must match at least one. `place` follows
    "no weight" in the message."""
    matching = {pattern: {n for n in names if re.fullmatch(pattern, n)} for pattern in patterns}
    for pattern, found in matching.items():
        if not found:
            message = f"--exclude: {pattern!r} matches no weight{place}"
            raise UserError(f"{message}; {names_near(names, pattern)}")
    return set().union(*matching.values())


def names_near(names, pattern):
    """The names, in words; if there are many, only those nearest to the pattern."""
    names = sorted(names)
    if len(names) <= MOST_NAMES:
        return f"there are {', '.join(names) or 'none'}"
    near = difflib.get_close_matches(pattern, names, n=4, cutoff=0.4) or names[:4]
    return f"of the {len(names)} that there are, the nearest are {', '.join(near)}"
