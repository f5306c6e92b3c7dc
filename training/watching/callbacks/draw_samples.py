"""Let a model that is trained to make images make some while it is trained."""

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from jaxtyping import Float

from model.base import Model
from model.diffusion import class_count, sees_noise
from training.base import Callback
from training.observers import EVERY_EPOCH, Every
from training.watching.callbacks.common import named, pictures_of
from training.watching.pictures import grid, png
from training.watching.view import View
from utils import UserError
from utils.forms import Count, CountOrZero, NonNegative, checked

logger = logging.getLogger("main")


@checked
def draw_samples(
    labels: tuple[int, ...] = (-1,),
    each: Count = 8,
    steps: Count = 50,
    guidance: NonNegative = 1.0,
    bounds: tuple[float, float] | None = (-1.0, 1.0),
    seed: CountOrZero = 0,
    every: Every = EVERY_EPOCH,
) -> Callback:
    """Draw `each` images of each of the classes `labels`; -1 is any class.

    It does so as often as `every` says, after each epoch or after so many steps, with the weights
    that are evaluated. `sample` in model/diffusion.py explains `steps`, `guidance` and
    `bounds`. The seed is always the same, so that the images can be compared. They are in
    pictures/samples.png, in the report and on trackers.
    """
    if not labels:
        raise ValueError("labels: is empty; give at least one class, -1 for any")
    if min(labels) < -1:
        raise ValueError(f"labels: must be classes from 0, or -1 for any, got {min(labels)}")
    if bounds is not None and not bounds[0] < bounds[1]:
        raise ValueError(f"bounds: must be the smallest and the largest value, got {bounds}")
    options = {"steps": steps, "guidance": guidance, "bounds": bounds, "seed": seed}
    return DrawSamples(labels, each, options, every)


@dataclass
class DrawSamples:
    labels: tuple[int, ...]
    each: int
    options: dict[str, Any]
    every: Every

    def check(self, model: Model, data: Any) -> None:
        if not sees_noise(model):
            raise UserError(
                "draw_samples: the model makes no images; it needs one such as unet, trained by "
                "the objective denoising_diffusion"
            )
        assert model.inputs  # it sees noise
        if "label" not in model.inputs() and max(self.labels) >= 0:
            fix = "pass -1 for each image, as [-1, -1]"
            raise UserError(f"draw_samples: labels: the model knows no classes; {fix}")
        count = getattr(data, "num_classes", None)
        if count is not None and max(self.labels) >= count:
            found = f"labels: there is no class {max(self.labels)}"
            raise UserError(f"draw_samples: {found}; the data has {count}, 0 to {count - 1}")

    def on_start(self, view: View) -> None:
        # `fit` has no number of classes from the data, but the model may have a table of them.
        self.check(view.model, SimpleNamespace(num_classes=class_count(view.params)))
        self.drawn = None  # the last step after which the model has drawn

    def on_steps(self, view: View) -> None:
        """Draw the images, one column for each class, and publish them."""
        if view.step == self.drawn:
            return  # the last step of an epoch
        self.drawn = view.step
        labels = np.tile(self.labels, self.each)
        images = np.asarray(view.sample(labels, **self.options), np.float32)
        broken = ~np.isfinite(images).all(axis=tuple(range(1, images.ndim)))
        if broken.any():
            classes = ", ".join(map(str, sorted({int(label) for label in labels[broken]})))
            message = "draw_samples: pixels are NaN for the labels %s; does the data have them?"
            logger.warning(message, classes)
        pictures = pictures_of("draw_samples", [self.in_unit(image) for image in images])
        if len(self.labels) > 1:
            names = [named(label, view.classes) if label >= 0 else "any" for label in labels]
            sheet = grid(pictures, columns=len(self.labels), captions=names)
        else:
            sheet = grid(pictures)
        view.publish.image(view.step, "samples", png(sheet))
        logger.info("Step %d [sample] %d images in pictures/samples.png", view.step, len(images))

    def in_unit(self, image: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """Pixels from 0 to 1; without bounds, from the smallest to the largest of the image."""
        low, high = self.options["bounds"] or (np.nanmin(image), np.nanmax(image))
        return np.clip((image - low) / max(high - low, 1e-30), 0, 1)
