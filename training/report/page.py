"""Write report.html: one file about a run, or several, safe to open whatever the run wrote."""

import base64
import hashlib
import html
import re
from collections.abc import Iterable
from pathlib import Path

from training.report.compare import comparison_header, differences, label_runs, standings
from training.report.curves import curves
from training.report.facts import configuration, environment, files, glance, header
from training.report.markup import DOT, escaped
from training.report.read import Run, read_run
from training.report.written import first_batch, mistakes, pictures, samples
from utils import UserError
from utils.files import atomic_write

TEMPLATE = Path(__file__).with_name("page.html")


def write_report(
    folders: str | Path | Iterable[str | Path], target: str | Path | None = None
) -> Path:
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
