"""The log of a run: lines on the console before the first step and during the epochs, and the
same values in metrics.jsonl, one JSON object per line, and for the trackers."""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from training.devices.sharding import fetched
from training.engine import Trainer
from training.options import LoggingOptions
from training.recipe import Recipe
from training.run import NOT_VALUES, Clock, Run
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

MOST_WAITING = 0.3  # the share of the time that training may wait for data
JUDGED_AFTER = 10.0  # seconds of training
ADVICE = (
    "make the dataset's __getitem__ or the collate_fn cheaper, or store the examples with "
    "write_records, which worker processes read"
)


class MetricLog:
    """The observer that logs. Without a folder it logs only to the console and the trackers. With
    `keep_going`, lines that do not fit on a full disk are written later."""

    late = True

    def __init__(
        self,
        folder: str | Path | None = None,
        options: LoggingOptions = EVERY_50_STEPS,
        publish: Publisher | None = None,
        *,
        keep_going: bool = False,
    ) -> None:
        self.path = Path(folder) / FILE if folder else None
        self.options, self.keep_going = options, keep_going
        self.publish = publish or Publisher()
        self.unwritten, self.error_logged = "", False

    # Lines.

    def on_steps(self, run: Run) -> None:
        """Log a line within an epoch."""
        self.log_each_step(run)
        position, steps = run.position, run.steps
        share = f"{position}/{steps} ({100 * position / steps:.0f}%)" if steps else f"{position}"
        loss, throughput = run.metrics["train_loss"], run.throughput or {}
        logger.info(
            "Epoch %d [%s] -- Loss: %.4f%s", run.epoch, share, loss, throughput_text(throughput)
        )
        values = {**run.metrics, **throughput}
        self.write({"epoch": run.epoch, "step": run.step, **values})
        self.publish.scalars(run.step, {"epoch": run.epoch, **values})

    def on_evaluated(self, run: Run, name: str, values: dict[str, float]) -> None:
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

    def on_row(self, run: Run, row: dict[str, Any]) -> None:
        """Write the row of an epoch, or of an evaluation."""
        if row.get("end_of_epoch"):
            self.log_each_step(run)
            seconds = row["seconds"]
            logger.info("---- Epoch %d took %.2f seconds to complete! ----", run.epoch, seconds)
        self.write(row)
        values = {name: value for name, value in row.items() if name not in NOT_VALUES}
        self.publish.scalars(row["step"], {"epoch": row["epoch"], **for_trackers(values)})

    def log_each_step(self, run: Run) -> None:
        """Write a row for each step since the last line, if all steps are logged."""
        if not self.options.log_all or not run.each_step:
            return
        columns = {name: array.tolist() for name, array in run.each_step.items()}
        for i in range(len(columns["step"])):
            values = {name: column[i] for name, column in columns.items()}
            self.unwritten += line_of({"epoch": run.epoch, **values, "each_step": True})
        self.flush()

    # The file.

    def write(self, row: dict[str, Any]) -> None:
        """Append one row to metrics.jsonl."""
        self.unwritten += line_of(row)
        self.flush()

    def flush(self) -> None:
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

    def back_to(self, step: int) -> None:
        """Drop the rows that are not written, and notify the trackers."""
        self.unwritten = ""
        self.publish.back_to(step)

    def close(self, run: Run) -> bool:
        """End the trackers. Return whether all of them ended."""
        return self.publish.close(for_trackers(run.metrics), TRACKERS_SECONDS[bool(run.signal)])


class Histograms:
    """The observer that publishes histograms of the weights after each epoch."""

    def __init__(self, publish: Publisher) -> None:
        self.publish, self.every = publish, {"epochs": 1}

    def on_steps(self, run: Run) -> None:
        for name, leaf in named_leaves(run.states()[0].params).items():
            values = np.asarray(fetched(leaf), np.float32).ravel()
            self.publish.histogram(run.step, name, values)


