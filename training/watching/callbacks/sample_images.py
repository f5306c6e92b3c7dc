"""Show images of a run: the first ones, and the ones with the worst predictions."""

import base64
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from data_loader.base import has_items
from data_loader.nest import named_nest
from training.base import Callback, tracked
from training.loss import cross_entropy
from training.observers import Every
from training.rows import unweighted
from training.watching.callbacks import common
from training.watching.pictures import Picture, as_picture, grid, png
from training.watching.view import View
from utils.forms import CountOrZero, checked

logger = logging.getLogger("main")

LARGEST = 128  # pixels of a side; larger pictures are thinned out, since drawing delays an epoch


@checked
def sample_images(
    count: CountOrZero = 16,
    worst: CountOrZero = 16,
    sets: tuple[str, ...] | None = None,
    every: Every | None = None,
) -> Callback:
    """Draw the first images of training and, after each evaluation, the worst predictions, or only
    after those at which `every` is due.

    pictures/first_batch.png shows `count` images, shuffled and augmented as in training.
    pictures/worst-<set>.png (and .json) shows the `worst` examples with the highest cross entropy
    in each of `sets` (default: all held-out sets), with label>prediction below. If the inputs are
    not images, only the .json is written.
    """
    return SampleImages(count, worst, sets, every)


def prediction(output: Any, target: Any) -> dict[str, Array]:
    """The loss of one example, and its label and predicted class if it has only one position."""
    label, valid = common.class_label("sample_images", output, target)
    if label.ndim and (isinstance(target, dict) or target.shape != output.shape):
        # In a sequence, labels outside the classes are padding.
        inside = (label >= 0) & (label < output.shape[-1])
        target = {"target": label, "weight": inside}
    measured = {"loss": unweighted(cross_entropy(output, target)), "invalid": ~valid}
    if label.ndim:
        return measured
    predicted = jnp.argmax(output).astype(jnp.int32)
    return measured | {"predicted": predicted, "label": label.astype(jnp.int32)}


@dataclass
class SampleImages:
    count: int
    worst: int
    sets: tuple[str, ...] | None
    every: Every | None

    def __post_init__(self) -> None:
        rule = tracked(prediction, mode="CONCAT", phase="EVAL")
        self.metrics = {"sample_images": rule} if self.worst else {}

    def on_start(self, view: View) -> None:
        self.logged = set()  # the sets for which the log has a reason why they are not shown
        common.check_sets("sample_images", self.sets, view)
        items = view.first_examples(self.count) if self.count else []
        if examples := self.shown("train", items):
            captions = [common.named(class_of(label), view.classes) for _, label in examples]
            drawn = png(grid([picture for picture, _ in examples], captions=captions))
            view.publish.image(view.step, "first_batch", drawn)

    def on_evaluated(self, view: View, name: str, values: dict[str, float]) -> None:
        """Write and publish the worst predictions in a set."""
        if not self.worst or not common.is_held_out(name, self.sets):
            return
        measured = view.arrays[f"{name}_sample_images"]
        common.check_labels("sample_images", name, int(measured["invalid"].sum()))
        # The loss is NaN for a label outside the classes, which comes first.
        losses = np.where(np.isnan(measured["loss"]), np.inf, measured["loss"])
        order = np.argsort(-losses, kind="stable")[: self.worst]
        worst = [as_json(measured, int(i)) for i in order]
        dataset = view.sets.get(name)
        examples = self.shown(
            name, [dataset[int(i)] for i in order] if has_items(dataset) else None
        )
        self.publish(view, name, worst, [picture for picture, _ in examples])

    def publish(
        self, view: View, name: str, worst: list[dict[str, Any]], pictures: list[Picture]
    ) -> None:
        """Write the numbers of one set, and publish its picture."""
        title, picture = f"worst-{name}", None
        if pictures:
            pairs = [
                [common.named(one[key], view.classes) for key in ("label", "predicted")]
                for one in worst
            ]
            captions = [label and f"{label}>{predicted}" for label, predicted in pairs]
            picture = png(grid(pictures, captions=captions))
            for one, example in zip(worst, pictures, strict=True):
                one["png"] = base64.b64encode(png(example)).decode()
        content = {"set": name, "epoch": view.epoch, "step": view.step}
        content |= common.names_of_classes(view) | {"examples": worst}
        common.write_numbers(view, f"{title}.json", content)
        if picture:
            view.publish.image(view.step, title, picture)

    def shown(self, name: str, items: Sequence[Any] | None) -> list[tuple[Picture, Any]]:
        """[(picture, label)] of examples of a set; empty, with a log line, if none are images, or
        if they cannot be read one by one (None)."""
        if items is None:
            self.log_once(name, "comes in batches, so no single example can be shown")
        if not items:
            return []
        pictures = [picture for item in items if (picture := picture_in(item)) is not None]
        if len(pictures) < len(items):
            form = ", ".join(f"{x.dtype}{list(x.shape)}" for x in inputs_of(items[0]))
            self.log_once(name, f"holds no images ({form}), so none are shown")
            return []
        pairs = (item if isinstance(item, tuple | list) else () for item in items)
        labels = [pair[1] if len(pair) > 1 else None for pair in pairs]
        return list(zip(pictures, labels, strict=True))

    def log_once(self, name: str, why: str) -> None:
        """Log why a set is not shown."""
        if name not in self.logged:
            logger.info("sample_images: the %s set %s", name, why)
        self.logged.add(name)


def as_json(measured: dict[str, np.ndarray], i: int) -> dict[str, Any]:
    """One prediction as plain JSON."""
    keys = ("label", "predicted")
    label, predicted = (int(measured[key][i]) if key in measured else None for key in keys)
    loss = float(measured["loss"][i])
    loss = loss if math.isfinite(loss) else None
    return {"index": i, "label": label, "predicted": predicted, "loss": loss}


def inputs_of(item: Any) -> list[np.ndarray]:
    """The arrays among the inputs of an example."""
    x = item[0] if isinstance(item, tuple | list) and item else item
    return [np.asarray(leaf) for _, leaf in named_nest(x)]


def picture_in(item: Any) -> Picture | None:
    """The first image among the inputs of an example, thinned out if it is large, or None."""
    for x in inputs_of(item):
        if (picture := as_picture(x)) is not None:
            step = -(-max(picture.shape[:2]) // LARGEST)
            return picture[::step, ::step]
    return None


def class_of(label: Any) -> int | None:
    """The class that a label of a dataset stands for, or None."""
    label = np.asarray(label)
    if label.ndim == 1 and label.dtype.kind == "f":
        return int(label.argmax())
    return int(label) if label.ndim == 0 and label.dtype.kind in "iub" else None
