"""Log lines: on the console, in metrics.jsonl, one JSON object per line, and to the trackers."""

import json
import logging
import math
from pathlib import Path

import numpy as np

from training.devices.sharding import fetched
from training.options import LoggingOptions
from training.run import NOT_VALUES
from training.watching.publish import Publisher
from utils import RunError, UserError, named_leaves
from utils.files import append, lines_of, parse_json

# The most that is read from a metrics.jsonl when a run resumes.
MOST_BYTES, MOST_EPOCHS = 2**35, 10**6

logger = logging.getLogger("main")

FILE = "metrics.jsonl"
EVERY_50_STEPS = LoggingOptions()
# {whether a signal ends the run: the seconds that trackers may take to end}
TRACKERS_SECONDS = {False: 30.0, True: 1.0}


class MetricLog:
    """The observer that logs. Without a folder it logs only to the console and the trackers. With
    `keep_going`, lines that do not fit on a full disk are written later."""

    late = True

    def __init__(self, folder=None, options=EVERY_50_STEPS, publish=None, *, keep_going=False):
        self.path = Path(folder) / FILE if folder else None
        self.options, self.keep_going = options, keep_going
        self.publish = publish or Publisher()
        self.unwritten, self.error_logged = "", False

    # Lines.

    def on_steps(self, run):
        """Log a line within an epoch."""
        self.log_each_step(run)
        position, steps = run.position, run.steps
        share = f"{position}/{steps} ({100 * position / steps:.0f}%)" if steps else f"{position}"
        loss, throughput = run.metrics["train_loss"], throughput_text(run.throughput)
        logger.info("Epoch %d [%s] -- Loss: %.4f%s", run.epoch, share, loss, throughput)
        values = {**run.metrics, **run.throughput}
        self.write({"epoch": run.epoch, "step": run.step, **values})
        self.publish.scalars(run.step, {"epoch": run.epoch, **values})

    def on_evaluated(self, run, name, values):
        """Log a line for each value of a set."""
        when = f"Step {run.step}" if run.open_at == "steps" else f"Epoch {run.epoch}"
        for full_name, value in values.items():
            metric = full_name.removeprefix(f"{name}_")
            if "/" in full_name or metric == full_name:
                continue
            if not np.isfinite(value):
                logger.warning(
                    "%s: %s is not finite; does the data hold NaN, a label outside the classes, or "
                    "an index outside an embedding?",
                    when,
                    full_name,
                )
            label = "avg Loss:" if metric == "loss" else f"{metric} @"
            each = [f"{v:.4f}" for k, v in values.items() if k.startswith(f"{full_name}/")]
            replicas = f" ({' '.join(each)})" if each else ""
            logger.info("%s [%s] %s %.4f%s", when, name, label, value, replicas)

    def on_row(self, run, row):
        """Write the row of an epoch, or of an evaluation."""
        if row.get("end_of_epoch"):
            self.log_each_step(run)
            seconds = row["seconds"]
            logger.info("---- Epoch %d took %.2f seconds to complete! ----", run.epoch, seconds)
        self.write(row)
        values = {name: value for name, value in row.items() if name not in NOT_VALUES}
        self.publish.scalars(row["step"], {"epoch": row["epoch"], **for_trackers(values)})

    def log_each_step(self, run):
        """Write a row for each step since the last line, if all steps are logged."""
        if not self.options.log_all or not run.each_step:
            return
        columns = {name: array.tolist() for name, array in run.each_step.items()}
        for i in range(len(columns["step"])):
            values = {name: column[i] for name, column in columns.items()}
            self.unwritten += line_of({"epoch": run.epoch, **values, "each_step": True})
        self.flush()

    # The file.

    def write(self, row):
        """Append one row to metrics.jsonl."""
        self.unwritten += line_of(row)
        self.flush()

    def flush(self):
        """Append the rows that are not written yet."""
        if self.path is None:
            self.unwritten = ""
            return
        try:
            append(self.path, self.unwritten)
            self.unwritten, self.error_logged = "", False
        except OSError as error:
            message = f"{self.path}: cannot be written: {error.strerror}"
            if not self.keep_going:
                raise RunError(message) from error
            if not self.error_logged:
                logger.error("%s; its lines are kept and written later", message)
            self.error_logged = True

    def back_to(self, step):
        """Drop the rows that are not written, and notify the trackers."""
        self.unwritten = ""
        self.publish.back_to(step)

    def close(self, run):
        """End the trackers. Return whether all of them ended."""
        return self.publish.close(for_trackers(run.metrics), TRACKERS_SECONDS[bool(run.signal)])


class Histograms:
    """The observer that publishes histograms of the weights after each epoch."""

    def __init__(self, publish):
        self.publish, self.every = publish, {"epochs": 1}

    def on_steps(self, run):
        for name, leaf in named_leaves(run.states()[0].params).items():
            values = np.asarray(fetched(leaf), np.float32).ravel()
            self.publish.histogram(run.step, name, values)


def throughput_text(throughput):
    """The part of a line that shows tokens per second and MFU, where known."""
    tokens, mfu = throughput.get("tokens_per_second"), throughput.get("mfu")
    shown = [f"{tokens:,.0f} tokens/s"] if tokens is not None else []
    shown += [f"MFU {mfu:.1%}"] if mfu is not None else []
    return f" -- {', '.join(shown)}" if shown else ""


def for_trackers(named):
    """The values of an epoch under their names for trackers, where the training means of epochs and
    of log lines are two curves."""
    return {f"{k}_epoch" if k.startswith("train_") else k: value for k, value in named.items()}


def epoch_rows(folder, length):
    """The rows of the epochs in the first `length` bytes, as in `run.history`; an odd row is left
    out, and a line that the run cannot have written is an error."""
    path, rows, read = Path(folder) / FILE, [], 0
    try:
        for number, line in enumerate(lines_of(path, MOST_BYTES) if path.exists() else (), 1):
            if read >= length:
                break
            read += len(line)
            is_last = b"end_of_epoch" in line and len(rows) < MOST_EPOCHS
            try:
                if not (line.startswith(b"{") and line.endswith(b"}\n")):
                    raise ValueError("it is not a JSON object")
                rows += [parse_json(line)] if is_last else []  # others are too many to be parsed
            except ValueError as error:
                fix = "restore the file, or move it away to continue without these values"
                raise UserError(f"{path}, line {number}: cannot be read: {error}; {fix}") from error
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    rows = [row for row in rows if row.pop("end_of_epoch", False)]
    rows = [{k: float("nan") if v is None else v for k, v in row.items()} for row in rows]
    return [row for row in rows if is_row(row)]


def is_row(row):
    """Whether a row has an epoch and a step, and numbers under all other names."""
    counts = all(type(row.get(name)) is int for name in ("epoch", "step"))
    return counts and all(type(value) in (int, float) for value in row.values())


def line_of(row):
    return json.dumps(json_safe(row)) + "\n"


def json_safe(row):
    """The row with null for what is not finite, which JSON cannot express."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
