"""The comparison of a sweep: a table sorted by the metric, parallel coordinates, and the curves."""

import json
import math
from contextlib import suppress
from dataclasses import replace

from search.spec import is_number
from training.report.compare import differences
from training.report.curves import ABSURD, colour, curves
from training.report.facts import link, time_of
from training.report.markup import headline, note, section, table, tag
from training.report.numbers import plain
from training.report.page import document
from training.report.read import read_run
from utils import UserError, cut, first_line
from utils.files import atomic_write

PAGE = "comparison.html"
BOLD = 8  # lines of parallel coordinates that are not faint: those of the best trials
WIDE, HIGH = 2000, 1000  # units of the drawing, which the page stretches
WIDEST = 50  # a ratio beyond which an axis is logarithmic


def write_page(sweep):
    """Write the page about all trials of a sweep, and return its path."""
    target = sweep.folder / PAGE
    atomic_write(target, page(sweep, target).encode(errors="replace"))
    return target


def page(sweep, target):
    trials = sweep.ranked()
    runs = {trial.number: run for trial in trials if (run := run_of(sweep, trial))}
    over = sum(trial.over for trial in trials)
    subtitle = f"{len(trials)} trials, {over} of them over, by {sweep.monitor.replace('_', ' ')}"
    parts = [
        headline(sweep.folder.name, subtitle),
        standings(sweep, trials, runs, target),
        coordinates(sweep, trials, {number: i for i, number in enumerate(runs)}),
        curves(list(runs.values())) if runs else None,
        differences(list(runs.values())) if len(runs) > 1 else None,
    ]
    return document([sweep.folder.name, sweep.config.get("title", "run")], parts)


def run_of(sweep, trial):
    """The Run of a trial, or its part of the Run of a program in progress; None if it has not
    started, or failed before it had a folder."""
    programs = [number for number, members in enumerate(sweep.programs) if trial.number in members]
    with suppress(UserError):
        return replace(read_run(sweep.run_dir(trial)), label=trial.name)
    with suppress(UserError, IndexError):
        run = read_run(sweep.program_dir(programs[-1]))
        replica = sweep.programs[programs[-1]].index(trial.number)
        return replace(run, label=trial.name, metrics=share_of(run.metrics, replica))
    return None


def share_of(metrics, replica):
    """The Metrics of one replica, under their usual names."""

    def own(columns):
        end = f"/{replica}"
        named = {k.removesuffix(end): curve for k, curve in columns.items() if k.endswith(end)}
        return named | {"seconds": columns["seconds"]} if "seconds" in columns else named

    kinds = ("within", "epochs", "initial", "final")
    return replace(metrics, **{kind: own(getattr(metrics, kind)) for kind in kinds})


def standings(sweep, trials, runs, target):
    """The table of all trials, the best first, with the reason why a trial failed."""
    rows, problems, order = [], [], list(runs)
    for i, trial in enumerate(trials):
        run, state, value = runs.get(trial.number), sweep.state(trial), trial.score(math.inf)
        tint = colour(order.index(trial.number)) if run else None  # the colour of its curves
        swatch = tag("i.swatch", style=tint) if run else None
        name = link(run.folder, trial.name, target) if run else trial.name
        shown = plain(value) if value is not None else None
        is_best = i == 0 and value is not None and trial.failed is None
        rows.append(
            [
                tag("th", swatch, name, scope="row"),
                tag(f"span.state.{state}", state),
                tag("b.first" if is_best else "b", shown),
                *(text_of(trial.values[key]) for key in sweep.spec.keys),
                trial.epochs,
                time_of(run) if run else None,
            ]
        )
        if trial.failed is not None:
            problems.append(tag("p.problem", f"{trial.name}: {first_line(trial.failed)}"))
    head = ["trial", "", sweep.monitor.replace("_", " "), *sweep.spec.keys, "epochs", "time"]
    remark = "The best value of all epochs."
    if sweep.spec.halving:
        remark += " Stopped: others were better when it paused."
    return section("Trials", table(head, rows, "standings"), note(remark), problems)


