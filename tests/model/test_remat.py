"""Recomputed blocks: the same numbers in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.convnext import convnext
from model.resnet import resnet
from model.vit import vit
from tests.model.compare import normal, quick_jit
from training.engine import platform_options

MODELS = {
    "convnext": (convnext, {"dims": (4, 6), "depths": (2, 1), "residual": True}),
    "resnet": (resnet, {"widths": (4, 6), "depth": 1}),
    "vit": (vit, {"dim": 8, "depth": 2, "heads": 2, "dropout": 0.2}),
}


def gradients(factory, **args):
    model = factory((16, 16, 1), 3, **args)
    params, state = quick_jit(model.init)(jax.random.key(0))

    def loss(params):
        out, new = model.apply(
            params, state, normal(1, 4, 16, 16, 1), train=True, key=jax.random.key(2)
        )
        return jnp.square(out).sum(), (out, new)

    return jax.grad(loss, has_aux=True), params


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["vit", *(pytest.param(n, marks=pytest.mark.torture) for n in MODELS if n != "vit")]
)
def test_values_and_gradients_do_not_change(name):
    factory, args = MODELS[name]
    plain, params = gradients(factory, **args)
    recomputed, _ = gradients(factory, **args, remat="blocks/[01]")
    assert str(jax.make_jaxpr(plain)(params)).count("remat2[") < 2
    assert str(jax.make_jaxpr(recomputed)(params)).count("remat2[") >= 2
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        quick_jit(recomputed)(params),
        quick_jit(plain)(params),
    )


@pytest.mark.torture
def test_remat_takes_less_memory():
    def temporary_bytes(remat):
        function, params = gradients(vit, dim=32, depth=4, remat=remat)
        compiled = jax.jit(function).lower(params).compile(platform_options())
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes("blocks/.*") < temporary_bytes(None) / 2


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("block/.*", "matches none of the blocks: blocks/0, blocks/1"),
        ("(", "is not a regular expression"),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_refuses_a_pattern_that_matches_no_block(name, pattern, message):
    factory, args = MODELS[name]
    with pytest.raises(ValueError, match=f"remat: .* {message}"):
        factory((16, 16, 1), 3, **args, remat=pattern)
