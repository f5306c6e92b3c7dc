"""The parts of the page in words and tables: numbers at a glance, config, environment, files."""

import json
import os
from pathlib import Path
from urllib.parse import quote

import numpy as np

from training.report.markup import folded, section, table, tag
from training.report.numbers import duration, plain
from utils import format_bytes

TILES = 8
FILES = 200  # that are linked
WARNINGS = 30  # that are shown
SAYS_NOTHING = ("$schema", "title")  # of how runs differ


def header(run):
    """The headline of a single run."""
    began, ended = run.log["began"], run.log["ended"]
    day = (
        11 if began and ended and began[:11] == ended[:11] else 0
    )  # told once where it is the same
    times = f"{began} to {ended[day:]}" if began and ended else None
    return tag(
        "header",
        tag("p", "Rawtree \N{MIDDLE DOT} run report", class_="eyebrow"),
        tag("h1", run.title, " ", state(run)),
        tag(
            "p",
            " \N{MIDDLE DOT} ".join(filter(None, [run.name, times, describe(run)])),
            class_="muted",
        ),
    )


def state(run):
    return tag("span", run.state, class_=f"state {run.state}")


def describe(run):
    """What was trained on what, as far as the config tells."""
    names = [name_of(run.config.value.get(kind)) for kind in ("model", "data")]
    return " on ".join(names) if all(names) else None


def name_of(part):
    """The name of a part of the config."""
    name = part.get("name") if isinstance(part, dict) else part
    return name if isinstance(name, str) else None


def glance(run):
    """The numbers that one looks for first."""
    metrics = run.metrics
    held_out = [
        (of, metric) for metric, sets in metrics.metrics().items() for of in sets if of != "train"
    ]
    held_out.sort(key=lambda pair: (metrics.sets()[::-1].index(pair[0]), pair[1] == "loss"))
    tiles = [tile for of, metric in held_out if (tile := best_tile(run, of, metric))]
    tiles += [
        final_tile(run, name, value)
        for name, value in sorted(metrics.final.items(), key=lambda pair: pair[0].endswith("_loss"))
    ]
    across = len(tiles) if len(tiles) in (5, 6) else 4
    return tag(
        "section",
        tag("div", tiles[:TILES], class_="tiles", style=f"--n:{across}") if tiles else None,
        strip(run),
        warnings(run),
        class_="glance",
    )


def best_tile(run, of, metric):
    """The best value of a metric, and its last."""
    best = run.best(f"{of}_{metric}")
    if best is None:
        return None
    value, epoch = best
    curve = run.metrics.epochs[f"{of}_{metric}"]
    at_last = epoch == run.metrics.numbers.get(int(curve.steps[-1]))
    when = (
        f"epoch {epoch}, the last"
        if at_last
        else f"epoch {epoch}; last {plain(float(curve.values[-1]))}"
    )
    return tile(f"best {of} {metric.replace('_', ' ')}", value, when)


def final_tile(run, name, value):
    """A value of the test after training."""
    tested = run.metrics.tested.removeprefix("checkpoint-").replace("_", " ")
    return tile(f"final {name.replace('_', ' ')}", value, f"after training, of {tested}")


def tile(label, value, note):
    return tag(
        "div",
        tag("span", label, class_="label"),
        tag("b", plain(value)),
        tag("small", note),
        class_="tile",
    )


def strip(run):
    """Length, size and speed of a run."""
    metrics, size = run.metrics, parameters(run)
    epochs = run.config.value.get("training")
    epochs = epochs.get("epochs") if isinstance(epochs, dict) else None
    done = max(metrics.numbers.values(), default=0)
    pairs = {
        "epochs": f"{done:,} of {epochs:,}" if isinstance(epochs, int) else f"{done:,}",
        "steps": f"{metrics.last:,}",
        "parameters": f"{size:,}" if size else None,
        "training time": time_of(run),
        "throughput": throughput(run),
        "waiting for data": waiting(run),
        "peak memory": run.log["memory"],
    }
    return tag(
        "dl",
        [tag("div", tag("dt", key), tag("dd", value)) for key, value in pairs.items() if value],
        class_="strip",
    )


def parameters(run):
    """The number of parameters."""
    facts = run.environment.value.get("facts")
    told = facts.get("parameters") if isinstance(facts, dict) else None
    return told if isinstance(told, int) else run.log["parameters"]