def text_of(value):
    """A value of a config as short text."""
    return plain(value) if isinstance(value, float) else cut(json.dumps(value), 60)


def coordinates(sweep, trials, tints):
    """Parallel coordinates: one axis for each key and one for the metric, one line for each trial,
    which ends before the last axis if it has no value. `tints` are {trial: its colour}."""
    columns = {key: [trial.values[key] for trial in trials] for key in sweep.spec.keys}
    columns[sweep.monitor] = [trial.score(math.inf) for trial in trials]
    axes = {name: Coordinate(values) for name, values in columns.items()}
    apart = WIDE / (len(axes) - 1)
    lines = []
    for i, trial in reversed(list(enumerate(trials))):  # the best are drawn last, above the others
        heights = [
            axis.height(values[i])
            for axis, values in zip(axes.values(), columns.values(), strict=True)
        ]
        spots = [
            f"{round(apart * k)} {round(HIGH * (1 - height))}"
            for k, height in enumerate(heights)
            if height is not None
        ]
        values = [f"{key} {text_of(value)}" for key, value in trial.values.items()]
        score = trial.score(math.inf)
        values += [f"{sweep.monitor} {plain(score)}"] if score is not None else []
        style = "line" if i < BOLD else "fine"
        stroke = tag(f"path.curve.{style}", d=f"M{'L'.join(spots)}")
        tip = f"{trial.name}: {', '.join(values)}"
        lines.append(
            tag(
                "g",
                stroke,
                style=colour(tints.get(trial.number, i)),
                data_names=json.dumps([trial.name]),
                data_tip=tip,
            )
        )
    rules = "".join(f"M{round(apart * k)} 0V{HIGH}" for k in range(len(axes)))
    box = {"viewBox": f"0 0 {WIDE} {HIGH}", "preserveAspectRatio": "none"}
    drawing = tag("svg", tag("path.rule", d=rules), lines, **box, aria_hidden="true")
    names = []
    for k, (name, axis) in enumerate(axes.items()):
        left = f"{100 * k / (len(axes) - 1):.2f}%"
        names.append(tag("b", name, style=f"left:{left};bottom:100%"))
        for height, text in axis.marks():
            names.append(tag("span", text, style=f"left:{left};bottom:{100 * height:.2f}%"))
    figure = tag("figure.chart.parallel", drawing, tag("div.marks", names))
    return section("Values and results", figure, note("The lines of the best trials are bold."))


class Coordinate:
    """An axis of parallel coordinates: numbers by their size, on a logarithmic scale where they
    differ widely, and other values at equal distances."""

    def __init__(self, values):
        known = [value for value in values if value is not None]
        self.numbers = bool(known) and all(map(is_number, known))
        self.known = sorted(set(known)) if self.numbers else in_order(known)
        least, most = (self.known[0], self.known[-1]) if self.numbers else (0, 0)
        self.log = self.numbers and least > 0 and most > WIDEST * least

    def height(self, value):
        """The place of a value from 0 to 1, or None."""
        if value is None or (self.numbers and abs(value) > ABSURD):
            return None
        if not self.numbers:
            place, last = self.known.index(value), len(self.known) - 1
            return place / last if last else 0.5
        least, most, value = (
            math.log(number) if self.log else number
            for number in (self.known[0], self.known[-1], value)
        )
        return (value - least) / (most - least) if most > least else 0.5

    def marks(self):
        """(place, text) of the values that are written beside the axis."""
        if self.numbers and len(self.known) > 6:
            shown = [self.known[0], self.known[-1]]
        else:
            shown = self.known
        return [(self.height(value), text_of(value)) for value in shown]


def in_order(values):
    """Different values of JSON, by their size where they can be compared, else by their text."""
    different = [json.loads(text) for text in sorted({json.dumps(value) for value in values})]
    with suppress(TypeError):
        different.sort()
    return different
