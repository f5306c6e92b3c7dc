"""What a run looks at: the first images, and those that it gets most wrong."""

import base64
import json
import logging
import math

import jax.numpy as jnp
import numpy as np

from data_loader.base import has_items
from data_loader.nest import named_nest
from training.base import Callback
from training.loss import cross_entropy
from training.ranges import at_least
from training.tally import tracked
from training.watching.callbacks.common import (
    check_labels,
    check_sets,
    class_label,
    just_measured,
    write_picture_files,
)
from training.watching.pictures import as_picture, grid, png

logger = logging.getLogger("main")

LARGEST = 128  # dots of a side that are drawn; larger pictures are thinned out, as they are drawn between two epochs


def sample_images(
    count: int = 16, worst: int = 16, sets: tuple[str, ...] | None = None, every_n_epochs: int = 1
) -> Callback:
    """The first images of the training set, and after each evaluation those of the highest cross entropy, as pictures.

    pictures/first_batch.png shows `count` of them, pictures/worst-<set>.png (and .json) the `worst` of each of `sets`, or else of
    every held-out one, with label > predicted below. Where the inputs are no images, the .json alone is written.
    """
    at_least(0, count=count, worst=worst)
    at_least(1, every_n_epochs=every_n_epochs)
    return SampleImages(count, worst, sets, every_n_epochs)


def verdict(output, target):
    """What the model made of one example; where it has many positions, its mean loss alone."""
    label, sound = class_label("sample_images", output, target)
    found = {"loss": cross_entropy(output, target), "unsound": ~sound}
    if label.ndim:
        return found
    return found | {
        "predicted": jnp.argmax(output).astype(jnp.int32),
        "label": label.astype(jnp.int32),
    }


class SampleImages:
    def __init__(self, count, worst, sets, every_n_epochs):
        self.count, self.worst, self.sets, self.every_n_epochs = count, worst, sets, every_n_epochs
        self.metrics = (
            {"sample_images": tracked(verdict, mode="CONCAT", phase="EVAL")} if worst else {}
        )

    def on_training_start(self, view):
        self.told = set()  # the sets of which it was said that they hold no images
        check_sets("sample_images", self.sets, view)
        dataset = view.sets.get("train")
        size = len(dataset) if has_items(dataset) else self.count
        if examples := self.examples("train", dataset, range(min(self.count, size))):
            captions = [
                str(c) if (c := class_of(label)) is not None else "" for _, label in examples
            ]
            drawn = png(grid([picture for picture, _ in examples], captions=captions))
            write_picture_files(view, {"first_batch.png": drawn})
            view.publish.image(view.step, "first_batch", drawn)

    def on_validation_end(self, view):
        self.show(view, just_measured("validation", self.sets, view))

    def on_test_end(self, view):
        self.show(view, just_measured("test", self.sets, view))

    def show(self, view, names):
        """The worst predictions in each of these sets."""
        for name in names if self.worst else ():
            found = view.arrays.get(f"{name}_sample_images")
            if found is None:
                self.tell(name, "is of unknown length, so its predictions are not gathered")
                continue
            check_labels("sample_images", name, int(found["unsound"].sum()))
            losses = np.where(
                np.isnan(found["loss"]), np.inf, found["loss"]
            )  # of a label outside the classes
            order = np.argsort(-losses, kind="stable")[: self.worst]
            worst = [described(found, int(i)) for i in order]
            examples = self.examples(name, view.sets.get(name), order)
            self.publish(view, name, worst, [picture for picture, _ in examples])

    def publish(self, view, name, worst, pictures):
        """The files of one set, and the picture for the trackers."""
        title, files = f"worst-{name}", {}
        if pictures:
            captions = [
                "" if one["label"] is None else f"{one['label']}>{one['predicted']}"
                for one in worst
            ]
            files[f"{title}.png"] = png(grid(pictures, captions=captions))
            for one, picture in zip(worst, pictures, strict=True):
                one["png"] = base64.b64encode(png(picture)).decode()
            view.publish.image(view.step, title, files[f"{title}.png"])
        told = {"set": name, "epoch": view.epoch, "step": view.step, "examples": worst}
        write_picture_files(view, {f"{title}.json": json.dumps(told).encode(), **files})

    def examples(self, name, dataset, indices):
        """(picture, label) of some examples of a set; none at all where there are no images, which is said once."""
        if not len(indices):
            return []
        if not has_items(dataset):
            self.tell(name, "comes in batches, so no single example can be shown")
            return []
        items = [dataset[int(i)] for i in indices]
        found = [
            (
                picture_in(item),
                item[1] if isinstance(item, tuple | list) and len(item) > 1 else None,
            )
            for item in items
        ]
        if any(picture is None for picture, _ in found):
            self.tell(name, f"holds no images ({form_of(items[0])}), so none are shown")
            return []
        return found

    def tell(self, name, why):
        """Say once why a set is not shown."""
        if name not in self.told:
            logger.info("sample_images: the %s set %s", name, why)
        self.told.add(name)


def described(found, i):
    """One prediction, as plain JSON."""
    label, predicted = (
        int(found[key][i]) if key in found else None for key in ("label", "predicted")
    )
    loss = float(found["loss"][i])
    return {
        "index": i,
        "label": label,
        "predicted": predicted,
        "loss": loss if math.isfinite(loss) else None,
    }


def picture_in(item):
    """The first image among the inputs of an example, small enough to draw quickly; None where there is none."""
    x = item[0] if isinstance(item, tuple | list) and item else item
    for _, leaf in named_nest(x):
        picture = as_picture(np.asarray(leaf))
        if picture is not None:
            step = -(-max(picture.shape[:2]) // LARGEST)
            return picture[::step, ::step]
    return None


def form_of(item):
    """What the inputs of an example are, in words."""
    x = item[0] if isinstance(item, tuple | list) and item else item
    return ", ".join(f"{np.asarray(leaf).dtype}{list(np.shape(leaf))}" for _, leaf in named_nest(x))


def class_of(label):
    """The class that a raw label tells, or None."""
    label = np.asarray(label)
    if label.ndim == 1 and label.dtype.kind == "f":
        return int(label.argmax())
    return int(label) if label.ndim == 0 and label.dtype.kind in "iub" else None
