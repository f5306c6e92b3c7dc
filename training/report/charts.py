"""Line charts as SVG that stretches to any width; their text is HTML around it and keeps its size.

The lines are drawn in a box of WIDE x HIGH units, which the page stretches. Strokes are not
stretched, so a dot is a line of length zero.
"""

import math
from typing import NamedTuple

import numpy as np

from training.report.markup import data, empty, note, tag
from training.report.numbers import log_ticks, plain, short, thinned, tick_labels, ticks

WIDE, HIGH = 2000, 1000
COLOURS = 8  # in style.css
DOTTED = 40  # a line with more points has no dots
ABSURD = 1e100  # values beyond it are not drawn


class Line(NamedTuple):
    """One line of a chart."""

    label: str
    colour: int
    curve: tuple  # (steps, values)
    style: str = "line"  # line, fine (thin and faint, below the others), dash, sparse or dashdot
    dots: bool = False
    best: float | None = None  # the step that gets a ring
    run: str | None = None  # the label of its run, if there are several
    in_tooltip: bool = True


class Axis(NamedTuple):
    """The axis of steps that all charts of a page share."""

    last: int
    names: tuple  # of the rows of tick labels
    ticks: list  # [(step, one text per row)]
    epochs: list  # the steps that ended an epoch; empty if there are too many to draw


def axis(runs):
    """The axis of steps; with epochs if the epochs of all runs have equal lengths."""
    last = max(1, *(run.metrics.last_step for run in runs))
    longest = max((run.metrics.epoch_at for run in runs), key=len)
    if not longest or any(run.metrics.epoch_at.items() - longest.items() for run in runs):
        return Axis(last, ("step",), [(step, short(step)) for step in ticks(0, last, 6)], [])
    epochs = sorted(longest.items())
    round_numbers = (factor * 10**power for power in range(16) for factor in (1, 2, 5))
    apart = next(n for n in round_numbers if epochs[-1][1] / n <= 7)
    labels = [(step, f"{epoch:,}", short(step)) for step, epoch in epochs if epoch % apart == 0]
    drawn = [step for step, _ in epochs] if len(epochs) <= DOTTED else []
    return Axis(last, ("epoch", "step"), labels, drawn)


def chart(title, lines, axis, most, *, log=False, low=None, remark=None, small=False, named=True):
    """A figure, or None if no line has a value.

    With `log`, the reader may choose a logarithmic scale; with `named`, a legend names the lines.
    """
    lines = [line._replace(curve=drawable(*line.curve, most)) for line in lines]
    finite = np.concatenate([v[np.isfinite(v)] for _, v in (line.curve for line in lines)] or [[]])
    if not len(finite):
        return None
    bounds, switch = {"linear": linear_bounds(in_view(lines, finite), low)}, None
    if log and finite.min() > 1 / ABSURD and finite.max() > 4 * finite.min():
        bounds["log"] = log_bounds(finite)
        # A linear scale would show one spike and a flat line.
        spiked = bool(finite.max() > 50 * np.median(finite))
        box = empty("input", type="checkbox", class_="log", checked=spiked)
        switch = tag("label.switch", box, " log")
    # If several lines have one label, the first counts: the one that is not fine.
    listed = [line for line in lines if line.in_tooltip]
    listed.sort(key=lambda line: line.style == "fine")
    return tag(
        "figure.chart.small" if small else "figure.chart",
        tag("figcaption", tag("h3", title), legend(title, listed) if named else None, switch),
        [plot(scale, lines, axis, *bounds[scale]) for scale in bounds],
        note(remark),
        data({"last": axis.last, "bounds": bounds, "lines": [points(line) for line in listed]}),
    )


def drawable(steps, values, most):
    """The points of a curve that are drawn."""
    return thinned(steps, np.where(np.abs(values) < ABSURD, values, math.nan), most)


def in_view(lines, finite):
    """The values that a linear scale must show.

    Those up to the end of the first epoch are left out if they would take a third of its height;
    the logarithmic scale shows them.
    """
    ends = [line.curve[0][line.curve[0] > 0][:1] for line in lines if line.style != "fine"]
    first = max((end[0] for end in ends if len(end)), default=0)
    later = []
    for line in lines:
        steps, values = line.curve
        start = first if line.style == "fine" else 0
        later.append(values[(steps > 0) & (steps >= start) & np.isfinite(values)])
    later = np.concatenate(later)
    return later if len(later) and 1.5 * np.ptp(later) < np.ptp(finite) else finite


