"""A checkpoint is put back into the trees that it came from; what does not fit is an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.runs import assert_same
from training.checkpoint.storage import load, save
from training.checkpoint.trees import filled, restacked
from utils import UserError


def test_a_tree_is_restored_on_the_host_with_its_random_keys(tmp_path):
    opt = {
        "m": [jnp.arange(3.0)],
        "key": jax.random.key(3, impl="rbg"),
        "keys": jax.random.split(jax.random.key(4), 2),
    }
    tree = {
        "step": jnp.int32(7),
        "params": {"w": jnp.ones((2, 2), jnp.bfloat16)},
        "opt": opt,
        "ema": None,
    }
    save(tmp_path / "a.params", tree | {"probe": {"output": jnp.zeros(3)}}, {})
    restored = filled("a.params", load(tmp_path / "a.params")[0], jax.eval_shape(lambda: tree))
    for name in ("key", "keys"):
        draw = jax.random.normal if name == "key" else jax.vmap(jax.random.normal)
        np.testing.assert_array_equal(draw(restored["opt"].pop(name)), draw(tree["opt"].pop(name)))
    assert_same(restored, tree)
    for leaf, original in zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True):
        assert type(leaf) is np.ndarray and leaf.dtype == original.dtype
    assert restored["ema"] is None


def test_resuming_is_strict_about_types_and_lists_every_difference():
    arrays = {
        "params/a": np.zeros(3, np.float16),
        "params/b": np.zeros(3, np.float32),
        "params/d": np.zeros((2, 3), np.float32),
        "ema/a": np.zeros(3, np.float32),
        "opt/key": np.zeros(2, np.int32),
    }
    params = {"a": jnp.zeros(3), "b": jnp.zeros(4), "c": jnp.zeros(5), "d": jnp.zeros((3, 2))}
    like = {"params": params, "ema": None, "opt": {"key": jax.random.key(0)}}
    with pytest.raises(UserError) as caught:
        filled("x.params", arrays, like)
    assert str(caught.value).splitlines() == [
        "x.params: does not fit this run",
        "  missing: params/c (5,)",
        "  unexpected: ema/a (3,)",
        "  opt/key: the file has int32 (2,), the run has uint32 (2,)",
        "  params/a: the file has float16 (3,), the run has float32 (3,)",
        "  params/b: the file has (3,), the run has (4,)",
        "  params/d: the file has (2, 3), the run has (3, 2) (transpose it)",
    ]


def test_only_blocks_that_are_all_there_are_stacked_and_the_rest_is_reported():
    w = np.zeros(2, np.float32)
    arrays = {"params/b/0/w": w, "params/b/2/w": w, "params/c/0-1/w": np.zeros((3, 2))}
    huge = {"params/d/1-9999/w": w, "params/d/1-99999999999/w": w, "params/d/5-1/w": w}
    wanted = {"params/b/0-2/w": np.zeros((3, 2)), "params/c/0/w": w}
    assert restacked(arrays | huge, wanted).keys() == arrays.keys() | huge.keys()
    with pytest.raises(UserError, match=r"it has none of the run's names; it has params/b/0/w, "):
        filled("a", arrays, {"params": {"b": {"0-2": {"w": np.zeros((3, 2))}}}})
