"""Diffusion: the objective, and samples against distributions whose exact denoiser is known."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import diffusion
from model.base import Model
from model.diffusion import levels, sample, target, with_noise
from model.gan import gan
from model.mlp import mlp
from model.unet import unet
from training.fit import fit
from training.loss import mse
from training.objectives.diffusion import denoising_diffusion
from training.optimizers import sgd
from training.watching.callbacks.draw_samples import draw_samples
from utils import UserError

pytestmark = pytest.mark.contract

KEY = jax.random.key(0)
SHAPE = (2, 3, 1)


def model_of(predict, seen=None):
    """A model without weights: predict(z, time, label), with time and label in z's form."""

    def apply(params, state, x, *, train=False, key=None):
        if seen is not None:
            seen.append(x | {"train": train})
        time, label = (x[name].reshape(-1, 1, 1, 1) for name in ("time", "label"))
        return predict(x["image"], time, label), state

    shapes = {"image": jax.ShapeDtypeStruct(SHAPE, jnp.float32)}
    shapes |= {"time": jax.ShapeDtypeStruct((), jnp.float32)}
    shapes |= {"label": jax.ShapeDtypeStruct((), jnp.int32)}
    return Model(lambda key: ({}, {}), apply, inputs=lambda: shapes)


def denoiser(prediction, mean, deviation):
    """The best prediction for pixels that are normal with a mean, by the label, and deviation."""

    def predict(z, time, label):
        signal, noise = levels(time)
        centre, variance = mean(label), signal**2 * deviation**2 + noise**2
        x = centre + signal * deviation**2 / variance * (z - signal * centre)
        epsilon = (z - signal * x) / noise
        return signal * epsilon - noise * x if prediction == "v" else epsilon

    return model_of(predict)


def test_the_schedule_goes_from_the_image_to_noise_and_keeps_the_variance():
    time = jnp.linspace(0, 1, 11)
    signal, noise = levels(time)
    np.testing.assert_allclose(signal**2 + noise**2, 1, rtol=1e-6)
    np.testing.assert_allclose(signal[::-1], noise, atol=1e-6)
    assert (jnp.diff(noise) > 0).all() and noise[0] < 1 / 127  # less than a step of a byte
    ratios = np.log(signal / noise)
    np.testing.assert_allclose([ratios[0], ratios[-1]], [5, -5], rtol=1e-4)


@pytest.mark.parametrize("prediction", ["v", "epsilon"])
def test_image_and_noise_are_found_again_from_what_the_model_predicts(prediction):
    x, epsilon = jax.random.normal(KEY, (2, 5, *SHAPE))
    time = jnp.linspace(0.05, 0.95, 5)
    z = with_noise(x, epsilon, time)
    found = diffusion.parts(prediction, z, target(prediction, x, epsilon, time), time)
    np.testing.assert_allclose(found[0], x, atol=1e-4)
    np.testing.assert_allclose(found[1], epsilon, atol=1e-4)


@pytest.mark.parametrize("prediction", ["v", "epsilon"])
@pytest.mark.parametrize("bounds", [None, (-1.0, 1.0)])
def test_a_model_that_knows_only_one_image_samples_exactly_it(prediction, bounds):
    image = lambda label: jnp.where(label == 1, 0.7, -0.4)  # noqa: E731
    model = denoiser(prediction, image, 0.0)
    for steps in (1, 7):
        options = {"steps": steps, "prediction": prediction, "bounds": bounds}
        images = sample(model, {}, KEY, [1, 0, -1], **options)
        expected = np.broadcast_to(np.reshape([0.7, -0.4, -0.4], (3, 1, 1, 1)), (3, *SHAPE))
        np.testing.assert_allclose(images, expected, atol=1e-4)


@pytest.mark.parametrize("prediction", ["v", "epsilon"])
def test_samples_of_a_normal_distribution_are_those_of_its_flow(prediction):
    """On the way, a pixel keeps its place in the distribution of its time, in deviations."""
    mean, deviation = 0.5, 0.2
    model = denoiser(prediction, lambda label: mean, deviation)
    (signal, noise), last = levels(1.0), levels(0.0)
    start = jax.random.normal(KEY, (4, *SHAPE))
    place = (start - signal * mean) / jnp.sqrt(signal**2 * deviation**2 + noise**2)
    exact = mean + deviation * place  # up to the noise that is left at the end
    errors = []
    for steps in (20, 40, 320):
        options = {"steps": steps, "prediction": prediction, "bounds": None}
        errors.append(np.abs(sample(model, {}, KEY, 4, **options) - exact).max())
    assert errors[2] < 5e-3 and last[1] < 0.01
    assert 1.7 < errors[0] / errors[1] < 2.3  # of first order


@pytest.mark.slow
def test_the_same_key_gives_the_same_images_and_bounds_hold():
    model = denoiser("v", lambda label: 0.0, 1.5)
    images = sample(model, {}, KEY, 5, steps=5)
    np.testing.assert_array_equal(images, sample(model, {}, KEY, [-1] * 5, steps=5))
    assert (images != sample(model, {}, jax.random.key(1), 5, steps=5)).any()
    assert np.abs(images).max() == 1
    assert np.abs(sample(model, {}, KEY, 5, steps=5, bounds=None)).max() > 1


