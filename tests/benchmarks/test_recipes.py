"""The recipe of the other frameworks, and that Optax takes the same steps with it as ours."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness import ROOT
from benchmarks.peers.optax import optimizer_of
from benchmarks.time_to_accuracy import LIMIT, RECIPE, logged_accuracies, reached_by, recipe_of
from benchmarks.workloads import Workload, from_json
from training.optimizers import adamw
from training.schedules import warmup_linear
from training.transforms import scheduled

SHAPES = {
    "depthwise": {"weight": (3, 3, 1, 8)},
    "down": {"weight": (2, 2, 8, 6)},
    "expand": {"weight": (6, 12), "bias": (12,)},
    "norm": {"scale": (12,)},
    "head/classes": {"weight": (12, 10), "bias": (10,)},
}
STEPS = 4


def test_optax_takes_the_same_steps_as_our_optimizer():
    workload = recipe_of(RECIPE)._replace(epochs=1, warmup=0.25)
    ours = adamw(workload.lr, weight_decay=workload.weight_decay)
    ours = descent(scheduled(ours, warmup_linear(1, steps=STEPS)))
    theirs = descent(optimizer_of(workload, STEPS * workload.batch_size, decayed))
    leaves = zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    for (path, a), b in leaves:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=str(path))


def decayed(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "weight", params)


def descent(optimizer):
    """The parameters after STEPS steps along random gradients."""
    params = random_tree(0)
    state = optimizer.init(params)
    for seed in range(STEPS):
        updates, state = optimizer.update(random_tree(seed + 1), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params


def random_tree(seed):
    draw = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(draw.normal(size=shape), jnp.float32),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def test_a_setting_that_the_recipe_cannot_express_is_an_error(tmp_path):
    config = json.loads((ROOT / RECIPE).read_text())
    changes = [{"augment": ["random_affine"]}, {"training": {"epochs": 3, "ema": 0.9}}]
    changes += [{"preprocess": ["standardize", config["preprocess"][1]]}]
    changes += [{"optimizer": {"name": "muon", "args": {"lr": 0.1}}}]
    for change in changes:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match="does not express"):
            recipe_of(tmp_path / "config.json")


def test_a_recipe_is_the_same_after_it_was_sent_to_another_process():
    workload = recipe_of(RECIPE)
    assert (workload.shape, workload.epochs, workload.lr) == ((28, 28, 1), 4, 0.02)
    received = from_json(json.loads(json.dumps(workload._asdict())))
    assert received == workload._replace(args=received.args) and isinstance(received, Workload)
    assert received.args["dims"] == (32, 64)


def test_the_seconds_are_those_at_which_a_level_was_first_reached():
    lines = [(0.5, "Epoch 1 [train] accuracy @ 0.9999")]
    lines += [(0.5, "Epoch 1 [test] loss @ 0.1, accuracy @ 0.9600")]
    accuracies = ((1.5, 0.985), (2.5, 0.97), (3.5, 0.99))
    lines += [(seconds, f"Epoch 2 [test] accuracy @ {a}") for seconds, a in accuracies]
    assert reached_by(logged_accuracies(lines)) == {0.97: 1.5, 0.98: 1.5, 0.99: 3.5}
    late = [(LIMIT + 1, line) for _, line in lines]
    assert set(reached_by(logged_accuracies(late)).values()) == {float("inf")}
