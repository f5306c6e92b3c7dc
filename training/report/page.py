"""report.html: a page about a run, or several side by side, complete in itself and safe to open whatever the run wrote."""

import base64
import hashlib
from pathlib import Path

from training.report.charts import axis
from training.report.compare import comparison_header, differences, label_runs, standings
from training.report.curves import curves
from training.report.facts import configuration, environment, files, glance, header
from training.report.markup import Html, data, empty, tag
from training.report.mistakes import first_batch, mistakes
from training.report.read import read_run
from utils import UserError, atomic_write

HERE = Path(__file__).parent
EPOCHS = 5000  # with more, pointing at a chart tells the step alone


def write_report(folders, target=None):
    """Write the page about one run, report.html, or several, comparison.html, into the first one's folder; answers its path."""
    folders = [
        Path(folder) for folder in ([folders] if isinstance(folders, str | Path) else folders)
    ]
    if not folders:
        raise UserError("a report of which run? Name its folder, as saved/<title>/<run>")
    runs = [read_run(folder) for folder in folders]
    label_runs(runs)
    target = Path(
        target or folders[0] / ("report.html" if len(folders) == 1 else "comparison.html")
    )
    atomic_write(target, page(runs, target).encode(errors="replace"))
    return target


def page(runs, target):
    """The whole document."""
    steps = axis(runs)
    ends = (
        sorted(runs[0].metrics.numbers)
        if len(runs) == 1 and len(runs[0].metrics.numbers) <= EPOCHS
        else []
    )
    body = single(runs[0], steps, target) if len(runs) == 1 else several(runs, steps, target)
    title = " \N{MIDDLE DOT} ".join(
        [runs[0].title, runs[0].name] if len(runs) == 1 else [run.label for run in runs[:4]]
    )
    script = HERE.joinpath("script.js").read_text()
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    head = tag(
        "head",
        empty("meta", charset="utf-8"),
        empty(
            "meta", http_equiv="Content-Security-Policy", content=policy
        ),  # this script alone runs, and nothing is fetched
        empty("meta", name="viewport", content="width=device-width, initial-scale=1"),
        empty("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(HERE.joinpath("style.css").read_text())),
    )
    tip = tag("div", id="tip", role="status", hidden=True)
    ends = tag("div", data(ends), id="ends", hidden=True)
    return "<!doctype html>\n" + tag(
        "html",
        head,
        tag("body", tag("main", body), tip, ends, tag("script", Html(script))),
        lang="en",
    )


def single(run, steps, target):
    """What there is to say of one run."""
    return [
        header(run),
        glance(run),
        curves([run], steps),
        mistakes(run),
        first_batch(run),
        configuration(run),
        environment(run),
        files(run, target),
    ]


def several(runs, steps, target):
    """What there is to say of runs side by side."""
    return [
        comparison_header(runs),
        standings(runs, target),
        curves(runs, steps),
        differences(runs),
    ]
