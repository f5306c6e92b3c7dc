"""Read a run's folder for the report. Any file in it may be missing, incomplete or damaged."""

import json
import math
import os
import re
from collections import namedtuple
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from training.options import sign_of
from training.report.rows import Metrics, read_metrics
from utils import UserError, quoted
from utils.files import inside, is_deep, locked, open_file, read_file

SHOWN_LEVELS = 40  # of nesting; a run writes fewer
HEAD, TAIL = 2**16, 2**18  # bytes of train.log that are read, at its start and at its end


Best = namedtuple("Best", ("value", "epoch", "step"))  # the end of the epoch with the best value


class File(NamedTuple):
    """The object in a JSON file, and what is wrong with the file, if anything."""

    value: dict
    problem: str | None


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
    log: dict  # from train.log: began, ended, parameters, memory, warnings
    label: str = ""  # its name among the runs of a page

    def best(self, name):
        """The Best of a metric, or None if it is unknown."""
        sign = direction(name, self.config.value)
        curve = self.metrics.epochs.get(name)
        if sign is None or curve is None or not np.isfinite(curve.values).any():
            return None
        at = int(np.nanargmin(sign * curve.values))
        step = int(curve.steps[at])
        return Best(float(curve.values[at]), self.metrics.epoch_of[step], step)

    def latest(self, name):
        """The value at the end of the last epoch, or else of the last line within an epoch."""
        curve = self.metrics.coarsest(name)
        return math.nan if curve is None else float(curve.values[-1])

    def seconds(self, name="seconds"):
        """The sum of a duration over all epochs, or None."""
        curve = self.metrics.epochs.get(name)
        return None if curve is None else float(np.nansum(curve.values))


def read_run(folder):
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


def read_json(path):
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


def unlinked(path):
    """The path of a file, or of one in pictures/, in the folder of a run; Unreadable if it is a
    link, since a page that is passed on must not show a file from elsewhere."""
    folder = path.parent
    if folder.name == "pictures":
        return inside(folder.parent, "pictures", path.name)
    return inside(folder, path.name)


def picture_files(folder, pattern):
    """The files in pictures/ of the folder of a run; none if it is a link."""
    pictures = folder / "pictures"
    return [] if pictures.is_symlink() else sorted(pictures.glob(pattern))


def read_log(path):
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
    return {
        "began": times[0] if times else None,
        "ended": times[-1] if times else None,
        "parameters": int(parameters[1]) if parameters else None,
        "memory": memory[-1] if memory else None,
        "warnings": [line for line in text.splitlines() if warning.match(line)],
    }


def state_of(folder):
    """Whether a run is finished, running or stopped."""
    if (folder / "finished.json").exists():
        return "finished"
    try:
        os.close(locked(folder, shared=True))
    except BlockingIOError:  # the process that trains holds the lock
        return "running"
    return "stopped"


def direction(name, config):
    """1 where lower values of a metric are better, -1 where higher ones are, None if unknown."""
    checkpoint = config.get("checkpoint")
    monitored = isinstance(checkpoint, dict) and checkpoint.get("monitor") == name
    if monitored and checkpoint.get("mode") in ("min", "max"):
        return 1 if checkpoint["mode"] == "min" else -1
    with suppress(UserError):
        return sign_of(name, "auto", name)
