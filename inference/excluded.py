"""The weights that --exclude leaves in float32."""

import re

from utils import UserError

NO_NAMES = (
    "--exclude: the jax2tf route gives weights in TFLite no names; use --route native, or "
    "--formats onnx"
)


def excluded_names(names, patterns):
    """The names of weights that match one of the regexes, each of which must match one."""
    matching = {pattern: {n for n in names if re.fullmatch(pattern, n)} for pattern in patterns}
    for pattern, found in matching.items():
        if not found:
            known = ", ".join(sorted(names))
            raise UserError(f"--exclude: {pattern!r} matches no weight; there are {known}")
    return set().union(*matching.values())
