"""Numbers as readable text, and the drawn points of a long curve."""

import math

import numpy as np


def plain(value):
    """A number as short as is readable: 0.9612, 24,900, 3e-05."""
    if value is None or math.isnan(value):
        return "\N{EM DASH}"
    size, value = abs(value), value + 0.0  # which is 0, not -0
    if value != 0 and not 1e-4 <= size < 1e7:
        return f"{value:.3g}"
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    digits = 4 if size < 10 else 2 if size < 100 else 1
    return f"{value:.3g}" if size < 0.1 else f"{value:.{digits}f}"


def duration(seconds):
    """A time in its two largest units: 22.9 s, 3 min 20 s, 2 h 14 min."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24:,} d {hours % 24} h"


def thinned(steps, values, most):
    """At most `most` points of a curve: the extremes of each stretch, and a gap if it has one."""
    if len(steps) <= most:
        return steps, values
    keep = {0, len(steps) - 1}
    for stretch in np.array_split(np.arange(len(steps)), max(1, most // 3)):
        inside = values[stretch]
        finite = np.isfinite(inside)
        if finite.any():
            keep |= {int(stretch[np.nanargmin(inside)]), int(stretch[np.nanargmax(inside)])}
        if not finite.all():
            keep.add(int(stretch[np.argmin(finite)]))
    keep = sorted(keep)
    return steps[keep], values[keep]
