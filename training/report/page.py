"""Write report.html: one file about a run, or several, safe to open whatever the run wrote."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from training.report.curves import colour, curves
from training.report.facts import (
    UNCOMPARED,
    as_call,
    configuration,
    environment,
    epochs_done,
    files,
    glance,
    header,
    link,
    parameters,
    state,
    throughput,
    time_of,
)
from training.report.markup import DOT, Html, escaped, headline, note, plain, section, table, tag
from training.report.read import Run, direction, read_run
from training.report.written import first_batch, mistakes, pictures, samples
from utils import UserError
from utils.files import atomic_write

TEMPLATE = Path(__file__).with_name("page.html")
LABELS = ("{run.title}", "{run.name}", "{run.title}/{run.name}", "{run.title}/{run.name} ({i})")
LENGTHS = {
    "epochs": epochs_done,
    "parameters": parameters,
    "training time": time_of,
    "throughput": throughput,
}


def write_report(
    folders: str | Path | Iterable[str | Path], target: str | Path | None = None
) -> Path:
    """Write the page about one run (report.html) or several (comparison.html) and return its path.

    Without a target, it is written into the folder of the first run.
    """
    folders = [folders] if isinstance(folders, str | Path) else list(folders)
    if not folders:
        raise UserError("a report needs at least one run; name its folder: saved/<title>/<run>")
    runs = labelled([read_run(folder) for folder in folders])
    name = "report.html" if len(folders) == 1 else "comparison.html"
    target = Path(target or runs[0].folder / name)
    atomic_write(target, page(runs, target).encode(errors="replace"))
    return target


def page(runs: list[Run], target: Path) -> str:
    """The whole document about these runs."""
    run = runs[0]
    if len(runs) == 1:
        parts = [header(run), glance(run), curves(runs), samples(run), mistakes(run)]
        parts += [pictures(run), first_batch(run), configuration(run), environment(run)]
        return document([run.title, run.name], [*parts, files(run, target)])
    parts = [comparison_header(runs), standings(runs, target), curves(runs), differences(runs)]
    return document([run.label for run in runs[:4]], parts)


def document(names: Iterable[str], parts: Iterable[object]) -> str:
    """The template with these names as its title and these parts as its content."""
    template = TEMPLATE.read_text(encoding="utf-8")
    script = template.partition("<script>")[2].partition("</script>")[0]
    values = {
        "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "title": html.escape(DOT.join(names)),
        "body": escaped(parts),
    }
    return re.sub(r"{{(\w+)}}", lambda place: values[place[1]], template)


# Several runs: their best values, and how their configs differ.


def labelled(runs: list[Run]) -> list[Run]:
    """The runs with the shortest labels that are unique: their titles, their names, or both."""
    kinds = ([label.format(run=run, i=i) for i, run in enumerate(runs, 1)] for label in LABELS)
    labels = next(labels for labels in kinds if len(set(labels)) == len(runs))
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def comparison_header(runs: list[Run]) -> Html:
    """The top of a page about several runs."""
    titles = list(dict.fromkeys(run.title for run in runs))
    titles[4:] = ["\N{HORIZONTAL ELLIPSIS}"] if len(titles) > 4 else []
    return headline(DOT.join(titles), f"{len(runs)} runs side by side")


def standings(runs: list[Run], target: Path) -> Html:
    """A table of the runs and their held-out metrics; the best value of all runs stands out."""
    names = dict.fromkeys(name for run in runs for name in held_out(run))
    reached = {name: [value_of(run, name) for run in runs] for name in names}
    rows = []
    for i, run in enumerate(runs):
        swatch = tag("i.swatch", style=colour(i))
        first = tag("th", swatch, link(run.folder, run.label, target), scope="row")
        cells = [value_cell(reached[n], i, direction(n, run.config.value)) for n in names]
        rows.append([first, state(run), *cells, *(fact(run) for fact in LENGTHS.values())])
    head = ["run", "", *(name.replace("_", " ") for name in names), *LENGTHS]
    remark = "The best value and its epoch, or else that of the test after training, or the last."
    return section("Runs", table(head, rows, "standings"), note(remark))


def held_out(run: Run) -> list[str]:
    """The names of a run's metrics, except for the training set."""
    names = [f"{name}_{metric}" for name, metric in run.metrics.pairs() if name != "train"]
    return [*names, *run.metrics.final]


def value_of(run: Run, name: str) -> tuple[float, str | None]:
    """(a value, which one it is): the best of all epochs, that of the final test, or the last."""
    if best := run.best(name):
        return best.value, f"epoch {best.epoch}"
    if name in run.metrics.final:
        return run.metrics.final[name], "final"
    value = run.latest(name)
    return value, "last" if value == value else None


def value_cell(reached: list[tuple[float, str | None]], i: int, sign: int | None) -> Html:
    """The value of run `i`, marked if no run has a better one."""
    value, which = reached[i]
    sign = sign or 0
    known = [sign * other for other, _ in reached if other == other]
    first = sign and len(known) > 1 and sign * value == min(known)
    text = tag("b.first", plain(value)) if first else plain(value)
    return tag("td", text, tag("small", f" {which}") if which else None)


def differences(runs: list[Run]) -> Html:
    """Every key of the configs whose value is not the same in all of them."""
    configs = [leaves(run.config.value) for run in runs]
    rows = []
    for key in dict.fromkeys(key for config in configs for key in config):
        values = {json.dumps(config[key], sort_keys=True) for config in configs if key in config}
        missing = any(key not in config for config in configs)
        if key.split(".")[0] not in UNCOMPARED and len(values) + missing > 1:
            absent = tag("td.muted", "\N{EM DASH}")
            cells = [as_call(config[key]) if key in config else absent for config in configs]
            rows.append([tag("th", key, scope="row"), *cells])
    faulty = [run for run in runs if run.config.problem]
    problems = [tag("p.problem", f"{run.label}: {run.config.problem}") for run in faulty]
    same = note("Their configs are the same.")
    shown = table(["", *(run.label for run in runs)], rows) if rows else same
    return section("Differences of the configs", problems, shown)


def leaves(value: object, path: str = "") -> dict[str, Any]:
    """{path.to.key: value}; a list is one value."""
    if not isinstance(value, dict) or not value:
        return {path: value} if path else {}
    paths = {}
    for key, inner in value.items():
        paths |= leaves(inner, f"{path}.{key}".lstrip("."))
    return paths