def test_guidance_moves_the_output_away_from_that_without_a_class():
    x = {"image": jnp.ones((2, *SHAPE)), "time": jnp.full(2, 0.5), "label": jnp.array([3, 5])}
    model = model_of(lambda z, time, label: label * z)
    for guidance in (0.0, 1.0, 2.5):
        output = diffusion.guided(model, {}, {}, x, guidance)[:, 0, 0, 0]
        np.testing.assert_allclose(output, [-1 + guidance * 4, -1 + guidance * 6])


@pytest.mark.slow
def test_a_model_without_classes_draws_none():
    model = unet((4, 4, 1), 0, widths=(4,), groups=2)
    params, state = jax.jit(model.init)(jax.random.key(0))
    with pytest.raises(ValueError, match="labels: the model knows no classes"):
        sample(model, params, KEY, [-1, 0], state=state, steps=1)
    assert sample(model, params, KEY, [-1, -1], state=state, steps=1).shape == (2, 4, 4, 1)
    with pytest.raises(UserError, match="draw_samples: labels: the model knows no classes"):
        draw_samples((0, -1)).check(model, SimpleNamespace(num_classes=10))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps: must be at least 1"),
        ({"prediction": "x"}, "prediction: must be 'v' or"),
        ({"model": mlp((4,), 2)}, "the model does not make images from noise"),
        ({"labels": 0}, "labels: must be one integer per image, or a number of images"),
        ({"labels": -3}, "labels: must be one integer per image, or a number of images"),
        ({"labels": [0.5]}, "labels: must be one integer per image, or a number of images"),
    ],
)
def test_wrong_arguments_of_a_sample(options, message):
    model = options.pop("model", model_of(lambda z, *_: z))
    with pytest.raises(ValueError, match=message):
        sample(model, {}, KEY, **{"labels": 2, **options})


# The objective.


def batch(rows=400):
    x = np.random.default_rng(0).uniform(-1, 1, (rows, *SHAPE)).astype(np.float32)
    return x, (np.arange(rows) % 3).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("prediction", ["v", "epsilon"])
def test_the_loss_compares_the_output_with_what_was_mixed_into_the_image(prediction):
    seen, (x, y) = [], batch()
    model = model_of(lambda z, *_: 0 * z, seen)
    args = (model, mse, {"doubled": lambda output, wanted: 2 * mse(output, wanted)}, (), ())
    objective = denoising_diffusion(*args, prediction=prediction)
    losses, _, metrics = objective({}, {}, (x, y), KEY, False)
    [given] = seen
    signal, noise = levels(given["time"].reshape(-1, 1, 1, 1))
    epsilon = (given["image"] - signal * x) / noise
    assert abs(np.mean(epsilon)) < 0.05 and abs(np.std(epsilon) - 1) < 0.05
    wanted = epsilon if prediction == "epsilon" else signal * epsilon - noise * x
    np.testing.assert_allclose(losses, (wanted**2).mean((1, 2, 3)), rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(metrics["doubled"], 2 * losses)
    time = np.sort(given["time"])
    np.testing.assert_allclose(np.diff(time), 1 / 400, atol=1e-5)  # all degrees of noise alike
    # The key of an evaluation decides all of it.
    again = objective({}, {}, (x, y), KEY, False)[0]
    np.testing.assert_array_equal(again, losses)
    assert (objective({}, {}, (x, y), jax.random.key(1), False)[0] != losses).all()


@pytest.mark.slow
def test_labels_are_dropped_in_training_only():
    seen, (x, y) = [], batch()
    args = (model_of(lambda z, *_: z, seen), mse, {}, (), ())
    objective = denoising_diffusion(*args, drop_label=0.25)
    for train in (True, False):
        objective({}, {}, (x, y), KEY, train)
    dropped = np.asarray(seen[0]["label"]) == diffusion.NO_CLASS
    assert 0.15 < dropped.mean() < 0.35
    np.testing.assert_array_equal(np.asarray(seen[0]["label"])[~dropped], y[~dropped])
    np.testing.assert_array_equal(seen[1]["label"], y)
    assert [given["train"] for given in seen] == [True, False]


def test_the_objective_samples_by_its_own_prediction():
    for prediction in ("v", "epsilon"):
        model = denoiser(prediction, lambda label: 0.5, 0.0)
        objective = denoising_diffusion(model, mse, {}, (), (), prediction=prediction)
        np.testing.assert_allclose(objective.sample({}, KEY, 2, steps=3), 0.5, atol=1e-4)


@pytest.mark.slow
def test_images_without_labels_train_a_model_without_classes():
    x = np.random.default_rng(0).normal(size=(12, 4, 4, 1)).astype(np.float32)
    options = {"objective": denoising_diffusion, "loss": mse, "batch_size": 4, "epochs": 1}
    run = fit(unet((4, 4, 1), 0, widths=(4,), groups=2), x, optimizer=sgd(0.1), **options)
    assert np.isfinite(run.history[-1]["train_loss"])


def test_a_model_of_noise_alone_is_refused():
    net = gan((8, 8, 1), latent=4, width=4)
    with pytest.raises(UserError, match="needs a model that takes an image, a time and a label"):
        denoising_diffusion(net, mse, {}, (), ())
    with pytest.raises(ValueError, match="the model does not make images from noise"):
        sample(net, {}, KEY, 2)
    with pytest.raises(UserError, match="draw_samples: the model makes no images"):
        draw_samples().check(net, None)


def test_a_model_that_takes_plain_images_is_refused():
    with pytest.raises(UserError, match="needs a model that takes an image, a time and a label"):
        denoising_diffusion(mlp((4,), 2), mse, {}, (), ())
