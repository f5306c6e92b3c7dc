"""The recipe of the other frameworks, and that Optax takes the same steps with it as ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.peers.optax import optimizer_of
from benchmarks.time_to_accuracy import RECIPE, recipe_of
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


@pytest.mark.slow
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
