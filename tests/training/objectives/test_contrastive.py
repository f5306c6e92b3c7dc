"""SimCLR: the loss against PyTorch's cross entropy and by hand, masks, and the linear probe."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.mlp import mlp
from model.projected import projected
from tests.model.compare import normal, quick_jit
from training.commands.start import checked_recipe
from training.fit import fit
from training.objectives.contrastive import nt_xent, simclr
from training.optimizers import adam
from training.update import gradient
from training.watching.callbacks.linear_probe import fitted, linear_probe
from utils import UserError
from wiring.build import build
from wiring.config import read_layers

T = 0.3
ALL = np.ones(5, bool)


@pytest.mark.slow
def test_the_loss_and_its_gradient_are_those_of_pytorch():
    torch = pytest.importorskip("torch")
    z = normal(0, 10, 4)
    tensor = torch.tensor(z, requires_grad=True)
    unit = torch.nn.functional.normalize(tensor)
    scores = (unit @ unit.T / T).masked_fill(torch.eye(10, dtype=bool), -1e9)
    target = (torch.arange(10) + 5) % 10
    each = torch.nn.functional.cross_entropy(scores, target, reduction="none")
    each.mean().backward()

    def mean(z):
        losses, matched = nt_xent(z, ALL, T)
        return losses.mean(), (losses, matched)

    grads, (losses, matched) = quick_jit(jax.grad(mean, has_aux=True))(z)
    np.testing.assert_allclose(losses, each.detach().reshape(2, 5).mean(0), rtol=1e-5)
    np.testing.assert_allclose(grads, tensor.grad, rtol=1e-4, atol=1e-6)
    right = (scores.argmax(1) == target).float().reshape(2, 5).mean(0)
    np.testing.assert_array_equal(matched, right)


@pytest.mark.slow
def test_what_fills_up_a_batch_is_neither_compared_nor_finite_by_chance():
    z = normal(0, 10, 4)
    rows = np.r_[0:3, 5:8]
    loss = quick_jit(nt_xent)
    slope_of = quick_jit(jax.grad(lambda z: nt_xent(z, np.arange(5) < 3, T)[0][:3].sum()))
    expected = loss(z[rows], ALL[:3], T)
    for filling in (0.0, 7.0):
        other = z.copy()
        other[[3, 4, 8, 9]] = filling
        found, slope = loss(other, np.arange(5) < 3, T), slope_of(other)
        assert np.isfinite(found[0]).all() and np.isfinite(slope).all() and not slope[3:5].any()
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a[:3], b, rtol=1e-5)
    alone, _ = loss(z[[0, 5]], ALL[:1], T)
    np.testing.assert_allclose(alone, 0, atol=1e-6)  # there is no other example


def test_one_example_alone_is_refused():
    options = {"objective": simclr, "loss": None, "optimizer": adam(0.01), "batch_size": 4}
    with pytest.raises(UserError, match=r"a batch has only one; .* lower training.accumulate"):
        fit(mlp((4,), 3, dims=(8,)), normal(0, 8, 4), **options, epochs=1, accumulate=4)


@pytest.mark.slow
def test_a_short_batch_has_the_gradient_of_its_genuine_examples():
    model = mlp((4,), 3, dims=(8,))
    shift = lambda key, x: x * jax.random.uniform(key, x.shape)  # noqa: E731
    params, state = model.init(jax.random.key(0))
    x = normal(0, 6, 4)
    objective = simclr(model, None, {}, (), (shift,), T)
    step, pieces = quick_jit(partial(gradient, objective)), []
    for filling in (0.0, 9.0):
        filled = x.copy()
        filled[4:] = filling
        batch, mask = (jnp.asarray(filled), jnp.zeros(6, int)), jnp.arange(6) < 4
        pieces.append(step(params, state, batch, mask, jax.random.key(1)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(pieces))
    jax.tree.map(np.testing.assert_array_equal, pieces[0][0], pieces[1][0])
    assert any(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(pieces[0][0]))


def test_the_probe_fits_as_least_squares_with_a_ridge():
    x, y = normal(0, 60, 5).astype(float), np.arange(60) % 3
    x[:, :3] += 2 * np.eye(3)[y]
    unit = (x - x.mean(0)) / (x.std(0) + 1e-6)
    # The ridge as rows of further examples, and no ridge for the constant.
    rows = np.r_[np.c_[unit, np.ones(60)], np.c_[np.sqrt(0.6) * np.eye(5), np.zeros(5)]]
    targets = np.r_[np.eye(3)[y], np.zeros((5, 3))]
    weight = np.linalg.lstsq(rows, targets, rcond=None)[0]
    expected = (rows[:60] @ weight).argmax(1)
    np.testing.assert_array_equal(fitted(x, y, 0.01)(x), expected)
    assert (expected == y).mean() > 0.8
    dead = np.c_[x, np.ones(60)]
    np.testing.assert_array_equal(fitted(dead, y, 0)(dead), fitted(x, y, 0)(x))


@pytest.mark.slow
def test_an_encoder_is_fitted_to_the_data():
    encoder = mlp((6,), 8, dims=(4,))
    fitted = encoder._replace(fit=lambda params, state, x: (params | {"seen": x.sum()}, state))
    model = projected((6,), fitted)
    params, _ = model.fit(*model.init(jax.random.key(0)), np.ones((2, 6), np.float32))
    assert params["encoder"]["seen"] == 12 and "projection" in params
    assert projected((6,), encoder).fit is None


@pytest.mark.slow
def test_a_run_reports_the_accuracy_of_the_probe_as_a_metric(caplog):
    random = np.random.default_rng(0)
    y = random.integers(0, 3, 301).astype(np.int32)
    x = (random.normal(size=(301, 6)) + 4 * np.eye(6)[y]).astype(np.float32)
    jitter = lambda key, x: x + jax.random.normal(key, x.shape)  # noqa: E731
    options = {"objective": simclr, "loss": None, "augment": [jitter], "optimizer": adam(0.01)}
    model = projected((6,), mlp((6,), 8, dims=(32,)))
    options |= {"batch_size": 64, "epochs": 3, "callbacks": [linear_probe(batch_size=70)]}
    caplog.set_level("INFO")
    run = fit(model, (x, y), (x[:50], y[:50]), **options)
    first, *_, last = run.history
    assert last["train_loss"] < first["train_loss"]
    assert last["test_matched"] > 5 / 99  # five times as often as by chance
    assert last["test_probe_accuracy"] > 0.95
    line = f"Epoch 3 [test] probe_accuracy @ {last['test_probe_accuracy']:.4f}"
    assert line in [record.getMessage() for record in caplog.records]


@pytest.mark.slow
def test_the_accuracy_of_the_probe_may_choose_the_best_checkpoint():
    config = Path(__file__).resolve().parents[3] / "configs" / "digits_simclr.json"
    config, _ = read_layers(config, ["checkpoint.monitor=test_probe_accuracy"], True)
    recipe, _ = checked_recipe(build(config, "digits_simclr.json"))
    assert recipe.checkpoint.sign() == -1
    config["callbacks"] = []
    with pytest.raises(UserError, match="'test_probe_accuracy' is not measured"):
        checked_recipe(build(config, "digits_simclr.json"))
