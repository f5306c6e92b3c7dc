"""Diffusion: how an image turns into noise as time passes, and how a trained model turns noise into
images.

At time t from 0 to 1, an image x has become z = signal(t) * x + noise(t) * epsilon, with standard
normal epsilon. The model, such as `unet`, takes {"image": z, "time": t, "label": class} and
predicts epsilon, or the velocity v = signal(t) * epsilon - noise(t) * x (Salimans and Ho, 2022).
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from model.base import Model

NO_CLASS = -1  # the label for which a model predicts without knowing the class
EDGE = math.atan(math.exp(-5))  # the first and last ratio of noise and signal: e^-5 and e^5


def levels(
    time: float | Float[Array, "*shape"],
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """(signal, noise), whose squares add up to 1: the cosine schedule (Nichol and Dhariwal, 2021)
    without its ends, where nothing is left of the noise or of the image."""
    angle = EDGE + time * (math.pi / 2 - 2 * EDGE)
    return jnp.cos(angle), jnp.sin(angle)


def with_noise(
    x: Float[Array, "batch *shape"],
    epsilon: Float[Array, "batch *shape"],
    time: Float[Array, "batch"],
) -> Float[Array, "batch *shape"]:
    """Images x at times (B,)."""
    signal, noise = levels(per_image(time, x))
    return signal * x + noise * epsilon


def target(
    prediction: str,
    x: Float[Array, "batch *shape"],
    epsilon: Float[Array, "batch *shape"],
    time: Float[Array, "batch"],
) -> Float[Array, "batch *shape"]:
    """The value that the model has to predict, "v" or "epsilon"."""
    signal, noise = levels(per_image(time, x))
    return signal * epsilon - noise * x if prediction == "v" else epsilon


def parts(
    prediction: str,
    z: Float[Array, "batch *shape"],
    output: Float[Array, "batch *shape"],
    time: Float[Array, "batch"],
) -> tuple[Float[Array, "batch *shape"], Float[Array, "batch *shape"]]:
    """(x, epsilon) of the images z, from the output of the model."""
    signal, noise = levels(per_image(time, z))
    if prediction == "v":
        return signal * z - noise * output, noise * z + signal * output
    return (z - noise * output) / signal, output


def per_image(
    time: Float[Array, "batch"], x: Float[Array, "batch *shape"]
) -> Float[Array, "batch *ones"]:
    """Times (B,) in a shape that broadcasts with images x."""
    return time.reshape(time.shape + (1,) * (x.ndim - time.ndim))


def sample(
    model: Model,
    params: PyTree,
    key: Array,
    labels: ArrayLike | Sequence[int],
    *,
    state: PyTree | None = None,
    steps: int = 50,
    guidance: float = 1.0,
    prediction: str = "v",
    bounds: tuple[float, float] | None = (-1.0, 1.0),
) -> Float[Array, "batch *shape"]:
    """Images that the model makes of noise in `steps` steps of DDIM (Song et al., 2021).

    `labels` are one class per image, -1 for none, or the number of images without a class. With a
    `guidance` above 1, the output for the class is moved away from that without it (Ho and
    Salimans, 2022); 1 is the class alone, 0 no class. `prediction` is that of the training.
    `bounds` are the values that a pixel can have, or None if there are none. The same key gives the
    same images.
    """
    if not sees_noise(model):
        raise ValueError("the model does not make images from noise; use one such as `unet`")
    if steps < 1:
        raise ValueError(f"steps: must be at least 1, got {steps}")
    if prediction not in ("v", "epsilon"):
        raise ValueError(f"prediction: must be 'v' or 'epsilon', got {prediction!r}")
    given = np.asarray(labels)
    count = int(given) if given.ndim == 0 else len(given)
    if given.ndim > 1 or given.dtype.kind not in "iu" or count < 1:
        raise ValueError(f"labels: must be one integer per image, or a number of images: {labels}")
    labels = np.full(count, NO_CLASS) if given.ndim == 0 else given
    inputs = inputs_of(model)
    if "label" not in inputs and labels.max() != NO_CLASS:
        raise ValueError("labels: the model knows no classes; pass a number of images")
    classes = class_count(params)
    if classes and not NO_CLASS <= labels.min() <= labels.max() < classes:
        wrong = next(int(label) for label in labels if not NO_CLASS <= label < classes)
        known = f"the model has {classes}, 0 to {classes - 1}, and -1 is none"
        raise ValueError(f"labels: there is no class {wrong}; {known}")
    z = jax.random.normal(key, (len(labels), *inputs["image"].shape))
    step = compiled(model, float(guidance), prediction, bounds and tuple(bounds))
    times = np.linspace(1, 0, steps + 1, dtype=np.float32)
    x = z
    for time, later in pairwise(times):
        z, x = step(params, state or {}, z, labels.astype(np.int32), time, later)
    return x


def class_count(params: PyTree) -> int | None:
    """The number of classes of a model whose table `label` has a row for no class and one for each
    of them, as that of `unet`; None for other models."""
    table = params.get("label") if isinstance(params, dict) else None
    weight = table.get("weight") if isinstance(table, dict) else None
    return None if weight is None else weight.shape[-2] - 1


def inputs_of(model: Model) -> PyTree:
    """The shapes of one example for a model whose x is not that of the data; None for others."""
    inputs = getattr(model, "inputs", None)
    return inputs() if inputs else None


def sees_noise(model: Model) -> bool:
    """Whether a model takes a noisy image and its time, as `unet` does."""
    inputs = inputs_of(model)
    return isinstance(inputs, dict) and {"image", "time"} <= inputs.keys()


@lru_cache(16)
def compiled(
    model: Model, guidance: float, prediction: str, bounds: tuple[float, float] | None
) -> Callable:
    """The program of one step: from the images at a time to the images at a smaller time."""

    def step(
        params: PyTree,
        state: PyTree,
        z: Float[Array, "batch *shape"],
        labels: Int[Array, "batch"],
        time: float | Array,
        later: float | Array,
    ) -> tuple[Float[Array, "batch *shape"], Float[Array, "batch *shape"]]:
        time, later = (jnp.full(len(z), t) for t in (time, later))
        output = guided(model, params, state, {"image": z, "time": time, "label": labels}, guidance)
        x, epsilon = parts(prediction, z, output, time)
        if bounds:
            signal, noise = levels(per_image(time, z))
            x = jnp.clip(x, *bounds)
            epsilon = (z - signal * x) / noise  # which again makes z, together with x
        return with_noise(x, epsilon, later), x

    return jax.jit(step)


def guided(
    model: Model, params: PyTree, state: PyTree, x: dict[str, Array], guidance: float
) -> Array:
    """The output of the model, with classifier-free guidance."""
    without = x | {"label": jnp.full_like(x["label"], NO_CLASS)}
    if "label" not in inputs_of(model):
        x = {name: value for name, value in x.items() if name != "label"}
        return model.apply(params, state, x)[0]
    if guidance in (0, 1):
        return model.apply(params, state, x if guidance else without)[0]
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), x, without)
    output, plain = jnp.split(model.apply(params, state, both)[0], 2)
    return plain + guidance * (output - plain)
