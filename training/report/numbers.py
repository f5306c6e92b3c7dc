"""Numbers as readable text, the ticks of an axis, and the drawn points of a long curve."""

import math

import numpy as np

UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


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


def ticks(low, high, most=5):
    """Round numbers at equal distances within a range, about `most` of them or fewer."""
    rough = max(high - low, 1e-300) / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low, high):
    """Powers of ten within a range, and numbers between them if there are few powers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    apart = max(1, math.ceil(len(powers) / 6))
    factors = (1, 2, 5) if len(powers) <= 3 else (1, 3) if len(powers) <= 4 else (1,)
    values = [factor * 10.0**power for power in powers[::apart] for factor in factors]
    return [value for value in values if low * 0.999 <= value <= high * 1.001]


def tick_labels(values, log=False):
    """The text of an axis's ticks, all with equally many digits on a linear axis."""
    if log:
        return [f"{v:g}" if 1e-4 <= v < 1e5 else short_power(f"{v:.0e}") for v in values]
    step = min(np.diff(values), default=1) or 1
    largest = max(map(abs, values), default=0)
    place = math.floor(math.log10(step) + 1e-9)  # power of ten of the digit that differs
    if largest >= 1e7 or 0 < largest < 1e-3:
        digits = max(1, math.floor(math.log10(largest) + 1e-9) - place)
        return [short_power(f"{v:.{digits}e}") if v else "0" for v in values]
    if largest >= 10_000:
        return [f"{v / 1000:,.{max(0, 3 - place)}f}k" if v else "0" for v in values]
    digits = max(0, -place)
    return [f"{v:,.{digits}f}" for v in values]


def short_power(text):
    """1.0e-05 -> 1e-5"""
    mantissa, exponent = text.split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def short(count):
    """A count in few characters: 1,080, 12.5k, 3M."""
    size, unit = next((pair for pair in UNITS if count >= max(pair[0], 10_000)), (1, ""))
    return f"{count / size:,.1f}".removesuffix(".0") + unit


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
