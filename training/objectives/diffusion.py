"""Diffusion: a model learns to predict the noise in images, and can then make images from noise."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from model import diffusion
from model.base import Model
from training.base import (
    Functions,
    LossFunction,
    Measured,
    Metrics,
    Objective,
)
from training.objective import finish_means, inputs, scored, x_of
from utils import UserError
from utils.forms import Share, checked


@checked
def denoising_diffusion(
    model: Model,
    loss: LossFunction,
    metrics: Metrics,
    preprocess: Functions,
    augment: Functions,
    prediction: Literal["v", "epsilon"] = "v",
    drop_label: Share = 0.1,
) -> Objective:
    """Train a model such as `unet` to predict the noise in images with any amount of it, so that
    model/diffusion.py can make images. The loss compares the model's output with the value that
    `prediction` names. In training, a label is dropped with the probability `drop_label`, so that
    the model also learns to predict without labels, which guidance needs."""
    if not diffusion.sees_noise(model):
        raise UserError(
            "objective: denoising_diffusion needs a model that takes an image, a time and a label "
            "and has `inputs` (model/base.py), such as unet"
        )

    def objective(
        params: PyTree, state: PyTree, batch: PyTree, key: Array, train: bool
    ) -> Measured:
        augment_key, noise_key, time_key, drop_key, model_key = jax.random.split(key, 5)
        augmentation = augment if train else ()
        clean, _ = inputs(preprocess, augmentation, augment_key, x_of(batch), None)
        epsilon = jax.random.normal(noise_key, clean.shape, clean.dtype)
        # Evenly spread from a random start, so that the losses of batches differ less.
        time = (jax.random.uniform(time_key) + jnp.arange(len(clean)) / len(clean)) % 1
        x = {"image": diffusion.with_noise(clean, epsilon, time), "time": time}
        if model.inputs and "label" in model.inputs():
            label: Any = batch[1] if isinstance(batch, tuple | list) else None
            if getattr(label, "ndim", None) != 1 or not jnp.issubdtype(label.dtype, jnp.integer):
                fix = "for other targets, give the model num_classes 0"
                raise UserError(f"denoising_diffusion: a label must be one integer; {fix}")
            dropped = jax.random.uniform(drop_key, label.shape) < (drop_label if train else 0)
            x["label"] = jnp.where(dropped, diffusion.NO_CLASS, label.astype(jnp.int32))
        output, state = model.apply(params, state, x, train=train, key=model_key)
        wanted = diffusion.target(prediction, clean, epsilon, time)
        losses, values = scored(loss, metrics, output, wanted)
        return losses, state, values

    sample = partial(diffusion.sample, model, prediction=prediction)
    return Objective(objective, finish_means(metrics), sample)
