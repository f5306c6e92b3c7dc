"""What other frameworks are told of a recipe, and that Optax makes the same steps of it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.peers.by_optax import optimizer_of
from benchmarks.recipes import RECIPES, recipe_of
from benchmarks.workloads import Workload
from training.optimizers import adamw, muon
from training.schedules import warmup_linear
from training.transforms import scheduled
from utils import UserError

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
def test_other_frameworks_take_the_steps_that_ours_takes(suffix):
    workload = Workload(**recipe_of(RECIPES[suffix])["workload"])._replace(epochs=1, warmup=0.25)
    ours = {
        "adamw": lambda: adamw(workload.lr, weight_decay=workload.weight_decay),
        "muon": lambda: muon(
            workload.lr,
            weight_decay=workload.weight_decay,
            adamw_lr=workload.adamw_lr,
            by_adamw="head/classes/.*",
        ),
    }[workload.optimizer]()
    theirs = optimizer_of(workload, STEPS * workload.batch_size, decayed)
    ours = descent(scheduled(ours, warmup_linear(1, steps=STEPS)))
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(descent(theirs)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=str(path))


def decayed(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "weight", params)


def descent(optimizer):
    """The parameters after some steps along random gradients."""
    params, state = tree(0), None
    state = optimizer.init(params)
    for seed in range(STEPS):
        updates, state = optimizer.update(tree(seed + 1), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params


def tree(seed):
    draw = np.random.default_rng(seed)
    shapes = jax.tree.map(
        lambda s: jnp.asarray(draw.normal(size=s), jnp.float32),
        SHAPES,
        is_leaf=lambda s: isinstance(s, tuple),
    )
    return shapes


def test_what_they_are_not_told_of_is_refused(tmp_path):
    config = json.loads(RECIPES[""].read_text())
    for change in ({"augment": ["random_affine"]}, {"optimizer": {"name": "lion"}}):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(
            UserError,
            match=f"{next(iter(change))}.*other frameworks|other frameworks.*{next(iter(change))}",
        ):
            recipe_of(tmp_path / "config.json")