def time_of(run):
    """How long all epochs took, and how much of it was compilation."""
    seconds, compiling = run.seconds(), run.seconds("compile_seconds")
    if seconds is None:
        return None
    return duration(seconds) + (
        f" ({duration(compiling)} compiling)" if compiling and compiling >= 0.1 else ""
    )


def throughput(run):
    """The usual speed: the median, since the first epoch compiles."""
    curve = run.metrics.epochs.get("examples_per_second") or run.metrics.fine("examples_per_second")
    return (
        f"{plain(float(np.nanmedian(curve.values)))} examples/s"
        if curve and np.isfinite(curve.values).any()
        else None
    )


def waiting(run):
    """The share of the time in which nothing was computed, since data had not come yet."""
    curve = run.metrics.epochs.get("waiting") or run.metrics.fine("waiting")
    return (
        f"{round(100 * np.nanmean(curve.values), 1):g}%"
        if curve and np.isfinite(curve.values).any()
        else None
    )


def warnings(run):
    """What train.log warns of."""
    lines = run.log["warnings"]
    if not lines:
        return None
    left = f"\nand {len(lines) - WARNINGS} more" if len(lines) > WARNINGS else ""
    text = tag("pre", "\n".join(line[:500] for line in lines[-WARNINGS:]) + left)
    return folded(f"{len(lines)} warning{'s' * (len(lines) > 1)} in train.log", text)


def configuration(run):
    """The config, a line for each part, and whole."""
    if run.config.problem:
        return section("Config", tag("p", run.config.problem, class_="problem"))
    rows = [(key, as_call(value)) for key, value in run.config.value.items() if key != "$schema"]
    whole = folded(
        "config.json", tag("pre", json.dumps(run.config.value, indent=2, ensure_ascii=False))
    )
    return section("Config", definitions(rows), whole)


def as_call(value):
    """A value of a config in one line; a named part as the call that it is."""
    if (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and value.keys() <= {"name", "args"}
    ):
        arguments = value.get("args")
        told = (
            ", ".join(f"{k}={as_call(v)}" for k, v in arguments.items())
            if isinstance(arguments, dict)
            else ""
        )
        return f"{value['name']}({told})"
    if isinstance(value, dict):
        return ", ".join(f"{key}={as_call(inner)}" for key, inner in value.items()) or "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_call, value))}]"
    return json.dumps(value, ensure_ascii=False)


def definitions(pairs):
    """Names and what they stand for."""
    return tag(
        "dl", [tag("div", tag("dt", key), tag("dd", value)) for key, value in pairs], class_="facts"
    )


def environment(run):
    """Where and on what the run ran."""
    if run.environment.problem:
        return section("Environment", tag("p", run.environment.problem, class_="problem"))
    told = dict(run.environment.value)
    if isinstance(told.get("command"), list):
        told["command"] = " ".join(map(str, told["command"]))
    return section(
        "Environment",
        definitions(
            [(key, in_words(value)) for key, value in told.items() if value not in ("", None)]
        ),
    )


def in_words(value):
    """A value of environment.json without its brackets."""
    if isinstance(value, dict):
        return (
            tag("ul", [tag("li", f"{key}: ", in_words(inner)) for key, inner in value.items()])
            if any(isinstance(inner, dict) for inner in value.values())
            else ", ".join(f"{key} {inner}" for key, inner in value.items())
        )
    if isinstance(value, list):
        return (
            " \N{MULTIPLICATION SIGN} ".join(map(str, value))
            if all(isinstance(v, int) for v in value)
            else ", ".join(map(str, value))
        )
    return str(value)


def files(run, target):
    """Links to what is in the run's folder."""
    found = [
        path
        for pattern in ("*", "pictures/*")
        for path in sorted(run.folder.glob(pattern))
        if not path.name.startswith(".")
    ]
    found = [path for path in found if path.resolve() != target.resolve()]
    rows = [
        [link(path, f"{path.relative_to(run.folder)}{'/' * path.is_dir()}", target), size(path)]
        for path in found[:FILES]
    ]
    left = len(found) - len(rows)
    return section(
        "Files",
        table(["file", "size"], rows, class_="files"),
        tag("p", f"and {left} more", class_="note") if left > 0 else None,
    )


def link(path, text, target):
    """A link that goes on working where the folder is moved with all that is in it."""
    relative = Path(os.path.relpath(path, target.parent)).as_posix()
    return tag("a", text, href=quote(f"./{relative}", errors="surrogateescape"))


def size(path):
    try:
        return format_bytes(path.stat().st_size) if path.is_file() else None
    except OSError:
        return None
