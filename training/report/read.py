"""What a run left in its folder, as far as it can be read. Nothing in there is trusted to be whole, or to be what it should."""

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from training.options import sign_of
from training.report.rows import Metrics, read_metrics
from utils import UserError

LARGEST = 32 * 2**20  # bytes of a JSON file that a page is made from
HEAD, TAIL = 2**16, 2**18  # bytes of train.log that are looked at


class File(NamedTuple):
    """A JSON file's object, and what is wrong with it, if anything is."""

    value: dict
    problem: str | None


@dataclass
class Run:
    """A run, from its folder."""

    folder: Path
    title: str
    name: str
    state: str  # finished, running or stopped
    config: File
    environment: File
    metrics: Metrics
    log: dict  # what train.log tells: began, ended, parameters, warnings
    label: str = ""  # its name among the runs of a page

    def best(self, name):
        """(the best value at the end of an epoch, that epoch), or None where nobody knows what is good."""
        sign = direction(name, self.config.value)
        curve = self.metrics.epochs.get(name)
        if sign is None or curve is None or not np.isfinite(curve.values).any():
            return None
        at = int(np.nanargmin(sign * curve.values))
        return float(curve.values[at]), self.metrics.numbers.get(int(curve.steps[at]))

    def latest(self, name):
        """The value at the end of the last epoch, or of the last line within one."""
        for curve in (self.metrics.epochs.get(name), self.metrics.fine(name)):
            if curve is not None and len(curve.values):
                return float(curve.values[-1])
        return math.nan

    def seconds(self, name="seconds"):
        """The sum of an epoch's seconds over all epochs, or None."""
        curve = self.metrics.epochs.get(name)
        return None if curve is None else float(np.nansum(curve.values))


def read_run(folder):
    """A Run, whatever state its folder is in; a folder that holds none is the user's mistake."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"{folder}: there is no such folder; name that of a run, as saved/<title>/<run>"
        )
    if not any(
        (folder / name).exists() for name in ("config.json", "metrics.jsonl", "environment.json")
    ):
        runs = sorted(
            path.parent
            for pattern in ("*", "*/*")
            for path in folder.glob(f"{pattern}/config.json")
        )
        hint = f"did you mean {runs[-1]}?" if runs else "name one, as saved/<title>/<run>"
        raise UserError(
            f"{folder}: is not the folder of a run, there is neither config.json nor metrics.jsonl in it; {hint}"
        )
    config, here = read_json(folder / "config.json"), folder.resolve()
    title = config.value.get("title")
    return Run(
        folder,
        title if isinstance(title, str) and title else here.parent.name or here.name,
        here.name,
        state_of(folder),
        config,
        read_json(folder / "environment.json"),
        read_metrics(folder / "metrics.jsonl"),
        read_log(folder / "train.log"),
    )


def read_json(path):
    """A File whose value is an object, empty where the file is not good."""
    try:
        if path.stat().st_size > LARGEST:
            return File({}, f"{path.name} is too large to be shown")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return File({}, f"there is no {path.name}")
    except OSError as error:
        return File({}, f"{path.name} cannot be read: {error.strerror}")
    except (ValueError, RecursionError):
        return File({}, f"{path.name} cannot be read: it is not whole, or not JSON")
    if deep(value):
        return File({}, f"{path.name} is nested too deeply to be shown")
    return (
        File(value, None)
        if isinstance(value, dict)
        else File({}, f"{path.name} cannot be read: it holds no object")
    )


def deep(value, left=40):
    """Whether a value is nested more deeply than any that a run writes."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(deep(item, left - 1) for item in inner if isinstance(item, dict | list))


def read_log(path):
    """What the console said: when the run began and ended, its parameters, its memory, and its warnings."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD)
            file.seek(max(0, path.stat().st_size - TAIL))
            tail = file.read()
    except OSError:
        return {"began": None, "ended": None, "parameters": None, "memory": None, "warnings": []}
    head, tail = head.decode(errors="replace"), tail.decode(errors="replace")
    times = [re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", text) for text in (head, tail)]
    parameters = re.search(r"The model has (\d{1,18}) parameters", head)
    memory = re.findall(r" - Peak memory: (.{1,100})", tail)
    return {
        "began": times[0][0] if times[0] else None,
        "ended": times[1][-1] if times[1] else None,
        "parameters": int(parameters[1]) if parameters else None,
        "memory": memory[-1] if memory else None,
        "warnings": [
            line
            for line in tail.splitlines()
            if re.match(r"\[\S+ (WARNING|ERROR|CRITICAL)\]", line)
        ],
    }


def state_of(folder):
    """Whether a run has come to its end, is being trained, or was stopped."""
    if (folder / "finished.json").exists():
        return "finished"
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (
        BlockingIOError
    ):  # whoever trains it holds it; a run that writes its report at its own end no longer trains
        from training.runs.resume import HELD

        return "stopped" if any(os.path.sameopenfile(handle, held) for held in HELD) else "running"
    except OSError:  # a file system without locks
        pass
    finally:
        os.close(handle)
    return "stopped"


def direction(name, config):
    """1 where a metric is to be low, -1 where it is to be high, None where that is not known."""
    checkpoint = config.get("checkpoint")
    if (
        isinstance(checkpoint, dict)
        and checkpoint.get("monitor") == name
        and checkpoint.get("mode") in ("min", "max")
    ):
        return 1 if checkpoint["mode"] == "min" else -1
    try:
        return sign_of(name, "auto", name)
    except UserError:
        return None
