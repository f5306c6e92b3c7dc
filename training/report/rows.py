"""Read metrics.jsonl as columns: one curve for each name."""

import json
import math
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from utils.files import inside, is_count, is_number, lines_of

# The keys that describe a row; all others are measured values.
ROW_KEYS = {"epoch", "step", "initial", "final", "end_of_epoch", "evaluation", "each_step"}


MOST_BYTES = 2**28  # of a metrics.jsonl
MOST_NAMES = 10_000  # after which new ones are left out


class Curve(NamedTuple):
    """Values by step; NaN where a value is missing."""

    steps: np.ndarray
    values: np.ndarray


@dataclass
class Metrics:
    """The columns of metrics.jsonl."""

    within: dict = field(default_factory=dict)  # {name: Curve} of single steps, or else log lines
    epochs: dict = field(default_factory=dict)  # {name: Curve} of epochs and of evaluations
    epoch_at: dict = field(default_factory=dict)  # {step: the epoch that ended with it}
    epoch_of: dict = field(default_factory=dict)  # {step of one of `epochs`: its epoch}
    initial: dict = field(default_factory=dict)  # {name: value} before the first step
    final: dict = field(default_factory=dict)  # {name: value} of the test after training
    tested: str | None = None  # the checkpoint of that test
    last_step: int = 0
    problem: str | None = None

    def finest(self, name):
        """The Curve with the most points, for values that mean the same within and after epochs."""
        return self.within.get(name) or self.epochs.get(name) or Curve(np.empty(0), np.empty(0))

    def coarsest(self, name):
        """The Curve of the ends of epochs, or else the one within epochs, or None."""
        return self.epochs.get(name) or self.within.get(name)

    def names(self):
        return list(dict.fromkeys([*self.epochs, *self.within, *self.initial]))

    def sets(self):
        """The datasets that were measured (each has a loss), the training set first."""
        losses = [name for name in self.names() if name.endswith("_loss") and name.count("_") == 1]
        sets = [name.removesuffix("_loss") for name in losses]
        return sorted(sets, key=lambda name: name != "train")

    def by_metric(self):
        """{metric: [its sets]}, the loss first."""
        found = {"loss": []}
        for set_name in self.sets():
            for name in self.names():
                if name.startswith(f"{set_name}_") and "/" not in name:
                    found.setdefault(name.split("_", 1)[1], []).append(set_name)
        return {metric: sets for metric, sets in found.items() if sets}

    def pairs(self):
        """[(set, metric)], the loss first."""
        return [(name, metric) for metric, sets in self.by_metric().items() for name in sets]


def read_metrics(path):
    """The columns of a metrics.jsonl; damaged lines are skipped."""
    metrics, single_steps, broken, complete, size = Metrics(), {}, 0, True, 0
    try:
        for line in lines_of(inside(path.parent, path.name)):
            complete, size = line.endswith(b"\n"), size + len(line)
            if size > MOST_BYTES:
                metrics.problem = f"{path.name} is too large; only its beginning is shown"
                break
            try:
                add_row(metrics, single_steps, json.loads(line))
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
    metrics.within = in_order(metrics.within | single_steps)
    metrics.epochs = in_order(metrics.epochs)
    return metrics


def add_row(metrics, single_steps, row):
    """Add one row of metrics.jsonl to the columns."""
    epoch, step = row["epoch"], row["step"]
    if not is_count(epoch) or not is_count(step):
        raise ValueError("a row without its place")
    values = {name: number(value) for name, value in row.items() if name not in ROW_KEYS}
    values = {name: value for name, value in values.items() if value is not None}
    metrics.last_step = max(metrics.last_step, step)
    if row.get("initial") or row.get("final"):
        columns = metrics.initial if row.get("initial") else metrics.final
        columns.update({name: value for name, value in values.items() if math.isfinite(value)})
        metrics.tested = str(row["final"]) if row.get("final") else metrics.tested
        return
    columns = single_steps if row.get("each_step") else metrics.within
    if row.get("evaluation") or row.get("end_of_epoch"):
        columns, metrics.epoch_of[step] = metrics.epochs, epoch
    if row.get("end_of_epoch"):
        metrics.epoch_at[step] = epoch
    if len(columns) > MOST_NAMES:
        values = {name: value for name, value in values.items() if name in columns}
    for name, value in values.items():
        steps, column = columns.get(name) or columns.setdefault(name, (array("d"), array("d")))
        steps.append(step)
        column.append(value)


def number(value):
    """A float; NaN for null and for what is too large or not finite; None for anything else."""
    if is_number(value):
        return float(value)
    return math.nan if value is None or type(value) in (int, float) else None


def in_order(columns):
    """{name: Curve} with ascending steps; of two values for one step, the later one counts."""
    curves = {}
    for name, (steps, values) in columns.items():
        steps, last = np.unique(np.array(steps)[::-1], return_index=True)
        curves[name] = Curve(steps, np.array(values)[::-1][last])
    return curves
