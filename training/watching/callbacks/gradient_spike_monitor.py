"""Report steps whose gradient is far longer than the gradients before it."""

import json
import logging
import math
from dataclasses import dataclass
from typing import Annotated, Any

from training.base import Callback
from training.watching.callbacks.common import append_lines, cut_back
from training.watching.metric_log import json_safe
from training.watching.view import View
from utils.forms import CountOrZero, Fraction, Range, checked

logger = logging.getLogger("main")

FILE = "gradient_spikes.jsonl"


AboveOne = Annotated[float, Range("a finite number above 1", exclusiveMinimum=1)]


@checked
def gradient_spike_monitor(
    ema_decay: Fraction = 0.99, threshold: AboveOne = 3.0, warmup: CountOrZero = 20
) -> Callback:
    """Write a line to gradient_spikes.jsonl for each step with an unusually long gradient.

    A gradient is unusual if it is not finite, or `threshold` times longer than the moving average
    over at least `warmup` earlier steps. In the average, the length of a spike is cut to the
    threshold: the next spike is still found, but gradients that stay long become usual.
    """
    return GradientSpikeMonitor(ema_decay, threshold, warmup)


@dataclass
class GradientSpikeMonitor:
    needs = ("gradient_norm", "per_step")
    late = True

    decay: float
    threshold: float
    warmup: int

    def on_start(self, view: View) -> None:
        self.memory = {"step": 0, "seen": 0, "average": 0.0}
        # The memory that matches the file; any other was restored from a checkpoint.
        self.written = None

    def on_steps(self, view: View) -> None:
        """Look for spikes in the steps since the last call."""
        names = [name for name in ("step", "gradient_norm", "loss") if name in view.per_step]
        columns = [view.per_step[name].tolist() for name in names]
        new = [row for row in zip(*columns, strict=True) if row[0] > self.memory["step"]]
        if not new:
            return
        if self.memory is not self.written:
            cut_back(view, FILE, self.memory["step"] or new[0][0] - 1)
        spikes = [spike for row in new if (spike := self.spike(view.epoch, *row))]
        self.written = self.memory
        if spikes:
            append_lines(view, FILE, [json.dumps(json_safe(spike)) for spike in spikes])
            warn(view.epoch, spikes)

    def on_row(self, view: View, row: dict[str, Any]) -> None:
        if "end_of_epoch" in row:  # for the steps after the last log line
            self.on_steps(view)

    on_end = on_steps

    def spike(self, epoch: int, step: int, norm: float, loss: float) -> dict[str, Any] | None:
        """Add a step to the average; return its line for the file if it is a spike, else None."""
        average, seen = self.memory["average"], self.memory["seen"]
        ratio = norm / average if average else math.nan
        self.memory = self.memory | {"step": step}
        if math.isfinite(norm):
            clipped = min(norm, self.threshold * average) if average else norm
            # The plain mean, until there are enough steps for the moving average.
            weight = max(1 - self.decay, 1 / (seen + 1))
            self.memory |= {"seen": seen + 1, "average": average + weight * (clipped - average)}
            if seen < self.warmup or not ratio > self.threshold:
                return None
        measured = {"norm": norm, "ema": average, "ratio": ratio, "loss": loss}
        return {"step": step, "epoch": epoch} | measured


def warn(epoch: int, spikes: list[dict[str, Any]]) -> None:
    """Log one line about all new spikes."""
    infinite = [spike for spike in spikes if not math.isfinite(spike["norm"])]
    worst = infinite[0] if infinite else max(spikes, key=lambda spike: spike["ratio"])
    logger.warning(
        "Epoch %d: gradient spikes: %d, the worst at step %d, with a norm of %.4g where %.4g "
        "was usual; see %s",
        epoch, len(spikes), worst["step"], worst["norm"], worst["ema"], FILE,
    )  # fmt: skip
