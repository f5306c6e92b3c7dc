"""The values as JSON, an object a line, in a file that many runs may share."""

import json
import math
from pathlib import Path

from training.base import Tracker
from training.watching.metric_log import append, sayable
from training.watching.trackers.common import check_file_name
from utils import atomic_write


def jsonl(file: str = "tracked.jsonl") -> Tracker:
    """Write every line as JSON to a file of the run's, or with an absolute path to one that many runs share."""
    check_file_name(file, may_be_absolute=True)
    return Jsonl(file)


class Jsonl:
    """Lines that begin with the run's folder, its title and the step. What is void is taken out of a file of the run's own; in a
    shared one, where others write at the same time, a line {..., "step": s, "back_to": true} voids the run's lines after s."""

    def __init__(self, file):
        self.file, self.shared = file, Path(file).is_absolute()

    def start(self, about):
        self.path = about.folder / self.file
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.run = {"run": about.folder.name, "title": about.title}
        if self.path.exists():
            self.take_up(about.step or -1)  # a run that starts over has nothing behind it

    def scalars(self, step, values):
        self.write(step, sayable(values))

    def back_to(self, step):
        if self.shared:
            self.write(step, {"back_to": True})
        else:
            kept = [line for line in self.lines() if line.endswith("\n") and step_of(line) <= step]
            atomic_write(self.path, "".join(kept).encode())

    def write(self, step, values):
        """Append a line; whatever the values are called, what it is of stands first."""
        head = self.run | {"step": step}
        append(self.path, json.dumps(head | values | head) + "\n")

    def take_up(self, step):
        """Go on in a file that is there; in a shared one, what somebody was killed at gets its end."""
        lines = self.lines()
        if self.shared and lines and not lines[-1].endswith("\n"):
            append(self.path, "\n")
        if not self.shared or any(line.startswith(json.dumps(self.run)[:-1]) for line in lines):
            self.back_to(step)

    def lines(self):
        """The lines so far."""
        return self.path.read_text().splitlines(keepends=True)


def step_of(line):
    """The step of a line; one that someone broke comes after all others."""
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf
