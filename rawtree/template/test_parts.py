"""Tests of the parts of this project: run `pytest` in this folder."""

import jax
import jax.numpy as jnp
import numpy as np
from rawtree.training.fit import fit
from rawtree.training.metrics import accuracy
from rawtree.training.optimizers import adamw

from my_data import spirals
from my_loss import focal
from my_model import small_net


def test_the_data_is_as_it_says():
    data = spirals(size=300)
    for name, dataset in data.load().items():
        x, _ = dataset[0]
        assert len(dataset) == data.sizes[name]
        assert (x.shape, x.dtype) == (data.example[0].shape, data.example[0].dtype)
        assert {int(label) for _, label in dataset} == set(range(data.num_classes))


def test_a_gradient_reaches_every_weight():
    model = small_net((2,), 3, width=8)
    params, state = model.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (5, 2))
    gradients = jax.grad(lambda params: (model.apply(params, state, x)[0] ** 2).sum())(params)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_the_loss_with_gamma_0_is_the_cross_entropy():
    logits = jnp.array([1.0, 2.0, -1.0])
    expected = np.log(np.exp(logits).sum()) - logits[1]
    np.testing.assert_allclose(focal(logits, 1, gamma=0.0), expected, rtol=1e-6)


def test_the_model_learns_the_data():
    sets = spirals().load()
    run = fit(
        small_net((2,), 3),
        sets["train"],
        sets["test"],
        loss=focal,
        metrics=[accuracy],
        optimizer=adamw(lr=0.01),
        epochs=10,
        batch_size=128,
    )
    assert run.history[-1]["test_accuracy"] > 0.9
