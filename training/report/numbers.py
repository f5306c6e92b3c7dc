"""Numbers for people: how they are written, where an axis is marked, and which points of a long curve are drawn."""

import math

import numpy as np


def plain(value):
    """A number as short as it can be read: 0.9612, 24,900, 3e-05."""
    if value is None or math.isnan(value):
        return "\N{EM DASH}"
    if value != 0 and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3g}"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    if abs(value) < 0.1:
        return f"{value:.3g}"
    return (
        f"{value:.4f}"
        if abs(value) < 10
        else f"{value:.2f}"
        if abs(value) < 100
        else f"{value:.1f}"
    )


def duration(seconds):
    """A time as its two largest units: 22.9 s, 3 min 20 s, 2 h 14 min."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    total = round(seconds)
    for unit, small, size, part in (
        ("min", "s", 60, 1),
        ("h", "min", 3600, 60),
        ("d", "h", 86400, 3600),
    ):
        if total < size * (24 if unit == "h" else 60) or unit == "d":
            return f"{total // size:,} {unit} {total % size // part} {small}"


def marks(low, high, most=5):
    """Round numbers within a range, at most so many steps apart as there is room for."""
    rough = max(high - low, 1e-300) / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [
        i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def log_marks(low, high):
    """Powers of ten within a range, with what lies between them where there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    apart = max(1, math.ceil(len(powers) / 6))
    factors = (1, 2, 5) if len(powers) <= 3 else (1, 3) if len(powers) <= 4 else (1,)
    found = [factor * 10.0**power for power in powers[::apart] for factor in factors]
    return [mark for mark in found if low * 0.999 <= mark <= high * 1.001]


def mark_names(values, log=False):
    """The marks of an axis, all with as many digits."""
    if log:
        return [f"{v:g}" if 1e-4 <= v < 1e5 else tidy(f"{v:.0e}") for v in values]
    step = min(np.diff(values), default=1) or 1
    largest = max(map(abs, values), default=0)
    if largest >= 1e7 or 0 < largest < 1e-3:
        return [tidy(f"{v:.1e}") if v else "0" for v in values]
    if largest >= 10_000:
        return [f"{v / 1000:,.{1 if step < 1000 else 0}f}k" if v else "0" for v in values]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{v:,.{digits}f}" for v in values]


def tidy(text):
    """1.0e-05 -> 1e-5"""
    mantissa, exponent = text.split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def thinned(steps, values, most):
    """At most so many points of a curve: of every stretch its lowest and highest, and a gap where it has one."""
    if len(steps) <= most:
        return steps, values
    stretches = np.array_split(np.arange(len(steps)), max(1, most // 3))
    keep = {0, len(steps) - 1}
    for stretch in stretches:
        inside = values[stretch]
        known = np.isfinite(inside)
        if known.any():
            keep |= {int(stretch[np.nanargmin(inside)]), int(stretch[np.nanargmax(inside)])}
        if not known.all():
            keep.add(int(stretch[np.argmin(known)]))
    keep = sorted(keep)
    return steps[keep], values[keep]


UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def short(count):
    """A count in few characters: 1,080, 12.5k, 3M."""
    size, unit = next((pair for pair in UNITS if count >= max(pair[0], 10_000)), (1, ""))
    return f"{count / size:,.1f}".removesuffix(".0") + unit
