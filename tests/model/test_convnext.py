"""The arguments of convnext: what they change, and which values it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.convnext import convnext
from tests.model.compare import normal, quick_jit, random_params
from utils import named_leaves

pytestmark = pytest.mark.contract


def params_shapes(*args, **options):
    return jax.eval_shape(convnext(*args, **options).init, jax.random.key(0))[0]


def test_the_sample_model_has_13810_parameters():
    leaves = named_leaves(params_shapes((28, 28, 1), 10, dims=(8, 16, 32)))
    assert sum(leaf.size for leaf in leaves.values()) == 13_810
    assert leaves["blocks/0/dwconv/weight"].shape == (7, 7, 1, 8)
    assert leaves["head/hidden/weight"].shape == (32, 64)


@pytest.mark.parametrize("height, fits", [(16, True), (15, False)])
def test_the_smallest_image_it_accepts_is_the_smallest_that_works(height, fits):
    if not fits:
        with pytest.raises(ValueError, match="input_shape"):
            convnext((height, 16, 1), 10)
        return
    model, x = convnext((height, 16, 1), 10), jnp.ones((2, height, 16, 1))
    out, _ = jax.eval_shape(lambda key: model.apply(*model.init(key), x), jax.random.key(0))
    assert out.shape == (2, 10)


def test_a_residual_block_adds_its_input():
    out = {}
    for residual in (False, True):
        model = convnext((4, 4, 1), 3, dims=(8,), residual=residual)
        params = random_params(lambda key, model=model: model.init(key)[0])
        params["blocks"][0]["project"]["weight"] *= 0
        out[residual], _ = quick_jit(model.apply)(params, {}, normal(1, 2, 4, 4, 1))
    assert (out[False][0] == out[False][1]).all()
    assert (out[True][0] != out[True][1]).any()


@pytest.mark.slow
def test_depths_are_the_blocks_per_width_and_patch_is_the_stride_of_the_stem():
    options = {"dims": (8, 16), "depths": (1, 3), "patch": 2}
    leaves = named_leaves(params_shapes((28, 28, 1), 10, **options))
    assert [leaves[f"blocks/{i}/dwconv/weight"].shape[-1] for i in range(4)] == [8, 16, 16, 16]
    assert leaves["stem/conv/weight"].shape == (2, 2, 1, 8)
    assert "downsample/1/conv/weight" not in leaves
    model = convnext((28, 28, 1), 10, **options)
    params = random_params(lambda key: model.init(key)[0])
    gradient = jax.grad(lambda params, x: model.apply(params, {}, x)[0].sum())
    grads = quick_jit(gradient)(params, normal(1, 2, 28, 28, 1))
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(grads["blocks"]))


@pytest.mark.slow
def test_the_default_is_one_block_per_width():
    models = [convnext((16, 16, 1), 10, **options) for options in ({"depths": (1, 1, 1)}, {})]
    given, default = (quick_jit(model.init)(jax.random.key(0))[0] for model in models)
    jax.tree.map(np.testing.assert_array_equal, given, default)


@pytest.mark.parametrize(
    "options", [{"depths": (1, 1)}, {"depths": (1, 0, 1)}, {"patch": 0}, {"patch": 8}]
)
def test_refuses_bad_depths_and_patches(options):
    with pytest.raises(ValueError, match=r"^(depths|depths.1|patch|input_shape): "):
        convnext((28, 28, 1), 10, **options)
