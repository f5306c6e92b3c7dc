"""Read a run's folder for the report. Any file in it may be missing, incomplete or damaged."""

import json
import math
import os
import re
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from training.options import sign_of
from utils import UserError, quoted
from utils.files import inside, is_count, is_deep, is_number, lines_of, locked, open_file, read_file

SHOWN_LEVELS = 40  # of nesting; a run writes fewer
HEAD, TAIL = 2**16, 2**18  # bytes of train.log that are read, at its start and at its end

# The keys that describe a row; all others are measured values.
ROW_KEYS = {"epoch", "step", "initial", "final", "end_of_epoch", "evaluation", "each_step"}
MOST_BYTES = 2**28  # of a metrics.jsonl
MOST_NAMES = 10_000  # after which new ones are left out


class Curve(NamedTuple):
    """Values by step; NaN where a value is missing."""

    steps: Float[np.ndarray, "points"]
    values: Float[np.ndarray, "points"]


class Column(NamedTuple):
    """A Curve while its file is read."""

    steps: "array[float]"
    values: "array[float]"


class Columns(NamedTuple):
    """The columns of a file while it is read, by name."""

    each_step: dict[str, Column]
    within: dict[str, Column]  # log lines within epochs
    epochs: dict[str, Column]  # ends of epochs, and evaluations


@dataclass
class Metrics:
    """The columns of metrics.jsonl."""

    # by name: of single steps, or else of log lines within epochs
    within: dict[str, Curve] = field(default_factory=dict)
    epochs: dict[str, Curve] = field(default_factory=dict)  # of epochs and of evaluations
    epoch_at: dict[int, int] = field(default_factory=dict)  # {step: the epoch that ended with it}
    epoch_of: dict[int, int] = field(default_factory=dict)  # {step of one of `epochs`: its epoch}
    initial: dict[str, float] = field(default_factory=dict)  # before the first step
    final: dict[str, float] = field(default_factory=dict)  # of the test after training
    tested: str = ""  # the checkpoint of that test
    last_step: int = 0
    problem: str | None = None

    def finest(self, name: str) -> Curve:
        """The Curve with the most points, for values that mean the same within and after epochs."""
        return self.within.get(name) or self.epochs.get(name) or Curve(np.empty(0), np.empty(0))

    def coarsest(self, name: str) -> Curve | None:
        """The Curve of the ends of epochs, or else the one within epochs, or None."""
        return self.epochs.get(name) or self.within.get(name)

    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.epochs, *self.within, *self.initial]))

    def sets(self) -> list[str]:
        """The datasets that were measured (each has a loss), the training set first."""
        losses = [name for name in self.names() if name.endswith("_loss") and name.count("_") == 1]
        sets = [name.removesuffix("_loss") for name in losses]
        return sorted(sets, key=lambda name: name != "train")

    def by_metric(self) -> dict[str, list[str]]:
        """{metric: [its sets]}, the loss first."""
        sets_of = {"loss": []}
        for set_name in self.sets():
            for name in self.names():
                if name.startswith(f"{set_name}_") and "/" not in name:
                    sets_of.setdefault(name.split("_", 1)[1], []).append(set_name)
        return {metric: sets for metric, sets in sets_of.items() if sets}

    def pairs(self) -> list[tuple[str, str]]:
        """[(set, metric)], the loss first."""
        return [(name, metric) for metric, sets in self.by_metric().items() for name in sets]


def read_metrics(path: Path) -> Metrics:
    """The columns of a metrics.jsonl; damaged lines are skipped."""
    metrics, columns, broken, complete, size = Metrics(), Columns({}, {}, {}), 0, True, 0
    try:
        for line in lines_of(inside(path.parent, path.name)):
            complete, size = line.endswith(b"\n"), size + len(line)
            if size > MOST_BYTES:
                metrics.problem = f"{path.name} is too large; only its beginning is shown"
                break
            try:
                add_row(metrics, columns, json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError):
                broken += bool(line.strip())
    except FileNotFoundError:
        metrics.problem = f"there is no {path.name}: nothing has been measured yet"
    except OSError as error:
        metrics.problem = f"{path.name} cannot be read: {error.strerror}"
    if broken > 1:
        metrics.problem = f"{broken} lines of {path.name} cannot be read and are left out"
    elif broken and complete:  # an incomplete last line may be one that is being written
        metrics.problem = f"1 line of {path.name} cannot be read and is left out"
    metrics.within = in_order(columns.within | columns.each_step)
    metrics.epochs = in_order(columns.epochs)
    return metrics


