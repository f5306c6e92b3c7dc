"""From sums to named values: `<set>_<metric>`, said on the console and written to metrics.jsonl, a JSON object a line."""

import contextlib
import json
import logging
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

from utils import RunError, named_leaves

logger = logging.getLogger("main")


def values(prefix, sums, finish):
    """{"train_loss": ...} from the sums of each replica; with several, the mean, and each as `train_loss/0`."""
    replicas = [{f"{prefix}_{k}": v for k, v in finished(s, finish).items()} for s in sums]
    named = {name: float(np.mean([r[name] for r in replicas])) for name in replicas[0]}
    if len(replicas) > 1:
        named |= {f"{name}/{r}": value for name in replicas[0] for r, value in enumerate(x[name] for x in replicas)}
    return named


def finished(sums, finish):
    """The reported loss and metrics of one replica, as floats."""
    count = int(sums["examples"]) or float("nan")  # of no example there is no mean
    reported = {"loss": sums["loss"] / count, **finish(jax.tree.map(lambda total: total / count, sums["metrics"]))}
    return {reported_name(name): float(value) for name, value in named_leaves(reported).items()}


def reported_name(leaf_name):
    """What a number within a metric's dict is called."""
    return leaf_name.replace("/", "_")


def difference(now, before):
    """What came to the sums since an earlier reading of the same epoch."""
    if before is None:
        return now
    return [jax.tree.map(np.subtract, a, b) for a, b in zip(now, before, strict=True)]


class MetricLog:
    """Where the values of a run go; without a file, to the console alone. What a full disk does not take is written later, if
    the run is to go on without."""

    def __init__(self, path=None, go_on=False):
        self.path, self.go_on, self.unwritten, self.told = path, go_on, "", False

    def progress(self, epoch, position, steps, step, named):
        """A line within an epoch."""
        share = f"{position}/{steps} ({100 * position // steps}%)" if steps else f"{position}"
        logger.info("Epoch %d [%s] -- Loss: %.4f", epoch, share, named["train_loss"])
        self.write({"epoch": epoch, "step": step, **named})

    def epoch(self, epoch, step, named, seconds, examples):
        """The lines that close an epoch; answers its row."""
        for name, value in named.items():
            if "/" in name:
                continue
            if not np.isfinite(value):
                logger.warning("Epoch %d: %s is not finite; does a label lie outside the classes?", epoch, name)
            prefix, metric = name.split("_", 1)
            label = "avg Loss:" if metric == "loss" else f"{metric} @"
            each = [f"{v:.4f}" for k, v in named.items() if k.startswith(f"{name}/")]
            logger.info("Epoch %d [%s] %s %.4f%s", epoch, prefix, label, value, f" ({' '.join(each)})" if each else "")
        logger.info("---- Epoch %d took %.2f seconds to complete! ----", epoch, seconds)
        row = {"epoch": epoch, "step": step, **named, "seconds": seconds, "examples_per_second": examples / seconds}
        self.write(row | {"end_of_epoch": True})
        return row

    def write(self, row):
        """Append one row to metrics.jsonl."""
        if self.path is None:
            return
        self.unwritten += json.dumps(sayable(row)) + "\n"
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

    def forget(self):
        """Drop what could not be written: the run goes back to before it."""
        self.unwritten = ""

    def epochs(self):
        """The rows of the epochs so far, as `epoch` answered them; a line that someone broke is passed over."""
        rows = []
        if self.path is not None and os.path.exists(self.path):
            for line in Path(self.path).read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    rows.append(json.loads(line))
        rows = [row for row in rows if isinstance(row, dict) and row.pop("end_of_epoch", False)]
        return [{k: float("nan") if v is None else v for k, v in row.items()} for row in rows]


def sayable(row):
    """What is not finite, which JSON cannot say, as null."""
    return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in row.items()}


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


@contextmanager
def progress_bar(epoch, steps, position=0):
    """A tqdm bar over the steps of an epoch where the output is a terminal; log lines then print above it."""
    if not sys.stderr.isatty():
        yield Silent()
        return
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    with (
        logging_redirect_tqdm([logger]),
        tqdm(total=steps, initial=position, desc=f"Epoch {epoch}", unit="step", leave=False) as bar,
    ):
        yield bar


class Silent:
    """A bar that nobody sees."""

    def update(self, _taken):
        pass


def show_on_console():
    """Let log lines reach standard output where nobody has set logging up, as in a notebook."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler(sys.stdout))