def linear_bounds(values, low=None):
    """The lowest and highest value with some room around them; from 0 if the lowest is near it."""
    least, most = float(values.min()), float(values.max())
    room = 0.06 * (most - least) or 0.1 * abs(most) or 1.0
    if low is None or low > least:
        low = 0.0 if 0 <= least < 0.3 * most else least - room
    return [low, most + room]


def log_bounds(values):
    """`linear_bounds` for a logarithmic scale."""
    room = (values.max() / values.min()) ** 0.05
    return [float(values.min() / room), float(values.max() * room)]


def points(line):
    """A line for the page's script: seven digits per value, null for a gap."""
    steps, values = line.curve
    y = [None if math.isnan(value) else float(f"{value:.7g}") for value in values]
    return {"label": line.label, "colour": line.colour, "x": [int(step) for step in steps], "y": y}


def legend(title, lines):
    """The label of each line and its last value; the value alone if the label is the title."""
    first = {}
    for line in lines:
        first.setdefault(line.label, line)
    if len(first) > 6:
        return None
    items = []
    for label, line in first.items():
        name = [] if label == title else [tag("i"), label, " "]
        last = tag("b", [plain(float(value)) for value in line.curve[1][-1:]])
        items.append(tag("li", name, last, style=colour(line.colour)))
    return tag("ul.legend", items)


def colour(index):
    """The style of an element in one of the colours of style.css."""
    return f"--c:var(--c{index % COLOURS})"


def plot(scale, lines, axis, low, high):
    """The lines on a linear or log scale, with the ticks of both axes."""
    is_log = scale == "log"

    def up(value):
        if is_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    def x(step):
        return round(WIDE * step / axis.last)

    def y(value):
        return round(HIGH * (1 - up(value)))

    def stacked(first, *others):
        return [tag("span", first), *(tag("small", text) for text in others)]

    values = log_ticks(low, high) if is_log else ticks(low, high)
    rules = "".join(f"M0 {y(value)}H{WIDE}" for value in values)
    epochs = "".join(f"M{x(step)} 0V{HIGH}" for step in axis.epochs)
    drawing = tag(
        "svg",
        tag("path.rule", d=rules),
        tag("path.epochs", d=epochs) if epochs else None,
        [strokes(line, x, y, is_log) for line in sorted(lines, key=lambda li: li.style != "fine")],
        viewBox=f"0 0 {WIDE} {HIGH}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )
    left, below = [], []
    for value, label in zip(values, tick_labels(values, is_log), strict=True):
        left.append(tag("span", label, style=f"bottom:{100 * up(value):.2f}%"))
    for step, *texts in axis.ticks:
        below.append(tag("span", stacked(*texts), style=f"left:{100 * step / axis.last:.2f}%"))
    return tag(
        f"div.plot.{scale}",
        tag("div.y", left),
        tag("div.area", drawing, data_kind=scale),
        tag("div.names", stacked(*axis.names)),
        tag("div.x" if len(axis.names) > 1 else "div.x.low", below),
    )


def strokes(line, x, y, is_log):
    """One line: its path, its dots, and a ring around its best point."""
    spots = {}  # {step: its point in the drawing, or None}
    for step, value in zip(*line.curve, strict=True):
        shown = not math.isnan(value) and (value > 0 or not is_log)
        spots[step] = (x(step), y(value)) if shown else None
    row = [None, *spots.values(), None]
    triples = zip(row, row[1:], row[2:], strict=False)
    alone = [spot for before, spot, after in triples if spot and not before and not after]
    shown = [spot for spot in row if spot]
    dots = shown if line.dots and len(shown) <= DOTTED else alone
    paths = [tag(f"path.{line.style}", d=path(row))]
    paths += [tag("path.dots", d=dotted(dots))] if dots else []
    if best := spots.get(line.best):
        paths += [tag(f"path.{part}", d=dotted([best])) for part in ("ring", "hole", "heart")]
    return tag("g", paths, style=colour(line.colour), data_run=line.run)


def path(spots):
    """Lines from point to point, broken where one is None."""
    pairs = zip([None, *spots], spots, strict=False)
    words = (f"{'L' if before else 'M'}{spot[0]} {spot[1]}" for before, spot in pairs if spot)
    return "".join(words)


def dotted(spots):
    return "".join(f"M{x} {y}h0" for x, y in spots)
