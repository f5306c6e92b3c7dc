"""The lines of a run: said on the console, written to metrics.jsonl, a JSON object a line, and handed to the trackers."""

import contextlib
import json
import logging
import math
import os
from pathlib import Path

import numpy as np

from training.watching.publish import Publisher
from utils import RunError

logger = logging.getLogger("main")


class MetricLog:
    """Where the values of a run go; without a file, to the console and the trackers alone. What a full disk does not take is
    written later, if the run is to go on without."""

    def __init__(self, path=None, go_on=False, publish=None):
        self.path, self.go_on, self.unwritten, self.told = path, go_on, "", False
        self.publish = publish or Publisher()

    def folder(self):
        """That of the run, where this process is the one that writes into it."""
        return self.path and self.path.parent

    def progress(self, where, steps, named, rates):
        """A line within an epoch; `where` tells epoch, position and step."""
        position = where["position"]
        share = f"{position}/{steps} ({100 * position // steps}%)" if steps else f"{position}"
        logger.info("Epoch %d [%s] -- Loss: %.4f", where["epoch"], share, named["train_loss"])
        self.write({"epoch": where["epoch"], "step": where["step"], **named, **rates})
        self.publish.scalars(where["step"], {"epoch": where["epoch"], **named, **rates})

    def each_step(self, epoch, values, last):
        """A row for each of some steps, the last of which is the `last` one of the run; values are arrays."""
        columns = {name: found.tolist() for name, found in values.items()}
        for i, step in enumerate(range(last + 1 - len(columns["train_loss"]), last + 1)):
            self.write(
                {
                    "epoch": epoch,
                    "step": step,
                    **{k: v[i] for k, v in columns.items()},
                    "each_step": True,
                },
                flush=False,
            )
        self.flush()

    def measured(self, epoch, prefix, named):
        """A line for each value of a set."""
        for name, value in named.items():
            metric = name.removeprefix(f"{prefix}_")
            if "/" in name or metric == name:
                continue
            if not np.isfinite(value):
                logger.warning(
                    "Epoch %d: %s is not finite; does a label lie outside the classes?", epoch, name
                )
            label = "avg Loss:" if metric == "loss" else f"{metric} @"
            each = [f"{v:.4f}" for k, v in named.items() if k.startswith(f"{name}/")]
            logger.info(
                "Epoch %d [%s] %s %.4f%s",
                epoch,
                prefix,
                label,
                value,
                f" ({' '.join(each)})" if each else "",
            )

    def epoch(self, epoch, step, named, rates):
        """The lines that close an epoch; answers its row."""
        logger.info("---- Epoch %d took %.2f seconds to complete! ----", epoch, rates["seconds"])
        row = {"epoch": epoch, "step": step, **named, **rates}
        self.write(row | {"end_of_epoch": True})
        self.publish.scalars(step, {"epoch": epoch, **for_trackers(named | rates)})
        return row

    def row(self, row, named):
        """A row of its own: what was measured before the first epoch, or after the last."""
        self.write(row | named)
        self.publish.scalars(row["step"], named)

    def write(self, row, flush=True):
        """Append one row to metrics.jsonl."""
        if self.path is not None:
            self.unwritten += json.dumps(sayable(row)) + "\n"
            if flush:
                self.flush()

    def flush(self):
        """Write what is not written yet."""
        if self.path is None:
            return
        try:
            append(self.path, self.unwritten)
            self.unwritten, self.told = "", False
        except OSError as error:
            message = f"{self.path}: cannot be written: {error.strerror}"
            if not self.go_on:
                raise RunError(message) from error
            if not self.told:
                logger.error("%s; its lines are kept until it can be", message)
            self.told = True

    def forget(self, step):
        """Drop what could not be written, and what the trackers have after a step: the run goes back to before it."""
        self.unwritten = ""
        self.publish.back_to(step)

    def epochs(self):
        """The rows of the epochs so far, as `epoch` answered them; a line that someone broke is passed over."""
        rows = []
        if self.path is not None and os.path.exists(self.path):
            for line in Path(self.path).read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    rows.append(json.loads(line))
        rows = [row for row in rows if isinstance(row, dict) and row.pop("end_of_epoch", False)]
        return [{k: float("nan") if v is None else v for k, v in row.items()} for row in rows]


def for_trackers(named):
    """The values of an epoch as trackers get them, which draw its mean and the lines within it as two curves."""
    return {
        f"{name}_epoch" if name.startswith("train_") else name: value
        for name, value in named.items()
    }


def sayable(row):
    """What is not finite, which JSON cannot say, as null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def append(path, text):
    """Add text to a file, all of it or nothing."""
    with open(path, "ab", buffering=0) as file:
        before = file.tell()
        try:
            data = text.encode()
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(before)
            raise
