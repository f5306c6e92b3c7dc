"""Equal blocks compiled as one: the same numbers as one after the other, in a program that does not
grow with their number."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.convnext import convnext
from model.gpt import gpt
from model.layers.blocks import unrolled
from model.mixer import mixer
from model.resnet import resnet
from model.vit import vit
from tests.model.compare import normal, quick_jit

pytestmark = pytest.mark.contract

IMAGE = (8, 8, 2)
TEXT = np.random.default_rng(0).integers(0, 11, (4, 8))
IMAGES = normal(0, 4, *IMAGE)
MODELS = {
    "gpt": (partial(gpt, (8,), 11, dim=8, heads=2, dropout=0.3), [{"depth": 3}, {"depth": 9}]),
    "vit": (
        partial(vit, IMAGE, 3, dim=8, heads=2, dropout=0.2, drop_path=0.4),
        [{"depth": 3}, {"depth": 9}],
    ),
    "mixer": (partial(mixer, IMAGE, 3, dim=8, drop_path=0.4), [{"depth": 3}, {"depth": 9}]),
    "convnext": (
        partial(convnext, IMAGE, 3, dims=(4, 6, 6), patch=2, residual=True),
        [{"depths": (2, 3, 1)}, {"depths": (9, 5, 1)}],
    ),
    "resnet": (partial(resnet, IMAGE, 3, widths=(4, 6)), [{"depth": 3}, {"depth": 9}]),
}
RUNS = {
    "gpt": ["0-2"],
    "vit": ["0-2"],
    "mixer": ["0-2"],
    "convnext": ["0-1", "2-4", "5"],
    "resnet": ["0-2", "3", "4-5"],
}
ALL = pytest.mark.parametrize("name", MODELS)


def shapes(name, deep=False, **options):
    """(model, params, state, input), as shapes"""
    factory, depths = MODELS[name]
    model = factory(**depths[deep], **options)
    return model, *jax.eval_shape(model.init, jax.random.key(0)), x_of(name)


def x_of(name):
    return TEXT if name == "gpt" else jnp.asarray(IMAGES, float)


def made(name, **options):
    """(model, params, state, input)"""
    model, *_, x = shapes(name, **options)
    return model, *quick_jit(model.init)(jax.random.key(0)), x


def loss(model, params, state, x):
    """(the loss in training, (the output, the new state))"""
    out, state = model.apply(params, state, x, train=True, key=jax.random.key(2))
    return jnp.square(out).sum(), (out, state)


def assert_same(tree, other, tolerance=1e-11):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        unrolled(tree),
        other,
    )


@pytest.mark.slow
@ALL
@pytest.mark.parametrize("remat", [None, ".*"])
def test_values_gradients_and_statistics_are_those_of_one_block_after_the_other(name, remat):
    """In training, with dropout."""
    with jax.enable_x64(True):
        results = []
        for scan in (False, True):
            model, params, state, x = made(name, scan=scan, remat=remat)
            gradient = jax.value_and_grad(partial(loss, model), has_aux=True)
            (_, (out, new)), grads = quick_jit(gradient)(params, state, x)
            results.append({"params": params, "out": out, "state": new, "grads": grads})
        one_by_one, together = results
        assert list(together["params"]["blocks"]) == RUNS[name]
        assert one_by_one["out"].dtype == jnp.float64
        assert_same(together, one_by_one)


@ALL
def test_the_program_does_not_grow_with_the_number_of_blocks(name):
    def operations(deep, scan):
        model, *args = shapes(name, deep, scan=scan)
        return str(jax.make_jaxpr(partial(loss, model))(*args)).count(" = ")

    shallow = operations(False, scan=True)
    # What is added are the keys of the blocks.
    assert operations(True, scan=True) < 1.2 * shallow < operations(True, scan=False)


@pytest.mark.slow
@ALL
def test_a_model_takes_params_of_both_forms(name):
    model, params, state, x = made(name, scan=True)
    expected, new = quick_jit(model.apply)(params, state, x)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    out, new = quick_jit(model.apply)(unrolled(params), unrolled(state), x)
    assert jax.tree.structure(new) == jax.tree.structure(unrolled(state))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_bfloat16_stays_bfloat16(name):
    model, params, state, x = shapes(name, scan=True)
    low = partial(jax.tree.map, lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16))
    x = jnp.asarray(x) if name == "gpt" else low(x)
    _, (out, _) = jax.eval_shape(partial(loss, model), low(params), state, x)
    assert out.dtype == jnp.bfloat16


def test_remat_takes_all_equal_blocks_or_none():
    factory, (depth, _) = MODELS["convnext"]
    for pattern, count in (("blocks/[01]", 1), ("blocks/5", 1), (".*", 3)):
        model, *args = shapes("convnext", scan=True, remat=pattern)
        assert str(jax.make_jaxpr(partial(loss, model))(*args)).count("remat2[") == count
    message = "remat: 'blocks/[1-5]' matches only some of the blocks 0-1, which are compiled as one"
    with pytest.raises(ValueError) as error:
        factory(**depth, scan=True, remat="blocks/[1-5]")
    assert str(error.value).startswith(message)
    factory(**depth, remat="blocks/[1-5]")


def test_only_stacked_blocks_are_unrolled():
    tree = {"a-b": {"1": np.zeros(3)}, "10": np.ones(2), "empty": {}, "list": [{"0": 1}]}
    assert unrolled(tree) == tree
    stack = {"11": {"w": np.float32(4)}, "8-10": {"w": np.arange(3)}}
    assert [int(block["w"]) for block in unrolled({"blocks": stack})["blocks"]] == [0, 1, 2, 4]
