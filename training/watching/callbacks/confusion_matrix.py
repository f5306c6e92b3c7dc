"""How often each class is predicted for each label."""

import jax
import jax.numpy as jnp
import numpy as np

from ranges import Count, checked
from training.base import Callback, tracked
from training.watching.callbacks import common
from training.watching.pictures import matrix, png
from utils import UserError

MOST = 200  # classes


@checked
def confusion_matrix(
    normalized: bool = False, sets: tuple[str, ...] | None = None, every_n_epochs: Count = 1
) -> Callback:
    """Count how often each class is predicted for each label, in each evaluation.

    It writes pictures/confusion_matrix-<set>.json and .png. `sets` are the held-out sets to use
    (default: all). `normalized` draws shares of each label's examples instead of counts. Every
    position of a sequence counts; a target that is a distribution counts as its likeliest class;
    labels outside the classes are left out.
    """
    return ConfusionMatrix(normalized, sets, every_n_epochs)


def pairs(output, target):
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


class ConfusionMatrix:
    def __init__(self, normalized, sets, every_n_epochs):
        self.normalized, self.sets, self.every_n_epochs = normalized, sets, every_n_epochs
        self.metrics = {"confusion_matrix": tracked(pairs, mode="SUM", phase="EVAL")}

    def on_training_start(self, view):
        common.check_sets("confusion_matrix", self.sets, view)

    def on_validation_end(self, view):
        self.draw(view, common.just_measured("validation", self.sets, view))

    def on_test_end(self, view):
        self.draw(view, common.just_measured("test", self.sets, view))

    def draw(self, view, names):
        """Write the numbers of each set and publish its picture."""
        for name in names:
            measured = view.arrays[f"{name}_confusion_matrix"]
            common.check_labels("confusion_matrix", name, int(measured["invalid"]))
            counts = np.rint(measured["counts"]).astype(int)
            labels = view.classes and [common.named(i, view.classes) for i in range(len(counts))]
            title = f"confusion_matrix-{name}"
            picture = png(matrix(counts, self.normalized, labels))
            content = {"set": name, "epoch": view.epoch, "step": view.step}
            content |= common.names_of_classes(view)
            content |= {"normalized": self.normalized, "matrix": counts.tolist()}
            common.write_numbers(view, f"{title}.json", content)
            view.publish.image(view.step, title, picture)
