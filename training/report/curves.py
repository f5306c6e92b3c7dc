"""Which charts a page has: one per metric, and one for every other measured value."""

import numpy as np

from training.report.charts import Line, axis, chart, colour, drawable
from training.report.markup import folded, note, section, table, tag
from training.report.numbers import plain
from training.report.read import direction
from training.report.rows import Curve

POINTS = 40_000  # on a page, so that it stays below a few MB
FEW = 12  # charts of a kind that are visible at once; the others are folded
WAITS = 0.005  # a smaller share of time is only given in the text
LEAVES = 300  # rows of the table of leaves
TITLES = {"waiting": "share of time waiting", "mfu": "model FLOPs utilisation (MFU)"}
ELSEWHERE = {"seconds", "compile_seconds"}  # given in the text
# The styles of sets, the training set first, where the colour stands for the run.
STYLES = ("dash", "line", "sparse", "dashdot")


def curves(runs):
    """The part of the page with the charts."""
    several, steps = len(runs) > 1, axis(runs)
    faulty = [run for run in runs if run.metrics.problem]
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.metrics.by_metric()))
    extras = extra_names(runs)
    most = max(60, min(800, POINTS // max(1, len(runs) * (2 * len(metrics) + len(extras)) * 2)))
    large = list(filter(None, (metric_chart(metric, runs, steps, most) for metric in metrics)))
    small = list(filter(None, (extra_chart(name, runs, steps, most) for name in extras)))
    more = large[FEW:] + small[FEW:]
    return section(
        "Curves",
        [tag("p.problem", f"{run.name}: " * several + run.metrics.problem) for run in faulty],
        key(runs) if several else None,
        tag("div.charts", large[:FEW]) if large else None,
        tag("div.charts.three", small[:FEW]) if small else None,
        folded(f"{len(more)} more", tag("div.charts", more)) if more else None,
        None if several else leaf_table(runs[0]),
        None if large or small or faulty else note("Nothing has been measured yet."),
    )


def metric_chart(metric, runs, axis, most):
    """All sets of one metric in one chart; each of several runs has a colour."""
    log = direction(metric, {}) == 1
    if len(runs) > 1:
        return chart(words(metric), compared(metric, runs), axis, most, log=log, named=False)
    metrics, lines = runs[0].metrics, []
    for index, name in enumerate(metrics.sets()):
        # Orange for the training set, blue for the first held-out set, then the other colours.
        column, tint = f"{name}_{metric}", 1 if name == "train" else 0 if index <= 1 else index
        if curve := metrics.within_epochs(column):
            lines.append(Line(name, tint, curve, "fine" if column in metrics.epochs else "line"))
        for each in metrics.epochs:
            if each.startswith(f"{column}/"):
                lines.append(Line(each, tint, metrics.epochs[each], "fine", in_tooltip=False))
        if curve := with_initial(metrics, column):
            best = runs[0].best(column) if name != "train" else None
            lines.append(Line(name, tint, curve, dots=True, best=best.step if best else None))
    remark = None if all(line.in_tooltip for line in lines) else "Faint lines: each replica."
    return chart(words(metric), lines, axis, most, log=log, remark=remark)


def with_initial(metrics, name):
    """The Curve of values before the first step and at the ends of epochs, or None."""
    steps, values = metrics.epochs.get(name, (np.empty(0), np.empty(0)))
    if name in metrics.initial:
        steps, values = np.append(0.0, steps), np.append(metrics.initial[name], values)
    return Curve(steps, values) if len(steps) else None


def compared(metric, runs):
    """The lines of several runs: the colour stands for the run, the style for the set."""
    lines, sets = [], all_sets(runs)
    for index, run in enumerate(runs):
        for name in run.metrics.sets():
            column = f"{name}_{metric}"
            if curve := with_initial(run.metrics, column) or run.metrics.within_epochs(column):
                label, style = f"{run.label} {name}", STYLES[min(3, sets.index(name))]
                lines.append(Line(label, index, curve, style, run=run.label))
    return lines


def all_sets(runs):
    """The sets of any of the runs, the training set first."""
    return list(dict.fromkeys(["train", *(name for run in runs for name in run.metrics.sets())]))


def key(runs):
    """What the colours and styles of lines stand for where several runs are compared."""
    names, styles = [], []
    for i, run in enumerate(runs):
        names.append(tag("li", tag("i"), run.label, style=colour(i), data_run=run.label))
    for i, name in enumerate(all_sets(runs)):
        styles.append(tag("li", tag(f"i.{STYLES[min(3, i)]}"), name))
    return tag("div.key", tag("ul.legend", names), tag("ul.legend.styles", styles))


def extra_names(runs):
    """What was measured besides metrics; `learning_rate` means every name that begins with it."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics.names()))
    rates = [name for name in names if name.startswith("learning_rate")]
    shown = {f"{name}_{metric}" for run in runs for name, metric in run.metrics.pairs()}
    speeds = [f"{unit}_per_second" for unit in ("steps", "examples", "tokens")]
    slower = [name for name in speeds if name in names][:-1]
    hidden = {*shown, *ELSEWHERE, *rates, *slower}
    rest = [name for name in names if "/" not in name and name not in hidden]
    return ["learning_rate"] * bool(rates) + rest


def extra_chart(name, runs, axis, most):
    """A chart of a value other than a metric: one line per run, or per learning rate of one run."""
    lines, title, is_rate = [], TITLES.get(name, words(name)), name == "learning_rate"
    for index, run in enumerate(runs):
        names = run.metrics.names()
        columns = [c for c in names if c == name or (is_rate and c.startswith(name))]
        for i, column in enumerate(columns):
            own = title if column == name else words(column.removeprefix(name).strip("_/"))
            label, tint = (own, i) if len(runs) == 1 else (run.label, index)
            lines.append(Line(label, tint, run.metrics.finest(column), run=run.label))
    if name == "waiting" and not any((line.curve.values > WAITS).any() for line in lines):
        return None
    log, low = is_rate or name.endswith("norm"), 0.0 if name == "waiting" else None
    return chart(title, lines, axis, most, log=log, low=low, small=True, named=len(runs) == 1)


def words(name):
    return name.replace("_", " ")


def leaf_table(run):
    """A table of what was measured per leaf of a tree, with a small drawing of each curve."""
    leaves, others = {}, (*run.metrics.sets(), "learning")
    for name in run.metrics.names():
        if "/" in name and name.split("_")[0] not in others:
            kind, leaf = name.split("/", 1)
            leaves.setdefault(leaf, {})[kind] = run.metrics.finest(name)
    if not leaves:
        return None
    kinds = list(dict.fromkeys(kind for measured in leaves.values() for kind in measured))
    shown, left = list(leaves.items())[:LEAVES], len(leaves) - LEAVES
    rows = [[leaf, *(spark(measured.get(kind)) for kind in kinds)] for leaf, measured in shown]
    curves = table(["leaf", *map(words, kinds)], rows, class_="leaves")
    more = note(f"and {left:,} more") if left > 0 else None
    return folded(f"Leaf by leaf ({len(leaves):,})", curves, more)


def spark(curve):
    """A curve drawn as small as a word, and its last value."""
    if curve is None:
        return None
    steps, values = drawable(*curve, 60)
    finite = np.isfinite(values)
    if not finite.any():
        return plain(np.nan)
    steps, values = steps[finite], values[finite]
    x, y = (100 * (a - a.min()) / (np.ptp(a) or 1) for a in (steps, values))
    line = "M" + "L".join(f"{a:.0f} {100 - b:.0f}" for a, b in zip(x, y, strict=True))
    box = {"viewBox": "0 0 100 100", "preserveAspectRatio": "none"}
    drawing = tag("svg", tag("path.line", d=line), **box, class_="spark")
    return tag("td", drawing, tag("b", plain(float(values[-1]))))
