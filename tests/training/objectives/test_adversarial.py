"""Two networks: the update against two plain ones of Optax, resuming, bad steps, learning rates."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from model.gan import gan
from model.mlp import mlp
from model.unet import unet
from tests.model.compare import quick_jit
from training.base import TrainState
from training.fit import fit
from training.objectives.adversarial import adversarial, alternating
from training.optimizers import adam, sgd
from training.rows import GOOD
from training.transforms import clip_by_global_norm, frozen, groups
from training.update import step_key, with_refusal
from training.watching.callbacks.sample_pictures import sample_pictures
from utils import UserError, named_leaves

MODEL = gan((8, 8, 1), latent=4, width=4)
IMAGES = np.random.default_rng(0).uniform(size=(21, 8, 8, 1)).astype(np.float32)
KEY = jax.random.key(2)
UPDATE = partial(alternating, discriminator=adam(0.01, b1=0.5))
OPTIONS = {"objective": adversarial, "update": UPDATE, "loss": None, "optimizer": adam(0.02)}
OPTIONS |= {"batch_size": 8, "log": {"every_steps": 1}}


MODES = {"loss": "MEAN"}


def first_state(update):
    params, state = quick_jit(MODEL.init)(jax.random.key(1))
    opt, ema = update.init(params)
    numbers = jnp.bool(False), jnp.float32(1)
    return TrainState(jnp.int32(0), jnp.uint32(0), params, state, opt, ema, *numbers)


@pytest.mark.slow
def test_each_network_takes_the_step_of_its_own_optimizer():
    objective = adversarial(MODEL, None, {}, (), (), penalty=0.7)
    update = UPDATE(objective, sgd(0.3))
    batch = IMAGES[:8], np.zeros(8, np.int32)
    ts = first_state(update)
    new, row = quick_jit(with_refusal(update.step, MODES))(ts, batch, 6)

    def network(name, x, p):
        return MODEL.apply({name: p}, {}, x)[0]

    def noise_of(i):
        key = jax.random.fold_in(step_key(ts), i)
        return jax.random.normal(jax.random.split(key, 5)[1], (8, 4))

    def d_loss(d):
        made = network("generator", noise_of(0), ts.params["generator"])
        real, fake = network("discriminator", batch[0], d), network("discriminator", made, d)
        probability = optax.sigmoid_binary_cross_entropy
        both = probability(real, jnp.ones(8)) + probability(fake, jnp.zeros(8))
        slope = jax.vmap(jax.grad(lambda x: network("discriminator", x[None], d)[0]))(batch[0])
        return both[:6].mean() / 2 + 0.35 * (slope[:6] ** 2).sum((1, 2, 3)).mean()

    def g_loss(g, d):
        fake = network("discriminator", network("generator", noise_of(1), g), d)
        return optax.sigmoid_binary_cross_entropy(fake, jnp.ones(8))[:6].mean()

    @quick_jit
    def reference(params):
        d_tx, g_tx = optax.adam(0.01, b1=0.5), optax.sgd(0.3)
        d, g = params["discriminator"], params["generator"]
        d = optax.apply_updates(d, d_tx.update(jax.grad(d_loss)(d), d_tx.init(d))[0])
        value, grads = jax.value_and_grad(g_loss)(g, d)
        return optax.apply_updates(g, g_tx.update(grads, g_tx.init(g))[0]), d, value

    g, d, value = reference(ts.params)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)  # noqa: E731
    jax.tree.map(close, new.params, {"generator": g, "discriminator": d})
    close(row["values"]["loss"]["generator"] / 6, value)
    assert int(new.step) == 1 and int(row["bad"]) == GOOD


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_neither_network():
    objective = adversarial(MODEL, None, {}, (), ())
    update = UPDATE(objective, sgd(0.3))
    batch = IMAGES[:8].copy(), np.zeros(8, np.int32)
    batch[0][3] = np.inf
    ts = first_state(update)
    new, row = quick_jit(with_refusal(update.step, MODES, halts=False))(ts, batch, 8)
    jax.tree.map(np.testing.assert_array_equal, new.params, ts.params)
    jax.tree.map(np.testing.assert_array_equal, new.opt, ts.opt)
    assert int(row["bad"]) != GOOD and int(new.step) == 1


@pytest.mark.slow
def test_a_run_resumes_to_the_same_bits_and_draws_pictures(tmp_path):
    data, options = (IMAGES, np.zeros(21, np.int32)), OPTIONS | {"ema": 0.9}
    callbacks = [sample_pictures(count=4)]
    whole = fit(MODEL, data, folder=tmp_path / "a", epochs=3, callbacks=callbacks, **options)
    fit(MODEL, data, folder=tmp_path / "b", epochs=1, callbacks=callbacks, **options)
    resumed = fit(
        MODEL,
        data,
        folder=tmp_path / "b",
        epochs=3,
        resume="override",
        callbacks=callbacks,
        **options,
    )
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    pictures = [(tmp_path / name / "pictures" / "samples.png").read_bytes() for name in "ab"]
    assert pictures[0] == pictures[1] and pictures[0].startswith(b"\x89PNG")
    assert {"train_loss_generator", "train_loss_discriminator"} <= whole.history[-1].keys()


@pytest.mark.slow
def test_each_loss_has_a_gradient_for_its_own_network_alone():
    """So one optimizer may train both: no network helps the other one."""
    objective = adversarial(MODEL, None, {}, (), ())
    params, state = quick_jit(MODEL.init)(jax.random.key(1))

    def losses(params):
        return jax.tree.map(jnp.mean, objective(params, state, IMAGES[:8], KEY, True)[0])

    slopes = quick_jit(jax.jacrev(losses))(params)
    for loss in params:
        for network in params:
            changes = any(map(np.any, jax.tree.leaves(slopes[loss][network])))
            assert changes == (loss == network), (loss, network)


@pytest.mark.slow
def test_rules_choose_by_the_whole_names_of_the_params():
    still = groups([("generator/.*bias", frozen()), (".*", sgd(0.3))])
    update = UPDATE(adversarial(MODEL, None, {}, (), ()), still)
    batch = IMAGES[:8], np.zeros(8, np.int32)
    ts = first_state(update)
    new, _ = quick_jit(with_refusal(update.step, MODES, halts=False))(ts, batch, 8)
    before, after = (named_leaves(tree.params["generator"]) for tree in (ts, new))
    moved = {name for name in before if (np.asarray(before[name]) != after[name]).any()}
    assert moved and moved == {name for name in before if not name.endswith("bias")}


def test_what_does_not_fit_is_named():
    data = IMAGES, np.zeros(21, np.int32)
    net = mlp((8, 8, 1), 1)
    plain = {"update": UPDATE, "optimizer": adam(), "epochs": 1, "batch_size": 8}
    with pytest.raises(UserError, match="alternating needs a model with the params 'discrim"):
        fit(mlp((8, 8, 1), 2), data, **plain)
    with pytest.raises(UserError, match="objective: adversarial needs a model that makes"):
        fit(net, data, **OPTIONS, epochs=1)
    with pytest.raises(UserError, match="objective: adversarial needs a model that makes"):
        adversarial(unet((8, 8, 1), 2), None, {}, (), ())
    with pytest.raises(UserError, match=r"update\.args\.discriminator: takes no step"):
        alternating(None, adam(), discriminator=clip_by_global_norm(1.0))
    with pytest.raises(
        UserError, match="sample_pictures: the model does not make pictures from noise"
    ):
        sample_pictures().check(net, None)
