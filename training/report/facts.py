"""The parts of the page in words and tables: numbers at a glance, config, environment, files."""

import json
from collections.abc import Mapping
from contextlib import suppress
from os.path import realpath
from pathlib import Path
from urllib.parse import quote

import numpy as np
from jaxtyping import Float

from training.report.markup import (
    DOT,
    Html,
    definitions,
    duration,
    folded,
    headline,
    note,
    plain,
    section,
    table,
    tag,
)
from training.report.read import File, Run, picture_files
from utils import format_bytes, relative_path

TILES = 8
FILES = 200  # that are linked
WARNINGS = 30  # that are shown
UNCOMPARED = ("$schema", "title")  # keys that do not count as a difference between runs


def header(run: Run) -> Html:
    """The top of a page about one run."""
    began, ended = run.log.began, run.log.ended
    times = f"{began} to {ended}" if began and ended else None
    subtitle = DOT.join(filter(None, [run.name, times, model_and_data(run)]))
    return headline([run.title, " ", state(run)], subtitle)


def state(run: Run) -> Html:
    return tag(f"span.state.{run.state}", run.state)


def model_and_data(run: Run) -> str | None:
    """What was trained on what, or None if the config does not name both."""
    parts = [run.config.value.get(kind) for kind in ("model", "data")]
    names = [part.get("name") if isinstance(part, dict) else part for part in parts]
    names = [name for name in names if isinstance(name, str) and name]
    return " on ".join(names) if len(names) == len(parts) else None


def glance(run: Run) -> Html:
    """The numbers that a reader looks for first."""
    metrics, last_first = run.metrics, run.metrics.sets()[::-1].index
    pairs = sorted(metrics.pairs(), key=lambda pair: (last_first(pair[0]), pair[1] == "loss"))
    tiles = [best_tile(run, f"{name}_{metric}") for name, metric in pairs if name != "train"]
    tiles = list(filter(None, tiles))
    for name, value in sorted(metrics.final.items(), key=lambda item: item[0].endswith("_loss")):
        tested = metrics.tested.removeprefix("checkpoint-").replace("_", " ")
        tiles.append(tile(f"final {name}", value, f"after training, of {tested}"))
    row = tag("div.tiles", tiles[:TILES]) if tiles else None
    return tag("section.glance", row, strip(run), warnings(run))


def best_tile(run: Run, name: str) -> Html | None:
    """The best value of a metric, and its last."""
    if (best := run.best(name)) is None:
        return None
    steps, values = run.metrics.epochs[name]
    when = ", the last" if best.step == steps[-1] else f"; last {plain(float(values[-1]))}"
    return tile(f"best {name}", best.value, f"epoch {best.epoch}{when}")


def tile(name: str, value: float, remark: str) -> Html:
    label = tag("span.label", name.replace("_", " "))
    return tag("div.tile", label, tag("b", plain(value)), tag("small", remark))


def strip(run: Run) -> Html:
    """The length, size and speed of a run."""
    training, waiting = run.config.value.get("training"), finite_values(run, "waiting")
    epochs = training.get("epochs") if isinstance(training, dict) else None
    facts = {
        "epochs": epochs_done(run) + (f" of {epochs:,}" if isinstance(epochs, int) else ""),
        "steps": f"{run.metrics.last_step:,}",
        "parameters": parameters(run),
        "training time": time_of(run),
        "throughput": throughput(run),
        # The share of the time in which nothing was computed because data was not ready yet.
        "waiting for data": f"{round(100 * waiting.mean(), 1):g}%" if len(waiting) else None,
        "peak memory": run.log.memory,
    }
    return definitions("strip", [(name, value) for name, value in facts.items() if value])


def epochs_done(run: Run) -> str:
    return f"{max(run.metrics.epoch_at.values(), default=0):,}"


def parameters(run: Run) -> str | None:
    """The number of parameters as text, or None."""
    return f"{run.log.parameters:,}" if run.log.parameters else None


