"""Which charts a page has: of every metric, and of what else was measured."""

import numpy as np

from training.report.charts import COLOURS, Line, chart
from training.report.markup import folded, section, table, tag
from training.report.numbers import plain, thinned
from training.report.read import direction
from training.report.rows import Curve

POINTS = 40_000  # on a page, so that it stays below a few MB
FEW = 12  # charts that are seen at once; the others are folded
WAITS = 0.005  # share of the time; less is told in words alone
LEAVES = 300  # rows of the table of leaves
TITLES = {"examples_per_second": "examples per second", "waiting": "share of time waiting"}
ELSEWHERE = {"seconds", "compile_seconds"}  # told in words
STYLES = (
    "dash",
    "line",
    "sparse",
    "dashdot",
)  # of the sets where the colour tells the run: train first


def curves(runs, axis):
    """The part of the page with the charts."""
    problems = [
        f"{run.name}: {run.metrics.problem}" if len(runs) > 1 else run.metrics.problem
        for run in runs
        if run.metrics.problem
    ]
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.metrics.metrics()))
    extras = extra_names(runs)
    most = max(60, min(800, POINTS // max(1, len(runs) * (2 * len(metrics) + len(extras)) * 2)))
    large = [metric_chart(metric, runs, axis, most) for metric in metrics]
    large = [figure for figure in large if figure]
    small = [figure for name in extras if (figure := extra_chart(name, runs, axis, most))]
    more = large[FEW:] + small[FEW:]
    return section(
        "Curves",
        [tag("p", problem, class_="problem") for problem in problems],
        key(runs) if len(runs) > 1 else None,
        tag("div", large[:FEW], class_="charts") if large else None,
        tag("div", small[:FEW], class_="charts three") if small else None,
        folded(f"{len(more)} more", tag("div", more, class_="charts")) if more else None,
        leaves(runs[0]) if len(runs) == 1 else None,
        tag("p", "Nothing was measured yet.", class_="note") if not large and not small else None,
    )


def set_colour(index, name):
    """Blue for the first held-out set, orange for the training set, then on."""
    return 1 if name == "train" else 0 if index <= 1 else index


def metric_chart(metric, runs, axis, most):
    """All sets of one metric in one chart; of several runs, a colour each."""
    log = direction(metric, {}) == 1
    if len(runs) > 1:
        return chart(words(metric), compared(metric, runs), axis, most, log=log, named=False)
    metrics, lines, replicas = runs[0].metrics, [], False
    for index, name in enumerate(metrics.sets()):
        full, colour = f"{name}_{metric}", set_colour(index, name)
        if (fine := metrics.fine(full)) is not None:
            lines.append(Line(name, colour, fine, "fine" if full in metrics.epochs else "line"))
        for each in [each for each in metrics.epochs if each.startswith(f"{full}/")]:
            lines.append(Line(each, colour, metrics.epochs[each], "fine", told=False))
            replicas = True
        if (curve := with_initial(metrics, full)) is not None:
            lines.append(
                Line(
                    name,
                    colour,
                    curve,
                    dots=True,
                    best=best_step(runs[0], full) if name != "train" else None,
                )
            )
    return chart(
        words(metric),
        lines,
        axis,
        most,
        log=log,
        note="Faint lines: each replica." if replicas else None,
    )


def with_initial(metrics, name):
    """The values at the ends of epochs, and before the first step."""
    steps, values = metrics.epochs.get(name, (np.empty(0), np.empty(0)))
    if name in metrics.initial:
        steps, values = np.append(0.0, steps), np.append(metrics.initial[name], values)
    return Curve(steps, values) if len(steps) else None


def best_step(run, name):
    """The step of the best value."""
    best = run.best(name)
    return next(
        (step for step, epoch in run.metrics.numbers.items() if best and epoch == best[1]), None
    )


def compared(metric, runs):
    """The lines of several runs: the colour is the run, the style the set."""
    lines = []
    for colour, run in enumerate(runs):
        for name in run.metrics.sets():
            curve = with_initial(run.metrics, f"{name}_{metric}")
            curve = curve if curve is not None else run.metrics.fine(f"{name}_{metric}")
            if curve is not None:
                lines.append(
                    Line(
                        f"{run.label} {name}",
                        colour,
                        curve,
                        STYLES[min(3, all_sets(runs).index(name))],
                        run=run.label,
                    )
                )
    return lines


def all_sets(runs):
    """The sets of any of the runs, the training set first."""
    sets = dict.fromkeys(name for run in runs for name in run.metrics.sets())
    return ["train", *(name for name in sets if name != "train")]


def key(runs):
    """What colours and styles of lines mean where several runs are compared."""
    names = [
        tag("li", tag("i"), run.label, style=f"--c:var(--c{i % COLOURS})", data_run=run.label)
        for i, run in enumerate(runs)
    ]
    styles = [
        tag("li", tag("i", class_=STYLES[min(3, i)]), name) for i, name in enumerate(all_sets(runs))
    ]
    return tag(
        "div",
        tag("ul", names, class_="legend"),
        tag("ul", styles, class_="legend styles"),
        class_="key",
    )


def extra_names(runs):
    """What was measured besides metrics; `learning_rate` stands for all of that beginning."""
    names = list(
        dict.fromkeys(name for run in runs for name in run.metrics.names() if "/" not in name)
    )
    metrics = {
        f"{of}_{metric}"
        for run in runs
        for metric, sets in run.metrics.metrics().items()
        for of in sets
    }
    rest = [
        name
        for name in names
        if name not in metrics | ELSEWHERE and not name.startswith("learning_rate")
    ]
    rest = [
        name for name in rest if name != "steps_per_second" or "examples_per_second" not in names
    ]
    rates = any(name.startswith("learning_rate") for run in runs for name in run.metrics.names())
    return [*(["learning_rate"] if rates else []), *rest]


def extra_chart(name, runs, axis, most):
    """A chart of what is no metric: one line a run, or one for each learning rate of a single run."""
    lines, title = [], TITLES.get(name, words(name))
    for index, run in enumerate(runs):
        found = [
            each
            for each in run.metrics.names()
            if each == name or (name == "learning_rate" and each.startswith(name))
        ]
        for place, each in enumerate(found):
            label = words(each.removeprefix("learning_rate").strip("_/")) if each != name else title
            label, colour = (label, place) if len(runs) == 1 else (run.label, index)
            lines.append(Line(label, colour, run.metrics.finest(each), run=run.label))
    if name == "waiting" and not any((line.curve.values > WAITS).any() for line in lines):
        return None
    log, low = name.endswith("norm") or name == "learning_rate", 0.0 if name == "waiting" else None
    return chart(title, lines, axis, most, log=log, low=low, small=True, named=len(runs) == 1)


def words(name):
    return name.replace("_", " ")


def leaves(run):
    """A table of what was measured of every leaf of the tree, with a small drawing of its course."""
    measured, others = {}, (*run.metrics.sets(), "learning")
    for name in [
        name for name in run.metrics.names() if "/" in name and name.split("_")[0] not in others
    ]:
        what, leaf = name.split("/", 1)
        measured.setdefault(leaf, {})[what] = run.metrics.finest(name)
    kinds = list(dict.fromkeys(what for found in measured.values() for what in found))
    rows = [
        [leaf, *(spark(found.get(kind)) for kind in kinds)]
        for leaf, found in list(measured.items())[:LEAVES]
    ]
    left = len(measured) - len(rows)
    if not rows:
        return None
    more = tag("p", f"and {left:,} more", class_="note") if left > 0 else None
    return folded(
        f"Leaf by leaf ({len(measured):,})",
        table(["leaf", *map(words, kinds)], rows, class_="leaves"),
        more,
    )


def spark(curve):
    """The course of a curve in the room of a word, and its last value."""
    if curve is None:
        return None
    steps, values = thinned(
        curve.steps, np.where(np.abs(curve.values) < 1e100, curve.values, np.nan), 60
    )
    known = np.isfinite(values)
    if not known.any():
        return plain(np.nan)
    steps, values = steps[known], values[known]
    x, y = (100 * (a - a.min()) / (np.ptp(a) or 1) for a in (steps, values))
    line = "M" + "L".join(f"{a:.0f} {100 - b:.0f}" for a, b in zip(x, y, strict=True))
    drawing = tag(
        "svg",
        tag("path", class_="line", d=line),
        viewBox="0 0 100 100",
        preserveAspectRatio="none",
        class_="spark",
    )
    return tag("td", drawing, tag("b", plain(float(values[-1]))))
