"""metrics.jsonl as columns: a curve for each name."""

import json
import math
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

SAID = (
    "epoch",
    "step",
    "initial",
    "final",
    "end_of_epoch",
    "each_step",
)  # what a line is, not what was measured


class Curve(NamedTuple):
    """Values by step; nan where there was none."""

    steps: np.ndarray
    values: np.ndarray


@dataclass
class Metrics:
    """metrics.jsonl, a column for each name."""

    within: dict = field(default_factory=dict)  # {name: Curve} of the lines within epochs
    each: dict = field(default_factory=dict)  # of every single step
    epochs: dict = field(default_factory=dict)  # of the lines that close an epoch
    numbers: dict = field(default_factory=dict)  # {step: the epoch that it closed}
    initial: dict = field(default_factory=dict)  # {name: value} before the first step
    final: dict = field(default_factory=dict)  # of the test after training
    tested: str | None = None  # the checkpoint of that test
    last: int = 0  # the last step
    problem: str | None = None

    def fine(self, name):
        """The finest Curve there is of a name, or None."""
        return self.each.get(name) or self.within.get(name)

    def finest(self, name):
        """The finest one where the values at the ends of epochs are of no other kind."""
        return self.fine(name) or self.epochs.get(name) or Curve(np.empty(0), np.empty(0))

    def names(self):
        return list(dict.fromkeys([*self.epochs, *self.within, *self.each, *self.initial]))

    def sets(self):
        """The sets that were measured: for each there is a loss. The training set comes first, wherever it stands."""
        sets = [
            name.removesuffix("_loss")
            for name in self.names()
            if name.endswith("_loss") and name.count("_") == 1
        ]
        return sorted(sets, key=lambda name: name != "train")

    def metrics(self):
        """{metric: [its sets]}, the loss first."""
        sets, found = self.sets(), {"loss": []}
        for set_name in sets:
            for name in self.names():
                if name.startswith(f"{set_name}_") and "/" not in name:
                    found.setdefault(name.split("_", 1)[1], []).append(set_name)
        return {metric: of for metric, of in found.items() if of}


def read_metrics(path):
    """The columns of a metrics.jsonl; lines that are damaged are passed over."""
    found, broken, whole = Metrics(), 0, True
    try:
        with open(path, "rb") as file:
            for line in file:
                whole = line.endswith(b"\n")
                try:
                    row = json.loads(line)
                    add(found, row, whole_number(row["epoch"]), whole_number(row["step"]))
                except (ValueError, KeyError, TypeError, RecursionError):
                    broken += bool(line.strip())
    except FileNotFoundError:
        found.problem = f"there is no {path.name}: nothing was measured yet"
    except OSError as error:
        found.problem = f"{path.name} cannot be read: {error.strerror}"
    if broken and (broken > 1 or whole):  # the last one may just be written
        found.problem = f"{broken} line{'s' * (broken > 1)} of {path.name} cannot be read and {'are' if broken > 1 else 'is'} left out"
    for columns in (found.within, found.each, found.epochs):
        columns.update({name: in_order(*pair) for name, pair in columns.items()})
    return found


def add(found, row, epoch, step):
    """Take one row of metrics.jsonl in."""
    values = {
        name: value if type(value) is float else number(value)
        for name, value in row.items()
        if name not in SAID
    }
    if row.get("initial") or row.get("final"):
        kind = found.initial if row.get("initial") else found.final
        kind.update(
            {
                name: value
                for name, value in values.items()
                if value is not None and math.isfinite(value)
            }
        )
        found.tested = str(row["final"]) if row.get("final") else found.tested
        return
    if row.get("end_of_epoch"):
        found.numbers[step] = epoch
    found.last = max(found.last, step)
    kind = (
        found.epochs
        if row.get("end_of_epoch")
        else found.each
        if row.get("each_step")
        else found.within
    )
    for name, value in values.items():
        if value is not None:
            steps, column = kind.get(name) or kind.setdefault(name, (array("d"), array("d")))
            steps.append(step)
            column.append(value)


def whole_number(value):
    """A count that a file states."""
    if not isinstance(value, int) or not 0 <= value < 2**53:
        raise ValueError(f"{value!r} is no count")
    return value


def number(value):
    """A float, nan for null and for what is too large; None for what is no number."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return float(value) if abs(value) < 2**1000 else math.nan


def in_order(steps, values):
    """A Curve whose steps ascend; of two values of a step, the later one counts."""
    steps, values = np.array(steps), np.array(values)
    values[~np.isfinite(values)] = math.nan
    if (np.diff(steps) <= 0).any():
        steps, last = np.unique(steps[::-1], return_index=True)
        values = values[::-1][last]
    return Curve(steps, values)
