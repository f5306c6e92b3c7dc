"""Which charts a page has, and the data from which the script in page.html draws them."""

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Shaped

from training.report.markup import Html, data, empty, folded, note, plain, section, tag
from training.report.read import Curve, Metrics, Run, direction

POINTS = 60_000  # on a page, so that it stays below a few MB
ABSURD = 1e100  # values beyond it are not drawn
FEW = 12  # charts of a kind that are visible at once; the others are folded
WAITS = 0.005  # a smaller share of time is only given in the text
LEAVES = 300  # that have a chart
EPOCHS = 5000  # with more, charts show steps only
COLOURS = 8  # in page.html
TITLES = {"waiting": "share of time waiting", "mfu": "model FLOPs utilisation (MFU)"}
ELSEWHERE = {"seconds", "compile_seconds"}  # given in the text
# The styles of sets, the training set first, where the colour stands for the run.
STYLES = ("dash", "line", "sparse", "dashdot")


class Line(NamedTuple):
    """One line of a chart."""

    names: list[str]  # its set, or its run and set; a click on one of them in a legend hides it
    colour: int
    curve: Curve
    style: str = "line"  # or fine (thin and faint, below the others), or one of STYLES
    best: float | None = None  # the step that gets a ring


def curves(runs: list[Run]) -> Html:
    """The part of the page with the charts."""
    several = len(runs) > 1
    faulty = [run for run in runs if run.metrics.problem]
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.metrics.by_metric()))
    extras = extra_names(runs)
    most = max(60, min(1500, POINTS // max(1, len(runs) * (4 * len(metrics) + len(extras)))))
    large = list(filter(None, (metric_chart(metric, runs, most) for metric in metrics)))
    small = list(filter(None, (extra_chart(name, runs, most) for name in extras)))
    more = large[FEW:] + small[FEW:]
    hint = "Drag over a chart to see a part of the run; click a name to hide its lines."
    return section(
        "Curves",
        [tag("p.problem", f"{run.name}: " * several, run.metrics.problem) for run in faulty],
        key(runs) if several else None,
        data(ends_of_epochs(runs), id="epochs"),
        tag("div.charts", large[:FEW]) if large else None,
        tag("div.charts.three", small[:FEW]) if small else None,
        folded(f"{len(more)} more", tag("div.charts", more)) if more else None,
        None if several else leaf_charts(runs[0]),
        tag("p.note.hint", hint) if large or small else None,
        None if large or small or faulty else note("Nothing has been measured yet."),
    )


def ends_of_epochs(runs: list[Run]) -> list[tuple[int, int]]:
    """[(step, epoch)] of the ends of epochs, if the epochs of all runs have equal lengths."""
    longest = max((run.metrics.epoch_at for run in runs), key=len)
    agree = all(run.metrics.epoch_at.items() <= longest.items() for run in runs)
    return sorted(longest.items()) if agree and len(longest) <= EPOCHS else []


def chart(
    title: str,
    lines: list[Line],
    most: int,
    *,
    log: bool = False,
    named: bool = True,
    small: bool = False,
    remark: str | None = None,
    **axis: object,
) -> Html | None:
    """A figure, or None if no line has a value.

    With `log`, the reader may choose a logarithmic scale; with `named`, a legend names the lines.
    """
    lines = [line._replace(curve=drawable(*line.curve, most)) for line in lines]
    values = np.concatenate([line.curve.values for line in lines] or [[]])
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    switch = None
    if log and values.min() > 0 and values.max() > 4 * values.min():
        # A linear scale would show one spike and a flat line.
        spiked = bool(values.max() > 50 * np.median(values))
        switch = tag("label.switch", empty("input.log", type="checkbox", checked=spiked), " log")
    # In a legend and at a point, the first line of a name counts: the one that is not fine.
    lines.sort(key=lambda line: line.style == "fine")
    caption = tag("figcaption", tag("h3", title), legend(title, lines) if named else None, switch)
    shown = data({"lines": [in_json(line) for line in lines], **axis})
    return tag("figure.chart.small" if small else "figure.chart", caption, shown, note(remark))


def drawable(
    steps: Float[np.ndarray, "points"], values: Float[np.ndarray, "points"], most: int
) -> Curve:
    """The points of a curve that are drawn."""
    return Curve(*thinned(steps, np.where(np.abs(values) < ABSURD, values, math.nan), most))


def thinned(
    steps: Shaped[np.ndarray, "points"], values: Float[np.ndarray, "points"], most: int
) -> tuple[Shaped[np.ndarray, "kept"], Float[np.ndarray, "kept"]]:
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


def in_json(line: Line) -> dict[str, Any]:
    """A line for the page's script: seven digits per value, null for a gap."""
    steps, values = line.curve
    y = [None if math.isnan(value) else float(f"{value:.7g}") for value in values]
    look = {"names": line.names, "colour": line.colour, "style": line.style, "best": line.best}
    return look | {"x": steps.tolist(), "y": y}


def legend(title: str, lines: list[Line]) -> Html | None:
    """The name of each line and its last value; the value alone if the name is the title."""
    first = {}
    for line in lines:
        first.setdefault(line.names[0], line)
    items = []
    for name, line in first.items():
        last = tag("b", plain(float(line.curve.values[-1])))
        named = hiding(name, line.colour, line.style, " ", last)
        items.append(tag("li", last) if name == title else named)
    return tag("ul.legend", items) if len(items) <= 6 else None


def hiding(name: str, tint: int, style: str, *more: object) -> Html:
    """A name in a legend, which hides its lines if it is clicked."""
    sample = tag(f"i.{style}", style=colour(tint))
    return tag("li", tag("button", sample, name, more, value=name, aria_pressed="true"))


def colour(index: int) -> str:
    """The style of an element in one of the colours of page.html."""
    return f"--c:var(--c{index % COLOURS})"


def metric_chart(metric: str, runs: list[Run], most: int) -> Html | None:
    """All sets of one metric in one chart. Of one run, each set has a colour, and the values within
    epochs and of replicas are faint; of several runs, each has a colour, and each set a style."""
    several, sets, lines, remark = len(runs) > 1, all_sets(runs), [], None
    for i, run in enumerate(runs):
        metrics = run.metrics
        for j, name in enumerate(sets):
            column, names = f"{name}_{metric}", [run.label, name] if several else [name]
            # Orange for the training set, blue for the first held-out set, then the other colours.
            tint, style = (i, STYLES[min(3, j)]) if several else ((1, 0)[j] if j < 2 else j, "line")
            ends, within = with_initial(metrics, column), metrics.within.get(column)
            best = run.best(column) if j else None
            if curve := ends or within:
                lines.append(Line(names, tint, curve, style, best and best.step))
            faint = [metrics.epochs[c] for c in metrics.epochs if c.startswith(f"{column}/")]
            remark = "Faint lines: each replica." if faint and not several else remark
            faint += [within] if ends and within else []
            lines += [Line(names, tint, curve, "fine") for curve in faint if not several]
    log = direction(metric, {}) == 1
    return chart(words(metric), lines, most, log=log, named=not several, remark=remark)


def with_initial(metrics: Metrics, name: str) -> Curve | None:
    """The Curve of values before the first step and at the ends of epochs, or None."""
    steps, values = metrics.epochs.get(name, (np.empty(0), np.empty(0)))
    if name in metrics.initial:
        steps, values = np.append(0.0, steps), np.append(metrics.initial[name], values)
    return Curve(steps, values) if len(steps) else None


def all_sets(runs: list[Run]) -> list[str]:
    """The sets of any of the runs, the training set first."""
    return list(dict.fromkeys(["train", *(name for run in runs for name in run.metrics.sets())]))


def key(runs: list[Run]) -> Html:
    """What the colours and styles of lines stand for where several runs are compared."""
    names = [hiding(run.label, i, "line") for i, run in enumerate(runs)]
    sets = [hiding(name, 6, STYLES[min(3, i)]) for i, name in enumerate(all_sets(runs))]
    return tag("div.key", tag("ul.legend", names), tag("ul.legend", sets))


def extra_names(runs: list[Run]) -> list[str]:
    """What was measured besides metrics; `learning_rate` means every name that begins with it."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics.names()))
    rates = [name for name in names if name.startswith("learning_rate")]
    shown = {f"{name}_{metric}" for run in runs for name, metric in run.metrics.pairs()}
    speeds = [f"{unit}_per_second" for unit in ("steps", "examples", "tokens")]
    slower = [name for name in speeds if name in names][:-1]
    hidden = {*shown, *ELSEWHERE, *rates, *slower}
    rest = [name for name in names if "/" not in name and name not in hidden]
    return ["learning_rate"] * bool(rates) + rest


def extra_chart(name: str, runs: list[Run], most: int) -> Html | None:
    """A chart of a value other than a metric: one line per run, or per learning rate of one run."""
    lines, title, is_rate = [], TITLES.get(name, words(name)), name == "learning_rate"
    for index, run in enumerate(runs):
        names = run.metrics.names()
        columns = [c for c in names if c == name or (is_rate and c.startswith(name))]
        for i, column in enumerate(columns):
            own = title if column == name else words(column.removeprefix(name).strip("_/"))
            label, tint = (own, i) if len(runs) == 1 else (run.label, index)
            lines.append(Line([label], tint, run.metrics.finest(column)))
    if name == "waiting" and not any((line.curve.values > WAITS).any() for line in lines):
        return None
    log = is_rate or name.endswith("norm")
    return chart(title, lines, most, log=log, small=True, named=len(runs) == 1)


def words(name: str) -> str:
    return name.replace("_", " ")


def leaf_charts(run: Run) -> Html | None:
    """A chart for each leaf of a tree of which something was measured, such as norms."""
    leaves, others = {}, (*run.metrics.sets(), "learning")
    for name in run.metrics.names():
        if "/" in name and name.split("_")[0] not in others:
            kind, leaf = name.split("/", 1)
            lines = leaves.setdefault(leaf, [])
            lines.append(Line([words(kind)], len(lines), run.metrics.finest(name)))
    if not leaves:
        return None
    shown = list(leaves.items())[:LEAVES]
    charts = [chart(leaf, lines, 60, log=True, small=True) for leaf, lines in shown]
    more = note(f"and {len(leaves) - LEAVES:,} more") if len(leaves) > LEAVES else None
    return folded(f"Leaf by leaf ({len(leaves):,})", tag("div.charts.three", charts), more)
