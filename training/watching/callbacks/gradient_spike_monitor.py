"""Steps whose gradient is far longer than those before it."""

import json
import logging
import math
from contextlib import suppress

from training.base import Callback
from training.ranges import at_least, fraction
from training.watching.callbacks.common import append_lines
from training.watching.metric_log import sayable
from utils import atomic_write

logger = logging.getLogger("main")

FILE = "gradient_spikes.jsonl"


def gradient_spike_monitor(
    ema_decay: float = 0.99, threshold: float = 3.0, warmup: int = 20
) -> Callback:
    """A line in gradient_spikes.jsonl for each step whose gradient is `threshold` times longer than usual, or is not finite.

    Usual is the moving average over the steps before, which are at least `warmup`. A spike counts in it as if it were just at the
    threshold, so that the next one is seen too, while gradients that stay long soon are the usual ones.
    """
    fraction(ema_decay=ema_decay)
    at_least(0, warmup=warmup)
    if not 1 < threshold < math.inf:
        raise ValueError(f"threshold: must be a finite number above 1, got {threshold}")
    return GradientSpikeMonitor(ema_decay, threshold, warmup)


class GradientSpikeMonitor:
    needs = ("gradient_norm", "per_step")
    observer = True

    def __init__(self, decay, threshold, warmup):
        self.decay, self.threshold, self.warmup = decay, threshold, warmup

    def on_training_start(self, view):
        self.memory = {"step": 0, "seen": 0, "average": 0.0}
        self.written = (
            None  # the memory that the file goes with; another one was put back from a checkpoint
        )

    def on_step_end(self, view):
        self.look(view)

    def on_epoch_end(self, view):
        self.look(view)  # at the steps after the last log line

    def on_training_end(self, view):
        self.look(view)

    def look(self, view):
        """Judge the steps that are new since the last look."""
        columns = [
            view.per_step[name].tolist()
            for name in ("step", "gradient_norm", "loss")
            if name in view.per_step
        ]
        new = [row for row in zip(*columns, strict=True) if row[0] > self.memory["step"]]
        if not new:
            return
        if self.memory is not self.written and view.folder is not None:
            cut_back(view.folder / FILE, self.memory["step"] or new[0][0] - 1)
        found = [spike for row in new if (spike := self.judge(view.epoch, *row))]
        self.written = self.memory
        if found:
            append_lines(view, FILE, [json.dumps(sayable(spike)) for spike in found])
            self.warn(view.epoch, found)

    def judge(self, epoch, step, norm, loss):
        """The line of a step that is a spike, else None; in either case the step enters the average."""
        average, seen = self.memory["average"], self.memory["seen"]
        ratio = norm / average if average else math.nan
        self.memory = self.memory | {"step": step}
        if math.isfinite(norm):
            usual = min(norm, self.threshold * average) if average else norm
            weight = max(
                1 - self.decay, 1 / (seen + 1)
            )  # the mean, until there are enough steps for the moving average
            self.memory |= {"seen": seen + 1, "average": average + weight * (usual - average)}
            if seen < self.warmup or not ratio > self.threshold:
                return None
        return {
            "step": step,
            "epoch": epoch,
            "norm": norm,
            "ema": average,
            "ratio": ratio,
            "loss": loss,
        }

    def warn(self, epoch, found):
        """One line about all the spikes of a look."""
        worst = max(
            found, key=lambda spike: spike["ratio"] if math.isfinite(spike["norm"]) else math.inf
        )
        logger.warning(
            "Epoch %d: gradient spikes: %d, the worst in step %d: the norm %.4g, where %.4g was usual; see %s",
            epoch, len(found), worst["step"], worst["norm"], worst["ema"], FILE,
        )  # fmt: skip


def cut_back(path, step):
    """Drop the lines of a file after a step: the run goes on from there, and writes them again."""
    if not path.exists():
        return
    lines, kept = path.read_text().splitlines(keepends=True), []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):  # a line that was cut off is not kept
            kept += [line] if json.loads(line)["step"] <= step else []
    if kept != lines:
        atomic_write(path, "".join(kept).encode())