class WaitingForData:
    """The observer that logs once if training waits too much for data. Compiling and evaluations do
    not count; `advice` says what to do."""

    late = True

    def __init__(self, clock: Clock, advice: str | None = None) -> None:
        self.every = {"seconds": 1.0}
        self.clock, self.advice, self.logged = clock, advice or ADVICE, False

    def on_steps(self, run: Run) -> None:
        seconds, waited = self.clock.seconds, self.clock.waited
        if self.logged or seconds < JUDGED_AFTER or waited < MOST_WAITING * seconds:
            return
        self.logged = True
        share = 100 * min(waited / seconds, 1)
        logger.warning("Training waits for data %.0f%% of the time: %s", share, self.advice)


@dataclass
class FirstLines:
    """The observer that logs these lines. `monitor` is the metric of the best checkpoint, or None;
    `shows_histograms` says whether any tracker shows histograms."""

    recipe: Recipe
    trainer: Trainer
    monitor: str | None
    shows_histograms: bool

    def on_start(self, run: Run) -> None:
        recipe, trainer = self.recipe, self.trainer
        validation = {*recipe.sets_monitored(trainer.feeds)} - {"test"}
        if self.monitor is None and "test" in trainer.feeds and validation:
            logger.info(
                "No checkpoint.monitor: the last weights will be tested, not the best ones on the "
                "validation set"
            )
        if recipe.logging.histograms and not self.shows_histograms:
            logger.warning(
                "logging.histograms: no tracker here shows them; use tensorboard, wandb or trackio"
            )
        batch = jax.tree.leaves(trainer.feed.shapes)[0].shape[0]
        steps = "Epochs of unknown length, batches"
        if run.steps is not None:
            limits = run.epochs and run.steps * run.epochs, recipe.training.max_steps
            in_all = min(filter(None, limits), default="as many as max_seconds takes")
            steps = f"{run.steps} steps per epoch, {in_all} in all,"
        count = len(trainer.seeds)
        replicas = f", {count} replicas" if count > 1 else ""
        devices = on_devices(trainer.plan.mesh)
        logger.info("%s of %d examples each, on %s%s", steps, batch, devices, replicas)


def on_devices(mesh: Mesh | AbstractMesh) -> str:
    """The devices of a mesh, such as 8 x NVIDIA H200 (data 2 x fsdp 4), in 2 processes."""
    axes = [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]
    shape = f" ({' x '.join(axes)})" if axes and axes != [f"data {mesh.size}"] else ""
    processes = f", in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    assert isinstance(mesh, Mesh)  # a run's devices are there
    return f"{mesh.size} x {mesh.devices.flat[0].device_kind}{shape}{processes}"


def throughput_text(throughput: dict[str, float]) -> str:
    """The part of a line that shows tokens per second and MFU, where known."""
    tokens, mfu = throughput.get("tokens_per_second"), throughput.get("mfu")
    shown = [f"{tokens:,.0f} tokens/s"] if tokens is not None else []
    shown += [f"MFU {mfu:.1%}"] if mfu is not None else []
    return f" -- {', '.join(shown)}" if shown else ""


def for_trackers(named: dict[str, float]) -> dict[str, float]:
    """The values of an epoch under their names for trackers, where the training means of epochs and
    of log lines are two curves."""
    return {f"{k}_epoch" if k.startswith("train_") else k: value for k, value in named.items()}


def epoch_rows(folder: str | Path, length: int) -> list[dict[str, Any]]:
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


def is_row(row: dict[str, Any]) -> bool:
    """Whether a row has an epoch and a step, and numbers under all other names."""
    counts = all(type(row.get(name)) is int for name in ("epoch", "step"))
    return counts and all(type(value) in (int, float) for value in row.values())


def line_of(row: dict[str, Any]) -> str:
    return json.dumps(json_safe(row)) + "\n"


def json_safe(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with null for what is not finite, which JSON cannot express."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