def time_of(run: Run) -> str | None:
    """How long all epochs took, and how much of that was compilation."""
    seconds, compiling = run.seconds(), run.seconds("compile_seconds")
    if seconds is None:
        return None
    of_which = f" ({duration(compiling)} compiling)" if compiling and compiling >= 0.1 else ""
    return duration(seconds) + of_which


def throughput(run: Run) -> str | None:
    """The usual speed: the median, since the first epoch compiles."""
    for unit in ("tokens", "examples"):
        if len(rates := finite_values(run, f"{unit}_per_second")):
            mfu = finite_values(run, "mfu")
            share = f" (MFU {np.median(mfu):.1%})" if len(mfu) else ""
            return f"{plain(float(np.median(rates)))} {unit}/s{share}"
    return None


def finite_values(run: Run, name: str) -> Float[np.ndarray, "points"]:
    curve = run.metrics.coarsest(name)
    return curve.values[np.isfinite(curve.values)] if curve else np.empty(0)


def warnings(run: Run) -> Html | None:
    """The warnings in train.log."""
    if not (lines := run.log.warnings):
        return None
    left = [f"{len(lines) - WARNINGS} earlier ones are left out"] if len(lines) > WARNINGS else []
    text = tag("pre", "\n".join([*left, *(line[:500] for line in lines[-WARNINGS:])]))
    return folded(f"{len(lines)} warning{'s' * (len(lines) > 1)} in train.log", text)


def configuration(run: Run) -> Html:
    """The config, with a line for each part, and as a whole."""
    whole = tag("pre", json.dumps(run.config.value, indent=2, ensure_ascii=False))
    return object_section("Config", run.config, folded("config.json", whole))


def environment(run: Run) -> Html:
    """The machine and the software on which the run ran."""
    facts, fault = run.environment
    if isinstance(facts.get("command"), list):
        facts = facts | {"command": " ".join(map(str, facts["command"]))}
    return object_section("Environment", File(facts, fault))


def object_section(title: str, file: File, *more: object) -> Html:
    """The entries of a JSON file, or why it cannot be read."""
    if file.problem:
        return section(title, tag("p.problem", file.problem))
    known = {key: value for key, value in file.value.items() if value not in ("", None)}
    rows = [(key, as_call(value)) for key, value in known.items() if key != "$schema"]
    return section(title, definitions("facts", rows), *more)


def as_call(value: object) -> str:
    """A value of a JSON file in one line; a named part of a config as a call."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return f"[{', '.join(map(as_call, value))}]"
    if not isinstance(value, dict):
        return json.dumps(value)
    name, args = value.get("name"), value.get("args", {})
    if isinstance(name, str) and isinstance(args, dict) and value.keys() <= {"name", "args"}:
        return f"{name}({assignments(args)})"
    return f"{{{assignments(value)}}}"


def assignments(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={as_call(value)}" for key, value in values.items())


def files(run: Run, target: Path) -> Html:
    """Links to the files in the run's folder."""
    paths = [*sorted(run.folder.glob("*")), *picture_files(run.folder, "*")]
    hidden, rows = realpath(target), []  # unlike Path.resolve, it does not fail at circular links
    paths = [p for p in paths if not p.name.startswith(".") and realpath(p) != hidden]
    for path in paths[:FILES]:
        name = f"{path.relative_to(run.folder)}{'/' * path.is_dir()}"
        size = None
        with suppress(OSError):  # a run that trains deletes checkpoints
            size = format_bytes(path.stat().st_size) if path.is_file() else None
        rows.append([link(path, name, target), size])
    more = note(f"and {len(paths) - FILES} more") if len(paths) > FILES else None
    return section("Files", table(["file", "size"], rows), more)


def link(path: Path, text: str, target: Path) -> Html:
    """A relative link, so that it still works after the whole folder is moved."""
    relative = Path(relative_path(path, target.parent)).as_posix()
    return tag("a", text, href=quote(f"./{relative}", errors="surrogateescape"))
