"""Write the values as JSON, one object per line, to a file that many runs may share."""

import json
import math
import os
from pathlib import Path
from typing import Annotated, Any

from training.base import Tracker
from training.watching.metric_log import json_safe
from training.watching.publish import About
from training.watching.trackers.common import check_file_name, existing_text
from utils.files import append, atomic_write, parse_json
from utils.forms import LocalPath, NeedsTrust


def is_elsewhere(file: str) -> bool:
    """Whether a file is outside of the run's folder."""
    return os.path.isabs(os.path.expanduser(file))


FileName = Annotated[LocalPath, NeedsTrust("is written outside the run's folder", is_elsewhere)]


def jsonl(file: FileName = "tracked.jsonl") -> Tracker:
    """Write each line as JSON to a file in the run's folder; runs may share an absolute path."""
    check_file_name(file, may_be_absolute=True)
    return Jsonl(file)


class Jsonl:
    """Writes lines that begin with the run's folder name, its title and the step.

    Void lines are removed from a file of the run's own. In a shared file, to which other runs
    write at the same time, a line {..., "step": s, "back_to": true} voids the run's lines after s.
    """

    def __init__(self, file: str) -> None:
        self.file, self.shared = file, Path(file).is_absolute()

    def start(self, about: About) -> None:
        path = about.folder / self.file
        self.path = path.resolve() if self.shared else path  # the user may have made it a link
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.run = {"run": about.folder.name, "title": about.title}
        if not self.path.exists():
            return
        lines = self.lines()
        if self.shared and lines and not lines[-1].endswith("\n"):
            append(self.path, "\n")  # ends a line at which another process was killed
        if not self.shared or any(line.startswith(json.dumps(self.run)[:-1]) for line in lines):
            self.back_to(about.step or -1)  # a run that starts over has no valid lines

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.write(step, json_safe(values))

    def text(self, step: int, name: str, text: str) -> None:
        self.write(step, {name: text})

    def back_to(self, step: int) -> None:
        if self.shared:
            self.write(step, {"back_to": True})
        else:
            kept = [line for line in self.lines() if line.endswith("\n") and step_of(line) <= step]
            atomic_write(self.path, "".join(kept).encode())

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Append a line; run, title and step come first, and no value replaces them."""
        head = self.run | {"step": step}
        append(self.path, json.dumps(head | values | head) + "\n")

    def lines(self) -> list[str]:
        """The lines so far."""
        return existing_text(self.path).splitlines(keepends=True)


def step_of(line: str) -> float:
    """The step of a line; infinity for a damaged one."""
    try:
        step = parse_json(line)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf
    return step if type(step) in (int, float) else math.inf
