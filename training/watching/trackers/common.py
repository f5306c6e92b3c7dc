"""What several trackers need: packages that are there, a config without nesting, files without what came after a step."""

import json
from importlib.util import find_spec
from pathlib import PurePath

import numpy as np

from utils import UserError

BINS = 64
OF_THE_RUN = (
    "config.json",
    "environment.json",
    "finished.json",
    "metrics.jsonl",
    "report.html",
    "train.log",
    "evaluations.jsonl",
)


def needs(tracker, **packages):
    """Refuse where a package is missing: {the module it has: what pip calls it}."""
    for module, package in packages.items():
        spec = find_spec(module)
        if (
            spec is None or spec.origin is None
        ):  # a folder of that name, as runs leave behind, is no package
            raise UserError(
                f"{tracker}: needs the package {package}: pip install -r training/requirements.txt"
            )


def check_file_name(file, may_be_absolute=False):
    """Refuse what names no file of a run's."""
    path = PurePath(file)
    if len(path.parts) == 1 and (path.name in OF_THE_RUN or path.name.startswith("checkpoint-")):
        raise ValueError(f"file: {file!r} is a file that the run itself writes; take another name")
    if not path.name or ".." in path.parts:
        raise ValueError(f"file: must be the name of a file in the run's folder, got {file!r}")
    if path.is_absolute() and not may_be_absolute:
        raise ValueError(
            f"file: must lie in the run's folder, got {file!r}; the tracker jsonl can write one file for many runs"
        )


def flattened(config, prefix=""):
    """{"optimizer/args/lr": 0.003}: the leaves of a config by their path; a list of plain values is one of them, as JSON."""
    if isinstance(config, list | tuple):
        if not any(isinstance(value, dict | list | tuple) for value in config):
            return {prefix: json.dumps(config)}
        config = dict(enumerate(config))
    if not isinstance(config, dict):
        return {prefix: config}
    leaves = {}
    for key, value in config.items():
        leaves |= flattened(value, f"{prefix}/{key}" if prefix else str(key))
    return leaves


def counts_and_edges(values):
    """A histogram of the finite values, or None where there are none."""
    values = values[np.isfinite(values)].astype(np.float64)
    if not values.size:
        return None
    low, high = values.min(), values.max()
    distinct = high - low > 1e-9 * max(
        abs(low), abs(high)
    )  # else there are no 64 numbers between them
    return np.histogram(
        values, BINS if distinct else 1, None if distinct else (low - 0.5, high + 0.5)
    )
