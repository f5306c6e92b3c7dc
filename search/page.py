"""The comparison of a sweep: a table sorted by the metric, parallel coordinates, and the curves."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from search.spec import text_of
from search.sweep_folder import Group, Sweep, Trial
from training.report.curves import colour, curves
from training.report.facts import link, time_of
from training.report.markup import Html, headline, note, plain, section, table, tag
from training.report.page import document
from training.report.read import Metrics, Run, read_run
from utils import UserError, cut, first_line
from utils.files import atomic_write

PAGE = "comparison.html"
BOLD = 8  # lines of parallel coordinates that are not faint: those of the best trials
WIDE, HIGH = 2000, 1000  # units of the drawing, which the page stretches
MARKS = 6  # values of an axis; of more, only the first and the last have their text

T = TypeVar("T")


def write_page(sweep: Sweep) -> Path:
    """Write the page about all trials of a sweep, and return its path."""
    target = sweep.folder / PAGE
    atomic_write(target, page(sweep, target).encode(errors="replace"))
    return target


def page(sweep: Sweep, target: Path) -> str:
    groups = sweep.ranked()
    trials = [trial for group in groups for trial in group.trials]
    runs = {trial.number: run for trial in trials if (run := run_of(sweep, trial))}
    over = sum(trial.over for trial in trials)
    subtitle = f"{len(trials)} trials, {over} of them over, by {sweep.monitor.replace('_', ' ')}"
    parts = [
        headline(sweep.folder.name, subtitle),
        standings(sweep, groups, runs, target),
        coordinates(sweep, groups, list(runs)),
        curves(list(runs.values())) if runs else None,
    ]
    return document([sweep.folder.name, sweep.folder.parent.name], parts)


def run_of(sweep: Sweep, trial: Trial) -> Run | None:
    """The Run of a trial, or its part of the Run of a program; None if it has not started, or
    failed before it had a folder."""
    with suppress(UserError):
        run = replace(read_run(sweep.run_dir(trial)), label=sweep.label(trial) or trial.name)
        if trial.replica is None:
            return run
        return replace(run, metrics=share_of(run.metrics, f"/{trial.replica}"))
    return None


def share_of(metrics: Metrics, end: str) -> Metrics:
    """The Metrics of one replica, under their usual names."""

    def own(columns: dict[str, T]) -> dict[str, T]:
        named = {k.removesuffix(end): curve for k, curve in columns.items() if k.endswith(end)}
        return named | {"seconds": columns["seconds"]} if "seconds" in columns else named

    kinds = ("within", "epochs", "initial", "final")
    return replace(metrics, **{kind: own(getattr(metrics, kind)) for kind in kinds})


def standings(sweep: Sweep, groups: list[Group], runs: dict[int, Run], target: Path) -> Html:
    """The table of all trials, the best first; those that differ only in their seed share a row."""
    rows, problems, order = [], [], list(runs)
    keys = [key for key in sweep.spec.domains if key != "seed"]
    for i, group in enumerate(groups):
        names = []
        for trial in group.trials:
            if run := runs.get(trial.number):  # the colour is that of its curves
                names.append(tag("i.swatch", style=colour(order.index(trial.number))))
            names += [link(run.folder, trial.name, target) if run else trial.name, " "]
            if trial.failed is not None:
                text = f"{trial.name}: {first_line(trial.failed)}"
                problems.append(tag("p.problem", text))
        states = dict.fromkeys(sweep.state(trial) for trial in group.trials)
        measured = [runs[trial.number] for trial in group.trials if trial.number in runs]
        is_best = i == 0 and group.scores() and not group.failed
        rows.append(
            [
                tag("th", *names, scope="row"),
                [tag(f"span.state.{state}", state) for state in states],
                tag("b.first" if is_best else "b", result(group)),
                *(short(group.values[key]) for key in keys),
                max(trial.epochs for trial in group.trials),
                time_of(measured[0]) if measured else None,
            ]
        )
    head = ["trial", "", sweep.monitor.replace("_", " "), *keys, "epochs", "time"]
    remark = "The best value of all epochs"
    if "seed" in sweep.spec.keys:
        remark += ", as mean and standard deviation over the seeds"
    if sweep.spec.halving:
        remark += ". Stopped: others were better when it paused"
    shown = table(head, rows, "standings")
    return section("Trials", shown, note(f"{remark}."), problems)


def result(group: Group) -> str | None:
    """The mean of a Group, and its spread over the seeds."""
    spread = group.spread()
    spreads = "" if spread is None else f" \N{PLUS-MINUS SIGN} {plain(spread)}"
    return plain(group.mean()) + spreads if group.scores() else None


def short(value: object) -> str:
    """A value of a config as short text."""
    return plain(value) if isinstance(value, float) else cut(text_of(value), 60)


def coordinates(sweep: Sweep, groups: list[Group], order: list[int]) -> Html | None:
    """Parallel coordinates: one axis for each key and one for the metric, each with its values in
    their order, and one line for each Group, which ends before the last axis if it has no value.
    `order` are the trials with curves."""
    keys = groups[0].values if groups else ()
    columns = {key: [group.values[key] for group in groups] for key in keys}
    columns[sweep.monitor] = [group.mean() for group in groups]
    last = len(columns) - 1
    if not last:
        return None
    axes = [in_order(values) for values in columns.values()]
    axes[-1] = in_order([value for value in columns[sweep.monitor] if value == value])
    lines = []
    for i, group in reversed(list(enumerate(groups))):  # the best are drawn last, above the others
        spots = []
        for k, (axis, values) in enumerate(zip(axes, columns.values(), strict=True)):
            height = axis.get(json.dumps(values[i]))
            if height is not None:
                spots.append(f"{round(WIDE * k / last)} {round(HIGH * (1 - height))}")
        first = group.trials[0]
        tint = colour(order.index(first.number) if first.number in order else i)
        style = "line" if i < BOLD else "fine"
        stroke = tag(f"path.curve.{style}", d=f"M{'L'.join(spots)}")
        label = sweep.spec.label(group.values)
        tip = f"{label}: {sweep.monitor} {result(group)}" if group.scores() else label
        names = json.dumps([sweep.label(trial) or trial.name for trial in group.trials])
        lines.append(tag("g", stroke, style=tint, data_names=names, data_tip=tip))
    rules = "".join(f"M{round(WIDE * k / last)} 0V{HIGH}" for k in range(last + 1))
    box = {"viewBox": f"0 0 {WIDE} {HIGH}", "preserveAspectRatio": "none"}
    drawing = tag("svg", tag("path.rule", d=rules), lines, **box, aria_hidden="true")
    names = []
    for k, (name, axis) in enumerate(zip(columns, axes, strict=True)):
        left = f"{100 * k / last:.2f}%"
        names.append(tag("b", name, style=f"left:{left};bottom:100%"))
        for text, height in axis.items():
            if len(axis) <= MARKS or height in (0, 1):
                style = f"left:{left};bottom:{100 * height:.2f}%"
                names.append(tag("span", short(json.loads(text)), style=style))
    figure = tag("figure.chart.parallel", drawing, tag("div.marks", names))
    remark = "Each axis has its values in their order; the lines of the best trials are bold."
    return section("Values and results", figure, note(remark))


def in_order(values: list[Any]) -> dict[str, float]:
    """{JSON text of a value: its height from 0 to 1} of different values, by their size where they
    can be compared, else by their texts."""
    texts = {json.dumps(value): value for value in values}
    try:
        ordered = sorted(texts, key=texts.__getitem__)
    except TypeError:
        ordered = sorted(texts)
    return {text: i / max(1, len(ordered) - 1) for i, text in enumerate(ordered)}
