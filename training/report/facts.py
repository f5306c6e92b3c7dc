"""The parts of the page in words and tables: numbers at a glance, config, environment, files."""

import json
import os
from pathlib import Path
from urllib.parse import quote

import numpy as np

from training.report.markup import (
    DOT,
    definitions,
    folded,
    headline,
    note,
    problem,
    section,
    table,
    tag,
)
from training.report.numbers import duration, plain
from utils import format_bytes

TILES = 8
FILES = 200  # that are linked
WARNINGS = 30  # that are shown
UNCOMPARED = ("$schema", "title")  # keys that do not count as a difference between runs


def header(run):
    """The top of a page about one run."""
    began, ended = run.log["began"], run.log["ended"]
    times = None
    if began and ended:
        same_day = began[:11] == ended[:11]
        times = f"{began} to {ended[11:] if same_day else ended}"
    subtitle = DOT.join(filter(None, [run.name, times, model_and_data(run)]))
    return headline([run.title, " ", state(run)], subtitle)


def state(run):
    return tag("span", run.state, class_=f"state {run.state}")


def model_and_data(run):
    """What was trained on what, or None if the config does not name both."""
    parts = [run.config.value.get(kind) for kind in ("model", "data")]
    names = [part.get("name") if isinstance(part, dict) else part for part in parts]
    return " on ".join(names) if all(name and isinstance(name, str) for name in names) else None


def glance(run):
    """The numbers that a reader looks for first."""
    metrics = run.metrics
    last_first = metrics.sets()[::-1].index
    pairs = sorted(metrics.pairs(), key=lambda pair: (last_first(pair[0]), pair[1] == "loss"))
    tiles = [best_tile(run, *pair) for pair in pairs if pair[0] != "train"]
    final = sorted(metrics.final.items(), key=lambda item: item[0].endswith("_loss"))
    tiles = [*filter(None, tiles), *(final_tile(run, *item) for item in final)]
    across = len(tiles) if len(tiles) in (5, 6) else 4
    return tag(
        "section",
        tag("div", tiles[:TILES], class_="tiles", style=f"--n:{across}") if tiles else None,
        strip(run),
        warnings(run),
        class_="glance",
    )


def best_tile(run, set_name, metric):
    """The best value of a metric, and its last."""
    best = run.best(f"{set_name}_{metric}")
    if best is None:
        return None
    value, epoch = best
    curve = run.metrics.epochs[f"{set_name}_{metric}"]
    at_last = epoch == run.metrics.epoch_at.get(int(curve.steps[-1]))
    when = ", the last" if at_last else f"; last {plain(float(curve.values[-1]))}"
    return tile(f"best {set_name} {metric.replace('_', ' ')}", value, f"epoch {epoch}{when}")


def final_tile(run, name, value):
    """A value of the test after training."""
    tested = run.metrics.tested.removeprefix("checkpoint-").replace("_", " ")
    return tile(f"final {name.replace('_', ' ')}", value, f"after training, of {tested}")


def tile(label, value, remark):
    return tag(
        "div",
        tag("span", label, class_="label"),
        tag("b", plain(value)),
        tag("small", remark),
        class_="tile",
    )


def strip(run):
    """The length, size and speed of a run."""
    metrics, size, training = run.metrics, parameters(run), run.config.value.get("training")
    epochs = training.get("epochs") if isinstance(training, dict) else None
    done = max(metrics.epoch_at.values(), default=0)
    share = mean_waiting(run)
    facts = {
        "epochs": f"{done:,} of {epochs:,}" if isinstance(epochs, int) else f"{done:,}",
        "steps": f"{metrics.last_step:,}",
        "parameters": f"{size:,}" if size else None,
        "training time": time_of(run),
        "throughput": throughput(run),
        "waiting for data": None if share is None else f"{round(100 * share, 1):g}%",
        "peak memory": run.log["memory"],
    }
    return definitions([(name, value) for name, value in facts.items() if value], "strip")


def parameters(run):
    """The number of parameters."""
    facts = run.environment.value.get("facts")
    number = facts.get("parameters") if isinstance(facts, dict) else None
    return number if isinstance(number, int) else run.log["parameters"]


