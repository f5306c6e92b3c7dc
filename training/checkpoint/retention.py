"""Which checkpoints of a run are kept: the last ones and the best ones, and those that an evaluator
in another process (`--watch`) protects."""

import json
import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np

from file_io import atomic_write, parse_json, read_file

logger = logging.getLogger("main")

EVALUATOR = "evaluator.json"  # in the folder of a run, written by its evaluator


class Kept(NamedTuple):
    """The checkpoints to keep: names of the last ones (oldest first), [name, value] of the best."""

    regular: tuple = ()
    best: tuple = ()  # best first

    def names(self):
        return {*self.regular, *(name for name, _ in self.best)}

    def add(self, name, value, options, regular=True):
        """What to keep with one more checkpoint, whose monitored metric is `value` (or None)."""
        last = [*(n for n in self.regular if n != name), name] if regular else list(self.regular)
        best = [entry for entry in self.best if entry[0] != name]
        if self.is_among_best(value, options):
            best = sorted([*best, [name, value]], key=lambda entry: options.sign() * entry[1])
        last = last[-options.keep :] if options.keep else last
        return Kept(tuple(last), tuple(best[: options.save_top_k]))

    def summary_of_best(self, monitor, records):
        """What finished.json says about the best checkpoint, by {name: record}; None without
        one."""
        if not self.best:
            return None
        name, value = self.best[0]
        where = {key: records[name][key] for key in ("epoch", "step")}
        return {"name": name, **where, "monitor": monitor, "value": value}

    def is_among_best(self, value, options):
        """Whether a value is among the best `save_top_k`; False if it is None or not finite."""
        if value is None or not np.isfinite(value):
            return False
        sign = options.sign()
        return len(self.best) < options.save_top_k or sign * value < sign * self.best[-1][1]


def kept_so_far(records, regular, options):
    """The checkpoints that a resumed run keeps, of {name: record} with the oldest first. The best
    are ranked again, since the config may have changed."""
    kept = Kept()
    for name, record in records.items():
        kept = kept.add(name, measured(record).get(options.monitor), options, regular=False)
    best = {name for name, _ in kept.best}
    regular = tuple(name for name in records if name in regular or name not in best)
    return kept._replace(regular=regular)


def measured(record):
    """The metrics of the very weights in a checkpoint, if they were evaluated."""
    return record["evaluated"] or {}


def protect(folder, best, reading=None):
    """Keep the training process from deleting the best checkpoints of an evaluator, [name, value],
    and the one that it reads at the moment."""
    content = {"best": best, "reading": reading}
    atomic_write(Path(folder) / EVALUATOR, (json.dumps(content, indent=2) + "\n").encode())


def protected(folder, names):
    """The checkpoints among `names` that an evaluator protects; all, if its file cannot be read."""
    path = Path(folder) / EVALUATOR
    try:
        content = parse_json(read_file(path))
        return set(names) & {content["reading"], *(name for name, _ in content["best"])}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s: cannot be read (%s): no checkpoint is deleted", path, error)
        return set(names)
