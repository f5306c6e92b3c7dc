"""Show the pictures that a model makes from noise."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from model.base import Model
from training.base import Callback
from training.observers import EVERY_EPOCH, Every
from training.watching.callbacks.common import pictures_of
from training.watching.pictures import grid, png
from training.watching.view import View
from utils import UserError
from utils.forms import Count, CountOrZero, checked


@checked
def sample_pictures(
    count: Count = 64, seed: CountOrZero = 0, every: Every = EVERY_EPOCH
) -> Callback:
    """Draw `count` pictures that a model such as `gan` makes from noise, as often as `every` says.

    They are in pictures/samples.png, in the report and on trackers. The noise is the same at all
    epochs, so that the pictures can be compared.
    """
    return SamplePictures(count, seed, every)


@dataclass
class SamplePictures:
    count: int
    seed: int
    every: Every

    def check(self, model: Model, data: Any) -> None:
        """Refuse a model that does not make pictures from noise."""
        inputs = getattr(model, "inputs", None)
        spec = inputs() if inputs else None
        if not isinstance(spec, jax.ShapeDtypeStruct):
            why = "the model does not make pictures from noise, as `gan` does"
            raise UserError(f"sample_pictures: {why}")
        self.shape = spec.shape

    def on_start(self, view: View) -> None:
        self.check(view.model, None)

    def on_steps(self, view: View) -> None:
        noise = np.random.default_rng(self.seed).normal(size=(self.count, *self.shape))
        made = np.asarray(view.apply(noise.astype(np.float32)))
        pictures = pictures_of("sample_pictures", [*np.clip(made, 0, 1)])
        view.publish.image(view.step, "samples", png(grid(pictures, scale=2)))
