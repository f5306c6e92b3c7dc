"""Normalization layers against Flax's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from model.layers import norm
from tests.model.compare import DTYPES, assert_same, normal, quick_jit, random_params

pytestmark = [pytest.mark.gpu, pytest.mark.contract]

DIM, NARROW = 6, 4
CASES = {
    "layer": (norm.layer_norm_init, norm.layer_norm, linen.LayerNorm()),
    "layer, narrow": (
        lambda _: norm.layer_norm_init(NARROW),
        norm.layer_norm,
        linen.LayerNorm(use_fast_variance=False),  # some of many rows have a small variance
    ),
    "rms": (norm.rms_norm_init, norm.rms_norm, linen.RMSNorm()),
    "group": (
        norm.group_norm_init,
        lambda params, x: norm.group_norm(params, x, groups=3),
        linen.GroupNorm(3),
    ),
}


def rows_of(name):
    return (4, 32, 32) if name == "layer, narrow" else (4, 3, 5)  # many: another form


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_equals_flax(name, dtype):
    init, ours, module = CASES[name]
    params = random_params(lambda key: init(DIM))
    x = normal(1, *rows_of(name), len(params["scale"])) + 2
    assert_same(ours, lambda params, x: module.apply({"params": params}, x), params, x, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_equals_flax(train, dtype):
    params, state = random_params(lambda key: norm.batch_norm_init(DIM))
    state = {"mean": state["mean"], "var": np.square(state["var"]) + 0.1}
    module = linen.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5)

    def reference(params, x):
        return module.apply({"params": params, "batch_stats": state}, x, mutable=["batch_stats"])

    def ours(params, x):
        return norm.batch_norm(params, state, x, train=train)

    x = normal(1, 4, 3, 5, DIM) + 2
    assert_same(lambda *a: ours(*a)[0], lambda *a: reference(*a)[0], params, x, dtype=dtype)
    new = ours(params, x.astype(dtype))[1]
    expected = reference(params, x.astype(dtype))[1]["batch_stats"]
    for key in ("mean", "var"):
        assert new[key].dtype == jnp.float32
        np.testing.assert_allclose(new[key], expected[key], rtol=1e-4)


@pytest.mark.slow
def test_second_derivatives_of_batch_norm_equal_flax():
    params, state = norm.batch_norm_init(DIM)
    module = linen.BatchNorm(use_running_average=False, epsilon=1e-5)
    x, direction = normal(1, 4, 3, DIM), normal(2, 4, 3, DIM)

    def reference(x):
        return module.apply({"params": params, "batch_stats": state}, x, mutable=["batch_stats"])[0]

    def curvature(apply):
        def slope(x):
            return (jax.grad(lambda x: jnp.tanh(apply(x)).sum())(x) * direction).sum()

        return jax.grad(slope)(x)

    ours = curvature(lambda x: norm.batch_norm(params, state, x, train=True)[0])
    np.testing.assert_allclose(ours, curvature(reference), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_rounded_once(name):
    init, ours, _ = CASES[name]
    params = init(DIM)
    x = jnp.asarray(normal(1, *rows_of(name), len(params["scale"])), jnp.bfloat16)
    ours = quick_jit(ours)
    expected = ours(params, x.astype(jnp.float32))
    np.testing.assert_allclose(ours(params, x).astype(jnp.float32), expected, rtol=1.01 * 2**-8)


# Rms norm does not subtract the mean.
@pytest.mark.parametrize("name", ["layer", "layer, narrow", "group"])
def test_a_large_mean_does_not_lose_the_variance(name):
    init, ours, _ = CASES[name]
    params = init(DIM)
    # The sum of x and 1000 is rounded to 6e-5, which must not matter beside the deviation.
    x = 1 + normal(1, *rows_of(name), len(params["scale"])) / 8
    x[..., 0], x[..., 1] = -1, 3
    np.testing.assert_allclose(ours(params, x + 1000), ours(params, x), atol=2e-3)


def test_groups_must_divide_the_channels():
    with pytest.raises(ValueError, match="groups: 4 must divide the 6 channels"):
        norm.group_norm(norm.group_norm_init(6), jnp.ones((1, 2, 2, 6)), groups=4)


@pytest.mark.slow
def test_no_gradient_flows_through_the_running_statistics():
    params, state = norm.batch_norm_init(DIM)
    new_mean = jax.grad(lambda x: norm.batch_norm(params, state, x, train=True)[1]["mean"].sum())
    np.testing.assert_array_equal(new_mean(jnp.ones((4, DIM))), 0)
