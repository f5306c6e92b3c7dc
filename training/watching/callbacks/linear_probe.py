"""Measure what a model has learned without labels: how well a linear classifier reads them from
its features."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from data_loader.base import has_items
from data_loader.loader import collate, collated
from training.base import Callback
from training.observers import Every
from training.watching.callbacks import common
from training.watching.view import View
from utils import UserError
from utils.forms import Count, NonNegative, checked

logger = logging.getLogger("main")

Classifier: TypeAlias = Callable[
    [Float[np.ndarray, "examples features"]], Int[np.ndarray, "examples"]
]


@checked
def linear_probe(
    examples: Count = 10_000,
    batch_size: Count = 500,
    ridge: NonNegative = 1e-3,
    sets: tuple[str, ...] | None = None,
    every: Every | None = None,
) -> Callback:
    """Fit a linear classifier to the model's features of the training set, and report its accuracy
    on each held-out set (or `sets`) as `test_probe_accuracy`.

    The features are the model's output, or its "features" if it returns several. The classifier is
    the least-squares fit to one-hot labels, with a `ridge`. `examples` is the most examples of each
    set, which are not augmented. The probe does not change the model. It is fitted in each
    evaluation, or only in those at which `every` is due.
    """
    return LinearProbe(examples, batch_size, ridge, sets, every)


@dataclass
class LinearProbe:
    examples: int
    batch_size: int
    ridge: float
    sets: tuple[str, ...] | None
    every: Every | None
    fitted: tuple[int, Classifier] | None = None  # at which step, and the latest classifier

    def reports(self, sets: Sequence[str]) -> list[str]:
        return [f"{name}_probe_accuracy" for name in sets if name in (self.sets or sets)]

    def on_start(self, view: View) -> None:
        common.check_sets("linear_probe", self.sets, view)
        names = [name for name in view.sets if name == "train" or name in (self.sets or view.sets)]
        for name in names:
            if not has_items(view.sets[name]):
                raise UserError(f"linear_probe: the {name} set comes in batches; leave it out")
            label = np.asarray(self.examples_of(view, name, [0])[1])
            if label.shape != (1,) or label.dtype.kind not in "iu":
                form = f"{label.dtype}{list(label.shape[1:])}"
                raise UserError(f"linear_probe: needs one class per example, got a target {form}")

    def on_evaluated(
        self, view: View, name: str, values: dict[str, float]
    ) -> dict[str, dict[str, float]] | None:
        """{"values": the accuracy of the set}."""
        if not common.is_held_out(name, self.sets):
            return None
        if self.fitted is None or self.fitted[0] != view.step:
            self.fitted = view.step, fitted(*self.features(view, "train"), self.ridge)
        x, y = self.features(view, name)
        accuracy = float(np.mean(self.fitted[1](x) == y))
        logger.info("Epoch %d [%s] probe_accuracy @ %.4f", view.epoch, name, accuracy)
        return {"values": {f"{name}_probe_accuracy": accuracy}}

    def features(
        self, view: View, name: str
    ) -> tuple[Float[np.ndarray, "examples features"], Int[np.ndarray, "examples"]]:
        """(features, labels) of the first examples of a set. A last batch is filled up, so that one
        program computes all."""
        count = min(self.examples, len(view.sets[name]))
        size, parts = min(self.batch_size, count), []
        for start in range(0, count, size):
            rows = np.minimum(np.arange(start, start + size), count - 1)
            x, y = self.examples_of(view, name, rows)
            output = view.predict(x)
            output = output["features"] if isinstance(output, dict) else output
            parts.append((np.asarray(output, np.float64).reshape(size, -1), y))
        x, y = (np.concatenate(column)[:count] for column in zip(*parts, strict=True))
        labelled = y >= 0  # -1 is not a class
        return x[labelled], y[labelled].astype(np.int64)

    def examples_of(
        self, view: View, name: str, rows: Sequence[int] | Int[np.ndarray, "examples"]
    ) -> tuple[Any, np.ndarray]:
        """(inputs, labels) of these examples, as arrays."""
        dataset = view.sets[name]
        return collated([dataset[int(i)] for i in rows], collate)


def fitted(
    x: Float[np.ndarray, "examples features"], y: Int[np.ndarray, "examples"], ridge: float
) -> Classifier:
    """The linear classifier that fits best."""
    mean, std = x.mean(0), x.std(0) + 1e-6
    centred = (x - mean) / std
    targets = np.eye(y.max() + 1)[y]
    square = centred.T @ centred + ridge * len(x) * np.eye(x.shape[1])
    bias = targets.mean(0)
    # Without a ridge, a feature that never changes makes the square singular.
    weight = np.linalg.lstsq(square, centred.T @ (targets - bias), rcond=None)[0]
    return lambda x: np.argmax((x - mean) / std @ weight + bias, axis=1)
