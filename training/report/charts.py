"""Line charts as SVG that fills whatever width it is given; its words are HTML around it, so they stay as large as all others.

The lines are drawn in a box of WIDE x HIGH that is stretched to its place, their strokes are not: a dot is a line without length.
"""

import math
from typing import NamedTuple

import numpy as np

from training.report.markup import Html, data, empty, tag
from training.report.numbers import log_marks, mark_names, marks, plain, short, thinned

WIDE, HIGH = 2000, 1000
COLOURS = 8  # that style.css has
DOTTED = 40  # points; a line with more has no dots
ABSURD = 1e100  # beyond it nothing can be drawn to scale


class Line(NamedTuple):
    """One line of a chart."""

    label: str
    colour: int
    curve: tuple  # (steps, values)
    style: str = "line"  # line, fine (thin and faint, beneath the others), dash, sparse or dashdot
    dots: bool = False
    best: float | None = None  # the step to be ringed
    run: str | None = None  # whose it is, where there are several
    told: bool = True  # whether pointing at it tells its values


class Axis(NamedTuple):
    """The axis of steps that all charts of a page share."""

    last: int
    names: tuple  # of its rows of marks
    marks: list  # (step, a text for each row)
    epochs: list  # steps that closed an epoch; none where there are too many to be drawn


def axis(runs):
    """Steps; of a single run, or of runs with epochs of equal length, the epochs too."""
    last = max(1, *(run.metrics.last for run in runs))
    longest = max((run.metrics.numbers for run in runs), key=len)
    agree = all(run.metrics.numbers.items() <= longest.items() for run in runs)
    if not longest or not agree:
        return Axis(
            last, ("step",), [(step, short(step)) for step in marks(0, last, 6) if step >= 0], []
        )
    epochs = sorted(longest.items())
    apart = next(
        n for n in (f * 10**p for p in range(16) for f in (1, 2, 5)) if epochs[-1][1] / n <= 7
    )
    chosen = [(step, f"{epoch:,}", short(step)) for step, epoch in epochs if epoch % apart == 0]
    return Axis(
        last,
        ("epoch", "step"),
        chosen,
        [step for step, _ in epochs] if len(epochs) <= DOTTED else [],
    )


def chart(title, lines, axis, most, *, log=False, low=None, note=None, small=False, named=True):
    """A figure, or nothing where there is no value at all; with `log`, the reader may choose a logarithmic scale;
    `named` tells the lines' names above them."""
    lines = [line._replace(curve=drawable(*line.curve, most)) for line in lines]
    known = np.concatenate(
        [values[np.isfinite(values)] for _, values in (line.curve for line in lines)] or [[]]
    )
    if not len(known):
        return None
    bounds = {"linear": linear_bounds(settled(lines, known), low)}
    if log and known.min() > 1 / ABSURD and known.max() > 4 * known.min():
        bounds["log"] = log_bounds(known)
    at_first = "log" in bounds and bool(
        known.max() > 50 * np.median(known)
    )  # else there would be a spike and a flat line
    chosen = tag(
        "label",
        empty("input", type="checkbox", class_="log", checked=at_first),
        " log",
        class_="switch",
    )
    told = sorted(
        (line for line in lines if line.told), key=lambda line: line.style == "fine"
    )  # the first of a name counts
    return tag(
        "figure",
        tag(
            "figcaption",
            tag("h3", title),
            legend(title, told) if named else None,
            chosen if "log" in bounds else None,
        ),
        [plot(kind, lines, axis, *bounds[kind]) for kind in bounds],
        tag("p", note, class_="note") if note else None,
        data({"last": axis.last, "bounds": bounds, "lines": [points(line) for line in told]}),
        class_="chart small" if small else "chart",
    )


def drawable(steps, values, most):
    """The points of a curve that are drawn."""
    return thinned(steps, np.where(np.abs(values) < ABSURD, values, math.nan), most)


def settled(lines, known):
    """The values that a linear scale is made for: without those before and within the first epoch, where these would take a
    third of the room; they are seen on the logarithmic one."""
    ends = [line.curve[0][line.curve[0] > 0][:1] for line in lines if line.style != "fine"]
    first = max((end[0] for end in ends if len(end)), default=0)
    later = [
        values[(steps > 0) & (steps >= first * (line.style == "fine"))]
        for line in lines
        for steps, values in [line.curve]
    ]
    later = np.concatenate(later)
    later = later[np.isfinite(later)]
    return later if len(later) and 1.5 * np.ptp(later) < np.ptp(known) else known


