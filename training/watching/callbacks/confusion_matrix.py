"""Which classes are taken for which."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from training.base import Callback
from training.ranges import at_least
from training.tally import tracked
from training.watching.callbacks.common import (
    check_labels,
    check_sets,
    class_label,
    just_measured,
    write_picture_files,
)
from training.watching.pictures import matrix, png
from utils import UserError

MOST = 200  # classes


def confusion_matrix(
    normalized: bool = False, sets: tuple[str, ...] | None = None, every_n_epochs: int = 1
) -> Callback:
    """After each evaluation, which classes were taken for which: pictures/confusion_matrix-<set>.json and .png.

    It looks at `sets`, or else at every held-out one; `normalized` draws the share of each label's examples, no counts.
    Every position of a sequence counts, of a target that is a distribution the likeliest class, a label outside the classes not.
    """
    at_least(1, every_n_epochs=every_n_epochs)
    return ConfusionMatrix(normalized, sets, every_n_epochs)


def pairs(output, target):
    """How often each (label, prediction) occurs in one example."""
    label, sound = class_label("confusion_matrix", output, target)
    count = output.shape[-1]
    if count > MOST:
        raise UserError(
            f"confusion_matrix: there are {count} classes, of which nobody could read a matrix; {MOST} at most"
        )
    actual = jax.nn.one_hot(label.reshape(-1), count)
    predicted = jax.nn.one_hot(jnp.argmax(output, axis=-1).reshape(-1), count)
    return {"counts": actual.T @ predicted, "unsound": ~sound}


class ConfusionMatrix:
    def __init__(self, normalized, sets, every_n_epochs):
        self.normalized, self.sets, self.every_n_epochs = normalized, sets, every_n_epochs
        self.metrics = {"confusion_matrix": tracked(pairs, mode="SUM", phase="EVAL")}

    def on_training_start(self, view):
        check_sets("confusion_matrix", self.sets, view)

    def on_validation_end(self, view):
        self.draw(view, just_measured("validation", self.sets, view))

    def on_test_end(self, view):
        self.draw(view, just_measured("test", self.sets, view))

    def draw(self, view, names):
        """The matrix of each of these sets, as files and for the trackers."""
        for name in names:
            found = view.arrays[f"{name}_confusion_matrix"]
            check_labels("confusion_matrix", name, int(found["unsound"]))
            counts = np.rint(found["counts"]).astype(int)
            picture, title = png(matrix(counts, self.normalized)), f"confusion_matrix-{name}"
            told = {
                "set": name,
                "epoch": view.epoch,
                "step": view.step,
                "normalized": self.normalized,
                "matrix": counts.tolist(),
            }
            write_picture_files(
                view, {f"{title}.json": json.dumps(told).encode(), f"{title}.png": picture}
            )
            view.publish.image(view.step, title, picture)
