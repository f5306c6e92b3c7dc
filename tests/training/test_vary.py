"""training.vary: replicas that differ in numbers, within one program."""

import copy
import json

import jax
import numpy as np
import pytest

from data_loader.base import Arrays
from tests.processes import run
from training.devices.sharding import Plan
from training.engine import Trainer
from training.recipe import compose
from utils import UserError, named_leaves
from wiring.build import build
from wiring.config import override
from wiring.vary import of_replica

RNG = np.random.default_rng(0)
SETS = {
    "train": Arrays(RNG.integers(0, 255, (64, 28, 28, 1), np.uint8), RNG.integers(0, 10, 64)),
    "test": Arrays(RNG.integers(0, 255, (32, 28, 28, 1), np.uint8), RNG.integers(0, 10, 32)),
}
VARY = {
    "optimizer.1.args.lr": [0.03, 0.001],
    "optimizer.1.args.weight_decay": [0, 0.5],
    "optimizer.0.args.max_norm": [1, 0.1],
    "loss.args.label_smoothing": [0, 0.2],
    "schedule.args.end": [0.5, 0.1],
    "seed": [5, 5],
}
CONFIG = {
    "title": "vary",
    "model": {"name": "mlp", "args": {"dims": [16]}},
    "data": "digits",
    "loss": {"name": "cross_entropy", "args": {"label_smoothing": 0.3}},
    "optimizer": [
        {"name": "clip_by_global_norm", "args": {"max_norm": 2.0}},
        {"name": "adamw", "args": {"lr": 0.5}},
    ],
    "schedule": {"name": "warmup_cosine", "args": {"warmup_steps": 2}},
    "loader": {"batch_size": 16},
    "training": {"epochs": 1, "replicas": 2, "vary": VARY, "limit_batches": 4},
}


def changed(**training):
    config = copy.deepcopy(CONFIG)
    config["training"] |= training
    return config


def recipe_of(config):
    parts = build(config, "config.json")
    return compose(parts, Plan.on_paper(parts.mesh, parts.sharding))


def trained(config, stacked=None):
    """(the weights of each replica after four steps, the tallies of an evaluation)"""
    trainer = Trainer(recipe_of(config), SETS, stacked)
    trainer.start()
    trainer.begin(1)
    while trainer.train(4)[0]:
        pass
    tallies = trainer.evaluate("test")
    weights = jax.device_get([ts.params for ts in trainer.replica_states()])
    trainer.close()
    return weights, tallies


def alone(replica):
    """The config of a run of its own with the numbers of a replica."""
    config = changed(replicas=1, vary=None)
    for path, values in VARY.items():
        config = override(config, f"{path}={values[replica]}")
    return config


def assert_close(a, b, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), a, b)


@pytest.mark.slow
def test_each_replica_computes_what_a_run_with_its_numbers_computes():
    singles = [trained(alone(replica)) for replica in range(2)]
    for stacked in (False, True):
        weights, sums = trained(CONFIG, stacked)
        for replica, (own, own_sums) in enumerate(singles):
            assert_close(weights[replica], own[0], rtol=2e-4, atol=2e-6)
            assert_close(sums[replica].tree(), own_sums[0].tree(), rtol=1e-4)
    far = jax.tree.map(lambda a, b: np.abs(a - b).max(), singles[0][0][0], singles[1][0][0])
    assert max(jax.tree.leaves(far)) > 0.01


@pytest.mark.slow
def test_a_number_of_the_first_params_is_that_of_each_replica():
    """layer_scale is what a factor of each feature begins with."""
    model = {"name": "convnext", "args": {"dims": [8], "depths": [1]}}
    config = changed(vary={"model.args.layer_scale": [0.25, 0.5]}) | {
        "model": model,
        "preprocess": ["to_unit"],
    }
    for stacked in (False, True):
        trainer = Trainer(recipe_of(config), SETS, stacked)
        trainer.start()
        leaves = [named_leaves(ts.params) for ts in trainer.replica_states()]
        scales = [
            {float(a.ravel()[0]) for n, a in each.items() if n.endswith("scale")} - {1.0}
            for each in leaves
        ]
        trainer.close()
        assert scales == [{0.25}, {0.5}]