def linear_bounds(known, low=None):
    """The lowest and highest value with some room; from 0 on where that is near."""
    least, most = float(known.min()), float(known.max())
    room = 0.06 * (most - least) or 0.1 * abs(most) or 1.0
    near = 0 <= least < 0.3 * most
    return [low if low is not None and low <= least else 0.0 if near else least - room, most + room]


def log_bounds(known):
    """The same for a logarithmic scale."""
    room = (known.max() / known.min()) ** 0.05
    return [float(known.min() / room), float(known.max() * room)]


def points(line):
    """A line as the page's script wants it: to seven digits, a null for a gap."""
    steps, values = line.curve
    steps = [int(step) for step in steps]
    return {
        "label": line.label,
        "colour": line.colour,
        "x": steps,
        "y": [None if v != v else float(f"{v:.7g}") for v in values],
    }


def legend(title, lines):
    """The name of each line and its last value; where one is called as the chart is, the value alone."""
    found = {}
    for line in lines:
        found.setdefault(line.label, line)
    lines = found.values()
    if len(lines) > 6:
        return None
    items = [[] if line.label == title else [tag("i"), line.label, " "] for line in lines]
    values = [tag("b", last_value(line)) for line in lines]
    return tag(
        "ul",
        [
            tag("li", *pair, style=colour(line))
            for *pair, line in zip(items, values, lines, strict=True)
        ],
        class_="legend",
    )


def last_value(line):
    _, values = line.curve
    return plain(float(values[-1])) if len(values) else None


def colour(line):
    return f"--c:var(--c{line.colour % COLOURS})"


def plot(kind, lines, axis, low, high):
    """The lines on their scale, linear or log, with its marks."""

    def across(step):
        return step / axis.last

    def up(value):
        return (
            math.log(value / low) / math.log(high / low)
            if kind == "log"
            else (value - low) / (high - low)
        )

    beside = log_marks(low, high) if kind == "log" else marks(low, high)
    rules = [Html(f"M0 {HIGH * (1 - up(mark)):.0f}H{WIDE}") for mark in beside]
    epochs = [Html(f"M{WIDE * across(step):.0f} 0V{HIGH}") for step in axis.epochs]
    drawing = tag(
        "svg",
        tag("path", class_="rule", d="".join(rules)),
        tag("path", class_="epochs", d="".join(epochs)) if epochs else None,
        [
            strokes(line, across, up, kind)
            for line in sorted(lines, key=lambda line: line.style != "fine")
        ],
        viewBox=f"0 0 {WIDE} {HIGH}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )
    names = zip(beside, mark_names(beside, kind == "log"), strict=True)
    left = [tag("span", name, style=f"bottom:{100 * up(mark):.2f}%") for mark, name in names]
    below = [
        tag(
            "span",
            tag("span", first),
            [tag("small", text) for text in more],
            style=f"left:{100 * across(step):.2f}%",
        )
        for step, first, *more in axis.marks
    ]
    names = tag(
        "div",
        tag("span", axis.names[0]),
        [tag("small", name) for name in axis.names[1:]],
        class_="names",
    )
    area = tag("div", drawing, class_="area", data_kind=kind)
    return tag(
        "div",
        tag("div", left, class_="y"),
        area,
        names,
        tag("div", below, class_="x" if len(axis.names) > 1 else "x low"),
        class_=f"plot {kind}",
    )


def strokes(line, across, up, kind):
    """One line: its path, its dots, and a ring around its best."""
    places = []
    for step, value in zip(*line.curve, strict=True):
        inside = value == value and (kind == "linear" or value > 0)
        places.append(
            (round(WIDE * across(step)), round(HIGH * (1 - up(value)))) if inside else None
        )
    shown = [place for place in places if place]
    alone = [
        p
        for before, p, after in zip([None, *places], places, [*places[1:], None], strict=False)
        if p and not before and not after
    ]
    dots = shown if line.dots and len(shown) <= DOTTED else alone
    at = [
        place
        for step, place in zip(line.curve[0], places, strict=True)
        if step == line.best and place
    ]
    return tag(
        "g",
        tag("path", class_=line.style, d=path(places)),
        tag("path", class_="dots", d=dotted(dots)) if dots else None,
        [tag("path", class_=part, d=dotted(at)) for part in ("ring", "hole", "heart")]
        if at
        else None,
        style=colour(line),
        data_run=line.run,
    )


def path(places):
    """Lines from place to place, broken where one is None."""
    words, pen = [], "M"
    for place in places:
        if place:
            words.append(f"{pen}{place[0]} {place[1]}")
        pen = "L" if place else "M"
    return "".join(words)


def dotted(places):
    return "".join(f"M{x} {y}h0" for x, y in places)