def add_row(metrics: Metrics, columns: Columns, row: dict[str, Any]) -> None:
    """Add one row of metrics.jsonl to the columns."""
    epoch, step = row["epoch"], row["step"]
    if not is_count(epoch) or not is_count(step):
        raise ValueError("a row without its place")
    values = {name: number(value) for name, value in row.items() if name not in ROW_KEYS}
    values = {name: value for name, value in values.items() if value is not None}
    metrics.last_step = max(metrics.last_step, step)
    if row.get("initial") or row.get("final"):
        known = metrics.initial if row.get("initial") else metrics.final
        known.update({name: value for name, value in values.items() if math.isfinite(value)})
        metrics.tested = str(row["final"]) if row.get("final") else metrics.tested
        return
    own = columns.each_step if row.get("each_step") else columns.within
    if row.get("evaluation") or row.get("end_of_epoch"):
        own, metrics.epoch_of[step] = columns.epochs, epoch
    if row.get("end_of_epoch"):
        metrics.epoch_at[step] = epoch
    for name, value in values.items():
        if name not in own:
            if len(own) > MOST_NAMES:
                continue
            own[name] = Column(array("d"), array("d"))
        own[name].steps.append(step)
        own[name].values.append(value)


def number(value: Any) -> float | None:
    """A float; NaN for null and for what is too large or not finite; None for anything else."""
    if is_number(value):
        return float(value)
    return math.nan if value is None or type(value) in (int, float) else None


def in_order(columns: dict[str, Column]) -> dict[str, Curve]:
    """{name: Curve} with ascending steps; of two values for one step, the later one counts."""
    curves = {}
    for name, column in columns.items():
        steps, last = np.unique(np.array(column.steps)[::-1], return_index=True)
        curves[name] = Curve(steps, np.array(column.values)[::-1][last])
    return curves


class Best(NamedTuple):
    """The best value of a metric, and when it was measured."""

    value: float
    epoch: int
    step: int


class File(NamedTuple):
    """The object in a JSON file, and what is wrong with the file, if anything."""

    value: dict[str, Any]
    problem: str | None


class Log(NamedTuple):
    """What train.log says about a run."""

    began: str | None
    ended: str | None
    parameters: int | None
    memory: str | None
    warnings: list[str]


@dataclass
class Run:
    """A run as its folder shows it."""

    folder: Path
    title: str
    name: str
    state: str  # finished, running or stopped
    config: File
    environment: File
    metrics: Metrics
    log: Log
    label: str = ""  # its name among the runs of a page

    def best(self, name: str) -> Best | None:
        """The Best of a metric, or None if it is unknown."""
        sign = direction(name, self.config.value)
        curve = self.metrics.epochs.get(name)
        if sign is None or curve is None or not np.isfinite(curve.values).any():
            return None
        at = int(np.nanargmin(sign * curve.values))
        step = int(curve.steps[at])
        return Best(float(curve.values[at]), self.metrics.epoch_of[step], step)

    def latest(self, name: str) -> float:
        """The value at the end of the last epoch, or else of the last line within an epoch."""
        curve = self.metrics.coarsest(name)
        return math.nan if curve is None else float(curve.values[-1])

    def seconds(self, name: str = "seconds") -> float | None:
        """The sum of a duration over all epochs, or None."""
        curve = self.metrics.epochs.get(name)
        return None if curve is None else float(np.nansum(curve.values))


