"""The recipes of the other frameworks, and that Optax takes the same steps with them as ours."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import time_to_accuracy
from benchmarks.harness import ROOT
from benchmarks.peers.optax import optimizer_of
from benchmarks.time_to_accuracy import RECIPES, recipe_of
from benchmarks.workloads import Workload, from_json
from training.optimizers import adamw, muon
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


@pytest.mark.torture
@pytest.mark.parametrize("suffix", RECIPES)
def test_optax_takes_the_same_steps_as_our_optimizers(suffix):
    workload = recipe_of(RECIPES[suffix])._replace(epochs=1, warmup=0.25)
    rate, decay = workload.lr, workload.weight_decay
    if workload.optimizer == "adamw":
        ours = adamw(rate, weight_decay=decay)
    else:
        others = {"adamw_lr": workload.adamw_lr, "by_adamw": "head/classes/.*"}
        ours = muon(rate, weight_decay=decay, **others)
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
    config = json.loads((ROOT / RECIPES[""]).read_text())
    changes = [{"augment": ["random_affine"]}, {"training": {"epochs": 3, "ema": 0.9}}]
    changes += [{"preprocess": ["standardize", config["preprocess"][1]]}]
    changes += [{"optimizer": {"name": "muon", "args": {"lr": 0.1, "by_adamw": ".*"}}}]
    for change in changes:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match="does not express"):
            recipe_of(tmp_path / "config.json")


def test_a_recipe_is_the_same_after_it_was_sent_to_another_process():
    workload = recipe_of(RECIPES[""])
    assert (workload.shape, workload.epochs, workload.lr) == ((28, 28, 1), 3, 0.025)
    received = from_json(json.loads(json.dumps(workload._asdict())))
    assert received == workload._replace(args=received.args) and isinstance(received, Workload)
    assert received.args["dims"] == (24, 64)


def test_the_seconds_are_those_at_which_a_level_was_first_reached(monkeypatch):
    clock = iter([1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(time_to_accuracy.time, "perf_counter", lambda: next(clock))
    lines = ["Epoch 1 [train] accuracy @ 0.9999", "Epoch 1 [test] loss @ 0.1, accuracy @ 0.9600"]
    lines += [f"Epoch {i} [test] accuracy @ {a}" for i, a in ((2, 0.985), (3, 0.97), (4, 0.99))]
    reached = time_to_accuracy.reached_by(0.5, time_to_accuracy.logged_accuracies(lines))
    assert reached == {0.97: 1.5, 0.98: 1.5, 0.99: 3.5}
