"""Write report.html: one file about a run, or several, safe to open whatever the run wrote."""

import base64
import hashlib
from pathlib import Path

from training.report.compare import comparison_header, differences, label_runs, standings
from training.report.curves import curves
from training.report.facts import configuration, environment, files, glance, header
from training.report.markup import DOT, Html, data, empty, tag
from training.report.mistakes import first_batch, mistakes
from training.report.pictures import pictures
from training.report.read import read_run
from training.report.samples import samples
from utils import UserError
from utils.files import atomic_write

HERE = Path(__file__).parent
EPOCHS = 5000  # with more, pointing at a chart shows the step without the epoch


def write_report(folders, target=None):
    """Write the page about one run (report.html) or several (comparison.html) and return its path.

    Without a target, it is written into the folder of the first run.
    """
    folders = [folders] if isinstance(folders, str | Path) else list(folders)
    if not folders:
        raise UserError("a report needs at least one run; name its folder: saved/<title>/<run>")
    runs = [read_run(folder) for folder in folders]
    label_runs(runs)
    name = "report.html" if len(folders) == 1 else "comparison.html"
    target = Path(target or runs[0].folder / name)
    atomic_write(target, page(runs, target).encode(errors="replace"))
    return target


def page(runs, target):
    """The whole document about these runs."""
    run = runs[0]
    if len(runs) == 1:
        parts = [header(run), glance(run), curves(runs), samples(run), mistakes(run)]
        parts += [pictures(run), first_batch(run), configuration(run), environment(run)]
        parts.append(files(run, target))
        return document([run.title, run.name], parts, sorted(run.metrics.epoch_at))
    parts = [comparison_header(runs), standings(runs, target), curves(runs), differences(runs)]
    return document([run.label for run in runs[:4]], parts)


def document(names, parts, ends=()):
    """A whole document of these names and parts; `ends` are the steps that ended an epoch."""
    script = HERE.joinpath("script.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Only this script runs, and nothing is fetched.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    policy += f"script-src 'sha256-{digest}'"
    head = tag(
        "head",
        empty("meta", charset="utf-8"),
        empty("meta", http_equiv="Content-Security-Policy", content=policy),
        empty("meta", name="viewport", content="width=device-width, initial-scale=1"),
        empty("meta", name="color-scheme", content="light dark"),
        tag("title", DOT.join(names)),
        tag("style", Html(HERE.joinpath("style.css").read_text(encoding="utf-8"))),
    )
    body = tag(
        "body",
        tag("main", parts),
        tag("div", id="tip", role="status", hidden=True),
        tag("div", data(list(ends) if len(ends) <= EPOCHS else []), id="ends", hidden=True),
        tag("script", Html(script)),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en")