def time_of(run):
    """How long all epochs took, and how much of that was compilation."""
    seconds, compiling = run.seconds(), run.seconds("compile_seconds")
    if seconds is None:
        return None
    of_which = f" ({duration(compiling)} compiling)" if compiling and compiling >= 0.1 else ""
    return duration(seconds) + of_which


def throughput(run):
    """The usual speed: the median, since the first epoch compiles."""
    rates = finite_values(run, "examples_per_second")
    return f"{plain(float(np.median(rates)))} examples/s" if len(rates) else None


def mean_waiting(run):
    """The share of the time in which nothing was computed because data was not ready yet."""
    shares = finite_values(run, "waiting")
    return np.mean(shares) if len(shares) else None


def finite_values(run, name):
    """The finite values of a name."""
    curve = run.metrics.coarsest(name)
    return curve.values[np.isfinite(curve.values)] if curve else np.empty(0)


def warnings(run):
    """The warnings in train.log."""
    lines = run.log["warnings"]
    if not lines:
        return None
    left = f"\nand {len(lines) - WARNINGS} more" if len(lines) > WARNINGS else ""
    text = tag("pre", "\n".join(line[:500] for line in lines[-WARNINGS:]) + left)
    return folded(f"{len(lines)} warning{'s' * (len(lines) > 1)} in train.log", text)


def configuration(run):
    """The config, with a line for each part, and as a whole."""
    config, fault = run.config
    if fault:
        return section("Config", problem(fault))
    rows = [(key, as_call(value)) for key, value in config.items() if key != "$schema"]
    whole = tag("pre", json.dumps(config, indent=2, ensure_ascii=False))
    return section("Config", definitions(rows, "facts"), folded("config.json", whole))


def as_call(value):
    """A value of a config in one line; a named part as a call."""
    if isinstance(value, list):
        return f"[{', '.join(map(as_call, value))}]"
    if not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value.get("name"), str) and value.keys() <= {"name", "args"}:
        args = value.get("args")
        return f"{value['name']}({assignments(args) if isinstance(args, dict) else ''})"
    return assignments(value) or "{}"


def assignments(values):
    return ", ".join(f"{key}={as_call(value)}" for key, value in values.items())


def environment(run):
    """Where and on what the run ran."""
    facts, fault = run.environment
    if fault:
        return section("Environment", problem(fault))
    if isinstance(facts.get("command"), list):
        facts = facts | {"command": " ".join(map(str, facts["command"]))}
    rows = [(key, in_words(value)) for key, value in facts.items() if value not in ("", None)]
    return section("Environment", definitions(rows, "facts"))


def in_words(value):
    """A value of environment.json without its brackets."""
    if isinstance(value, dict):
        if any(isinstance(inner, dict) for inner in value.values()):
            return tag("ul", [tag("li", f"{k}: ", in_words(inner)) for k, inner in value.items()])
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    if isinstance(value, list):
        times = " \N{MULTIPLICATION SIGN} " if all(isinstance(v, int) for v in value) else ", "
        return times.join(map(str, value))
    return str(value)


def files(run, target):
    """Links to the files in the run's folder."""
    paths = [*sorted(run.folder.glob("*")), *sorted(run.folder.glob("pictures/*"))]
    hidden = target.resolve()
    paths = [p for p in paths if not p.name.startswith(".") and p.resolve() != hidden]
    rows = [
        [link(path, f"{path.relative_to(run.folder)}{'/' * path.is_dir()}", target), size(path)]
        for path in paths[:FILES]
    ]
    left = len(paths) - len(rows)
    more = note(f"and {left} more") if left else None
    return section("Files", table(["file", "size"], rows, class_="files"), more)


def link(path, text, target):
    """A relative link, so that it still works after the whole folder is moved."""
    relative = Path(os.path.relpath(path, target.parent)).as_posix()
    return tag("a", text, href=quote(f"./{relative}", errors="surrogateescape"))


def size(path):
    try:
        return format_bytes(path.stat().st_size) if path.is_file() else None
    except OSError:
        return None
