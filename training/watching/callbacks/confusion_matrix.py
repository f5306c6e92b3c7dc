"""How often each class is predicted for each label."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from training.base import Callback, tracked
from training.observers import Every
from training.watching.callbacks import common
from training.watching.pictures import confusion_matrix_picture, png
from training.watching.view import View
from utils import UserError
from utils.forms import checked

MOST = 200  # classes


@checked
def confusion_matrix(
    normalized: bool = False, sets: tuple[str, ...] | None = None, every: Every | None = None
) -> Callback:
    """Count how often each class is predicted for each label, in each evaluation, or only in those
    at which `every` is due.

    It writes pictures/confusion_matrix-<set>.json and .png. `sets` are the held-out sets to use
    (default: all). `normalized` draws shares of each label's examples instead of counts. Every
    position of a sequence counts; a target that is a distribution counts as its likeliest class;
    labels outside the classes are left out.
    """
    return ConfusionMatrix(normalized, sets, every)


def pairs(output: Any, target: Any) -> dict[str, Array]:
    """How often each (label, prediction) occurs in one example."""
    label, valid = common.class_label("confusion_matrix", output, target)
    count = output.shape[-1]
    if count > MOST:
        raise UserError(
            f"confusion_matrix: draws at most {MOST} classes, and there are {count}; "
            "leave this callback out"
        )
    actual = jax.nn.one_hot(label.reshape(-1), count)
    predicted = jax.nn.one_hot(jnp.argmax(output, axis=-1).reshape(-1), count)
    return {"counts": actual.T @ predicted, "invalid": ~valid}


@dataclass
class ConfusionMatrix:
    normalized: bool
    sets: tuple[str, ...] | None
    every: Every | None

    def __post_init__(self) -> None:
        self.metrics = {"confusion_matrix": tracked(pairs, mode="SUM", phase="EVAL")}

    def on_start(self, run: View) -> None:
        common.check_sets("confusion_matrix", self.sets, run)

    def on_evaluated(self, run: View, name: str, values: dict[str, float]) -> None:
        """Write the numbers of a set and publish its picture."""
        if not common.is_held_out(name, self.sets):
            return
        measured = run.arrays[f"{name}_confusion_matrix"]
        common.check_labels("confusion_matrix", name, int(measured["invalid"]))
        counts = np.rint(measured["counts"]).astype(int)
        labels = run.classes and [common.named(i, run.classes) for i in range(len(counts))]
        title = f"confusion_matrix-{name}"
        picture = png(confusion_matrix_picture(counts, self.normalized, labels))
        content = {"set": name, "epoch": run.epoch, "step": run.step}
        content |= common.names_of_classes(run)
        content |= {"normalized": self.normalized, "matrix": counts.tolist()}
        common.write_numbers(run, f"{title}.json", content)
        run.publish.image(run.step, title, picture)
