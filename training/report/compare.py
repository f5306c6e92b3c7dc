"""The parts of the page that only several runs have: what each reached, and how their configs differ."""

import json

from training.report.charts import COLOURS
from training.report.facts import (
    SAYS_NOTHING,
    as_call,
    link,
    parameters,
    state,
    throughput,
    time_of,
)
from training.report.markup import section, table, tag
from training.report.numbers import plain
from training.report.read import direction

LENGTHS = ("epochs", "parameters", "training time", "throughput")


def label_runs(runs):
    """Give every run the shortest name that no other has: its title, its folder's name, or both with a number."""
    for naming in (
        lambda run: run.title,
        lambda run: run.name,
        lambda run: f"{run.title}/{run.name}",
    ):
        labels = [naming(run) for run in runs]
        if len(set(labels)) == len(runs):
            break
    else:
        labels = [f"{label} ({i})" for i, label in enumerate(labels, 1)]
    for run, label in zip(runs, labels, strict=True):
        run.label = label


def comparison_header(runs):
    """The headline of several runs."""
    titles = list(dict.fromkeys(run.title for run in runs))
    title = " \N{MIDDLE DOT} ".join(
        [*titles[:4], *(["\N{HORIZONTAL ELLIPSIS}"] if len(titles) > 4 else [])]
    )
    return tag(
        "header",
        tag("p", "Rawtree \N{MIDDLE DOT} run report", class_="eyebrow"),
        tag("h1", title),
        tag("p", f"{len(runs)} runs side by side", class_="muted"),
    )


def standings(runs, target):
    """A table of runs and what they reached by every held-out metric; the best of all stands out."""
    names = dict.fromkeys(name for run in runs for name in held_out(run))
    found = {name: [reached(run, name) for run in runs] for name in names}
    rows = [
        [
            tag(
                "th",
                tag("i", style=f"--c:var(--c{i % COLOURS})", class_="swatch"),
                link(run.folder, run.label, target),
                scope="row",
            ),
            state(run),
            *(value_cell(found[name], i, direction(name, run.config.value)) for name in names),
            f"{max(run.metrics.numbers.values(), default=0):,}",
            f"{parameters(run):,}" if parameters(run) else None,
            time_of(run),
            throughput(run),
        ]
        for i, run in enumerate(runs)
    ]
    head = ["run", "", *(name.replace("_", " ") for name in names), *LENGTHS]
    note = tag(
        "p",
        "The best value and its epoch, or what the test after training found, or the last value.",
        class_="note",
    )
    return section("Runs", table(head, rows, class_="standings"), note)


def held_out(run):
    """The names of a run's metrics but for those of its training set."""
    named = [
        f"{of}_{metric}"
        for metric, sets in run.metrics.metrics().items()
        for of in sets
        if of != "train"
    ]
    return [*named, *run.metrics.final]


def reached(run, name):
    """(a value, which one it is): the best at the end of an epoch, that of the test after training, or the last."""
    if best := run.best(name):
        return best[0], f"epoch {best[1]}"
    if name in run.metrics.final:
        return run.metrics.final[name], "final"
    value = run.latest(name)
    return value, "last" if value == value else None


def value_cell(found, i, sign):
    """A value, marked where no run has a better one."""
    value, which = found[i]
    known = [sign * other for other, _ in found if sign and other == other]
    first = len(known) > 1 and sign * value == min(known)
    told = [
        tag("b", plain(value)) if first else plain(value),
        tag("small", f" {which}") if which else None,
    ]
    return tag("td", told, class_="first" if first else None)


def differences(runs):
    """Every key of the configs that is not the same in all of them."""
    problems = [
        tag("p", f"{run.label}: {run.config.problem}", class_="problem")
        for run in runs
        if run.config.problem
    ]
    configs = [leaves(run.config.value) for run in runs]
    keys = [
        key
        for key in dict.fromkeys(key for config in configs for key in config)
        if key.split(".")[0] not in SAYS_NOTHING
    ]
    rows = [
        [tag("th", key, scope="row"), *(said(config, key) for config in configs)]
        for key in keys
        if differs(configs, key)
    ]
    same = tag("p", "Their configs are the same.", class_="note")
    return section(
        "Differences of the configs",
        problems,
        table(["", *(run.label for run in runs)], rows) if rows else same,
    )


def leaves(value, path=""):
    """{path.to.key: value}; lists are taken whole."""
    if not isinstance(value, dict) or not value:
        return {path: value} if path else {}
    return {
        k: v
        for key, inner in value.items()
        for k, v in leaves(inner, f"{path}.{key}".lstrip(".")).items()
    }


def differs(configs, key):
    return (
        len(
            {
                json.dumps(config.get(key), sort_keys=True) if key in config else None
                for config in configs
            }
        )
        > 1
    )


def said(config, key):
    return as_call(config[key]) if key in config else tag("td", "\N{EM DASH}", class_="muted")
