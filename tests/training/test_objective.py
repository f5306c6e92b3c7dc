"""The objectives, by their properties."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.base import Model
from model.mlp import mlp
from tests.runs import json_lines
from training.fit import evaluate, fit
from training.loss import cross_entropy, mse
from training.metrics import perplexity, rmse
from training.objective import cutmix, denoising, mixup, supervised
from training.optimizers import sgd
from training.preprocess import to_unit
from training.update import gradient_update
from utils import UserError

KEY = jax.random.key(0)


def images(rows=16):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (rows, 4, 4, 1)).astype(np.uint8)
    return x, rng.integers(0, 3, rows).astype(np.int32)


@pytest.mark.slow
def test_supervised_returns_values_of_each_example_and_finishes_their_means():
    model, batch = mlp((4, 4, 1), 3, dims=(8,)), images()
    params, state = model.init(KEY)
    objective = supervised(model, cross_entropy, {"perplexity": perplexity}, (to_unit,), ())
    losses, _, metrics = objective(params, state, batch, KEY, False)
    logits = model.apply(params, state, batch[0].astype(np.float32) / 255)[0]
    expected = -jax.nn.log_softmax(logits)[np.arange(16), batch[1]]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    reported = objective.finish({"perplexity": metrics["perplexity"].mean()})
    np.testing.assert_allclose(reported["perplexity"], np.exp(np.mean(expected)), rtol=1e-5)


@pytest.mark.slow
def test_augmentations_act_only_in_training_and_differ_by_example():
    identity = Model(
        lambda key: ({}, {}), lambda params, state, x, *, train=False, key=None: (x, state)
    )
    noise = lambda key, x: x + jax.random.uniform(key)  # noqa: E731
    objective = supervised(identity, lambda out, target: out.mean(), {}, (to_unit,), (noise,))
    x, y = images()
    x[:] = 0
    assert np.unique(objective({}, {}, (x, y), KEY, True)[0]).size == 16
    assert np.all(objective({}, {}, (x, y), KEY, False)[0] == 0)


@pytest.mark.slow
def test_the_same_augmentation_listed_twice_draws_independently():
    identity = Model(
        lambda key: ({}, {}), lambda params, state, x, *, train=False, key=None: (x, state)
    )
    noise = lambda key, x: x + jax.random.normal(key)  # noqa: E731
    objective = supervised(identity, lambda out, target: out.mean(), {}, (), (noise, noise))
    x = np.zeros((2000, 1), np.float32)
    losses = objective({}, {}, (x, x), KEY, True)[0]
    assert np.var(losses) == pytest.approx(2, rel=0.15)  # 4 if both drew the same


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("factory", [supervised, mixup, denoising])
def test_objectives_pass_train_to_the_model(factory, train):
    seen = []

    def apply(params, state, x, *, train=False, key=None):
        seen.append(train)
        return x, state

    x = np.zeros((4, 2), np.float32)
    factory(Model(lambda key: ({}, {}), apply), mse, {}, (), ())({}, {}, (x, x), KEY, train)
    assert seen == [train]


def test_mixup_mixes_inputs_and_losses_in_training_and_is_supervised_in_evaluation():
    # The model and the loss are linear, so the mixture can be computed by hand.
    model = Model(
        lambda key: ({}, {}),
        lambda params, state, x, *, train=False, key=None: (x.reshape(len(x), -1), state),
    )
    x, y = images()
    args = (model, lambda out, target: out.mean() * (1 + target), {}, (to_unit,), ())
    mixed = mixup(*args, alpha=0.4)({}, {}, (x, y), KEY, True)[0]
    means = (x / 255).mean((1, 2, 3))
    shares = np.linspace(0, 1, 100_001)[:, None]
    by_hand = (shares * means + (1 - shares) * means[::-1]) * (
        1 + shares * y + (1 - shares) * y[::-1]
    )
    assert np.abs(by_hand - np.asarray(mixed)).max(1).min() < 1e-4
    plain = supervised(*args)({}, {}, (x, y), KEY, False)[0]
    np.testing.assert_array_equal(mixup(*args, alpha=0.4)({}, {}, (x, y), KEY, False)[0], plain)


@pytest.mark.slow
def test_cutmix_pastes_one_rectangle_of_another_image_and_mixes_the_losses_by_its_area():
    seen = []

    def apply(params, state, x, *, train=False, key=None):
        seen.append(np.asarray(x)[..., 0])
        return x[:, 0, 0], state

    # Every pixel of an image holds its number, and the loss is the label.
    x = np.broadcast_to(np.arange(8, dtype=np.float32)[:, None, None, None], (8, 10, 14, 1))
    y = np.arange(8, dtype=np.float32)
    objective = cutmix(
        Model(lambda key: ({}, {}), apply), lambda out, target: target + 0 * out[0], {}, (), ()
    )
    shares = []
    for key in jax.random.split(KEY, 40):
        losses = objective({}, {}, (x, y), key, True)[0]
        of_other = seen[-1] != y[:, None, None]
        np.testing.assert_array_equal(
            seen[-1][of_other], np.broadcast_to(y[::-1, None, None], of_other.shape)[of_other]
        )
        cut = of_other[0]
        assert (of_other == cut).all()
        np.testing.assert_array_equal(cut, cut.any(1)[:, None] & cut.any(0))
        for line in (cut.any(1), cut.any(0)):
            assert np.abs(np.diff(np.pad(line, 1).astype(int))).sum() in (0, 2)  # one stretch
        shares.append(1 - cut.mean())
        np.testing.assert_allclose(losses, shares[-1] * y + (1 - shares[-1]) * y[::-1], rtol=1e-5)
    assert min(shares) < 0.4 and max(shares) > 0.95  # a rectangle may be cut off at the edge
    np.testing.assert_array_equal(objective({}, {}, (x, y), KEY, False)[0], y)
    with pytest.raises(ValueError, match=r"^cutmix: an example must be an image \(height"):
        objective({}, {}, (y[:, None], y), KEY, True)


@pytest.mark.slow
def test_an_evaluation_takes_the_mean_over_views_of_each_image():
    def apply(params, state, x, *, train=False, key=None):
        return jnp.exp(x[:, 1, 0, 0]), state  # no linear function, one pixel

    model, x = Model(lambda key: ({}, {}), apply), images()[0].astype(np.float32) / 255
    loss, batch = lambda out, target: out, (x, images()[1])
    flipped = (np.exp(x[:, 1, 0, 0]) + np.exp(x[:, 1, -1, 0])) / 2
    # Moved down and right by a pixel, the pixel (1, 0) is the mirrored (0, 1); up and left, (2, 1).
    moved = [x[:, 0, 1, 0], x[:, 0, -2, 0], x[:, 2, 1, 0], x[:, 2, -2, 0]]
    both = flipped / 2 + sum(map(np.exp, moved)) / 8
    for views, expected in (("flipped", flipped), ("flipped_and_shifted", both)):
        objective = supervised(model, loss, {}, (), (), views=views)
        np.testing.assert_allclose(objective({}, {}, batch, KEY, False)[0], expected, rtol=1e-5)
        plain = objective({}, {}, batch, KEY, True)[0]
        np.testing.assert_allclose(plain, np.exp(x[:, 1, 0, 0]), rtol=1e-5)
    with pytest.raises(ValueError, match=r"^views: an example must be an image \(height"):
        objective({}, {}, (x[:, 0], batch[1]), KEY, False)


def test_augmentations_of_raw_images_come_before_preprocessing():
    def inverted(key, x):
        assert x.dtype == np.uint8
        return 255 - x

    inverted.of_raw = True
    identity = Model(
        lambda key: ({}, {}), lambda params, state, x, *, train=False, key=None: (x, state)
    )
    halved = lambda key, x: x / 2  # noqa: E731
    augment = (halved, partial(inverted))
    objective = supervised(identity, lambda out, target: out.mean(), {}, (to_unit,), augment)
    x, y = images()
    expected = (1 - x / 255).mean((1, 2, 3)) / 2
    np.testing.assert_allclose(objective({}, {}, (x, y), KEY, True)[0], expected, rtol=1e-5)


@pytest.mark.slow
def test_denoising_targets_the_clean_input():
    seen = {}

    def apply(params, state, x, *, train=False, key=None):
        seen["noisy"] = x
        return jnp.zeros((len(x), 16)), state

    objective = denoising(
        Model(lambda key: ({}, {}), apply), mse, {"rmse": rmse}, (to_unit,), (), noise=0.5
    )
    x, y = images(rows=256)
    losses, _, metrics = objective({}, {}, (x, y), KEY, True)
    clean = x.astype(np.float32) / 255
    np.testing.assert_allclose(losses, (clean**2).mean((1, 2, 3)), rtol=1e-5)
    assert metrics["rmse"].shape == (256,)
    assert abs(np.std(seen["noisy"] - clean) - 0.5) < 0.02
    with pytest.raises(UserError, match=r"4 numbers, its output 16; .* model.args.num_classes=4"):
        objective({}, {}, (x[:, :2, :2], y), KEY, True)


def warmed_up(model, loss, metrics, preprocess, augment):
    """An objective that sees the step, and measures it."""
    plain = supervised(model, loss, metrics, preprocess, augment)

    def objective(params, state, batch, key, train, *, step):
        losses, state, values = plain(params, state, batch, key, train)
        return jnp.minimum(step / 9, 1) * losses, state, values | {"step": 0 * losses + step}

    return objective


def own_update(objective, optimizer, *, accumulate=1):
    """An update that knows nothing of the step that its objective sees."""
    return gradient_update(objective, optimizer, accumulate=accumulate)


@pytest.mark.slow
def test_an_objective_may_see_how_many_steps_were_trained(tmp_path):
    """In training, in evaluations of every kind, and in microbatches."""
    x = np.random.default_rng(0).normal(size=(48, 4)).astype(np.float32)
    data, model = (x, (x[:, 0] > 0).astype(np.int32)), mlp((4,), 2, dims=(3,))
    settings = {"optimizer": sgd(0.1), "objective": warmed_up, "update": own_update}
    settings |= {"epochs": 3, "batch_size": 8, "accumulate": 2, "metrics": [], "test_at": "end"}
    settings |= {"folder": tmp_path, "eval_initial": True}
    settings |= {"checkpoint": {"monitor": "val_step", "mode": "min"}}
    run = fit(model, data, data, data, **settings)
    assert [row["train_step"] for row in run.history] == [2.5, 8.5, 14.5]
    assert [row["val_step"] for row in run.history] == [6, 12, 18]
    rows = json_lines(tmp_path / "metrics.jsonl")
    assert [row["val_step"] for row in rows if row.get("initial")] == [0]
    assert [row["test_step"] for row in rows if row.get("final")] == [6]  # of the best checkpoint

    arguments = {"model": model, "params": run.params, "state": run.state, "data": data}
    arguments |= {"objective": warmed_up, "metrics": []}
    assert evaluate(**arguments, step=7)["step"] == 7
    with pytest.raises(UserError, match=r"^step: the objective needs it; .* step=run.step"):
        evaluate(**arguments)