def test_the_log_has_the_learning_rate_of_each_replica():
    rates = recipe_of(CONFIG).rates
    assert list(rates) == ["learning_rate/0", "learning_rate/1"]
    assert [float(rate(2)) for rate in rates.values()] == pytest.approx([0.03, 0.001])


def test_the_replicas_have_one_seed_unless_it_varies():
    assert recipe_of(CONFIG).seeds == (5, 5)
    assert recipe_of(changed(vary={"optimizer.1.args.lr": [1, 2]})).seeds == (0, 0)
    assert recipe_of(changed(vary=None)).seeds == (0, 1)


def test_the_config_of_one_replica_has_its_numbers():
    for replica in range(2):
        assert of_replica(CONFIG, replica) == alone(replica)
    assert of_replica(alone(0), 1) == alone(0)
    for vary in ("lr", {"model.args.dims": 3}, {"loss.args.label_smoothing": ["a", "b"]}):
        assert of_replica(changed(vary=vary), 1) == changed(vary=vary)  # `build` refuses these


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ({"optimizer.1.args.lr": [0.1, 0.2]}, "has 2 values, so none for replica 2"),
        ({"data.args.seed": [1, 2, 3]}, "only numbers of model, loss, "),
        ({"model" + ".a" * 100: [1, 2, 3]}, "only numbers of model, loss, "),
    ],
)
def test_a_config_without_numbers_of_a_replica_is_refused(vary, message):
    with pytest.raises(UserError, match=message):
        of_replica(changed(vary=vary), 2)


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ({"optimizer.1.args.lr": [1, 2, 3]}, "vary.optimizer.1.args.lr: has 3 values for 2 rep"),
        ({"optimizer.1.args.lr": 1}, "vary.optimizer.1.args.lr: must be a list of numbers, got 1"),
        (
            {"optimizer.1.args.lr": [1, -1]},
            "vary.optimizer.1.args.lr.1: must be a finite number ab",
        ),
        ({"optimizer.1.args.exclude": ["a", "b"]}, "exclude: must be a list of numbers, found"),
        ({"optimizer.args.lr": [1, 2]}, "vary.optimizer.args.lr: no part of this config takes"),
        ({"loader.batch_size": [1, 2]}, "vary.loader.batch_size: only numbers of model, loss, "),
        ({"seed": [1, -2]}, "training.vary.seed.1: must be an integer from 0"),
    ],
)
def test_mistakes_are_named(vary, message):
    with pytest.raises(UserError) as error:
        build(changed(vary=vary), "config.json")
    assert message in str(error.value)


def test_a_number_on_which_python_decides_is_refused():
    from training.commands.start import checked_recipe

    config = changed(vary={"optimizer.1.args.momentum": [0, 0.9]})
    config = override(config, 'optimizer.1={"name": "sgd", "args": {"lr": 0.1}}')
    with pytest.raises(UserError, match=r"vary: optimizer.1.args.momentum cannot .* one program"):
        checked_recipe(build(config, "config.json"))


@pytest.mark.slow
def test_the_operation_that_made_the_first_nan_is_searched_with_the_replicas_own_numbers(
    tmp_path,
):
    """The step of the second replica alone is not finite, by its own learning rate."""
    rates = {"optimizer.1.args.lr": [0.001, 3e38]}
    config = changed(vary=rates, detect_nans=True) | {"schedule": None}
    config["data"] = {"name": "digits", "args": {"train_size": 64, "test_size": 32}}
    (tmp_path / "vary.json").write_text(json.dumps(config))
    code, _, err = run(tmp_path, "-c", "vary.json")
    assert code == 1 and "made the first" in err and "the step is finite" not in err, err