def read_run(folder: str | Path) -> Run:
    """The Run in a folder, however damaged its files are; UserError if it is not a run's."""
    folder = Path(folder)
    if not folder.is_dir():
        message = "there is no such folder; name the folder of a run: saved/<title>/<run>"
        raise UserError(f"{folder}: {message}")
    files = ("config.json", "metrics.jsonl", "environment.json")
    if not any((folder / name).exists() for name in files):
        configs = [*folder.glob("*/config.json"), *folder.glob("*/*/config.json")]
        runs = sorted(path.parent for path in configs)
        hint = f"did you mean {quoted(runs[-1])}?" if runs else "name one: saved/<title>/<run>"
        message = "is not the folder of a run, since it holds neither config.json nor metrics.jsonl"
        raise UserError(f"{folder}: {message}; {hint}")
    config, real = read_json(folder / "config.json"), folder.resolve()
    title = config.value.get("title")
    return Run(
        folder=folder,
        title=title if isinstance(title, str) and title else real.parent.name or real.name,
        name=real.name,
        state=state_of(folder),
        config=config,
        environment=read_json(folder / "environment.json"),
        metrics=read_metrics(folder / "metrics.jsonl"),
        log=read_log(folder / "train.log"),
    )


def read_json(path: Path) -> File:
    """The File of a path; its value is empty if the file cannot be read."""
    try:
        value = json.loads(read_file(unlinked(path)))
    except FileNotFoundError:
        return File({}, f"there is no {path.name}")
    except OSError as error:
        return File({}, f"{path.name} cannot be read: {error.strerror}")
    except (ValueError, RecursionError):
        return File({}, f"{path.name} cannot be read: it is incomplete or not JSON")
    if is_deep(value, SHOWN_LEVELS):
        return File({}, f"{path.name} is nested too deeply to be shown")
    if not isinstance(value, dict):
        return File({}, f"{path.name} cannot be read: it does not hold a JSON object")
    return File(value, None)


def unlinked(path: Path) -> Path:
    """The path of a file, or of one in pictures/, in the folder of a run; Unreadable if it is a
    link, since a page that is passed on must not show a file from elsewhere."""
    folder = path.parent
    if folder.name == "pictures":
        return inside(folder.parent, "pictures", path.name)
    return inside(folder, path.name)


def picture_files(folder: Path, pattern: str) -> list[Path]:
    """The files in pictures/ of the folder of a run; none if it is a link."""
    pictures = folder / "pictures"
    return [] if pictures.is_symlink() else sorted(pictures.glob(pattern))


def read_log(path: Path) -> Log:
    """When a run began and ended, its parameters, its memory and its warnings, from the beginning
    and the end of train.log."""
    text = b""
    with suppress(OSError), open_file(unlinked(path)) as file:
        text, rest = file.read(HEAD), path.stat().st_size - TAIL
        text += b"\n" if rest > HEAD else b""  # then the lines between them are left out
        file.seek(max(HEAD, rest))
        text += file.read(TAIL)
    text = text.decode(errors="replace")
    times = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", text)
    parameters = re.search(r"The model has (\d{1,18}) parameters", text)
    memory = re.findall(r" - Peak memory: (.{1,100})", text)
    warning = re.compile(r"\[\S+ (WARNING|ERROR|CRITICAL)\]")
    return Log(
        began=times[0] if times else None,
        ended=times[-1] if times else None,
        parameters=int(parameters[1]) if parameters else None,
        memory=memory[-1] if memory else None,
        warnings=[line for line in text.splitlines() if warning.match(line)],
    )


def state_of(folder: Path) -> str:
    """Whether a run is finished, running or stopped."""
    if (folder / "finished.json").exists():
        return "finished"
    try:
        os.close(locked(folder, shared=True))
    except BlockingIOError:  # the process that trains holds the lock
        return "running"
    return "stopped"


def direction(name: str, config: dict[str, Any]) -> int | None:
    """1 where lower values of a metric are better, -1 where higher ones are, None if unknown."""
    checkpoint = config.get("checkpoint")
    options = checkpoint if isinstance(checkpoint, dict) else {}
    mode = options.get("mode")
    if options.get("monitor") == name and mode in ("min", "max"):
        return 1 if mode == "min" else -1
    with suppress(UserError):
        return sign_of(name, "auto", name)
