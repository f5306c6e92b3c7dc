"""The MLP-Mixer, against its authors' code in Flax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.mixer import mixer
from tests.model.compare import normal, quick_jit, random_params

pytestmark = pytest.mark.contract

SIZES = {"patch": 2, "dim": 6, "depth": 2, "token_hidden": 5, "hidden": 7}


class Perceptron(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        y = nn.gelu(nn.Dense(self.hidden)(x), approximate=False)
        return nn.Dense(x.shape[-1])(y)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
        x = x + jnp.swapaxes(Perceptron(SIZES["token_hidden"])(y), 1, 2)
        return x + Perceptron(SIZES["hidden"])(nn.LayerNorm()(x))


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x):
        patch, dim = SIZES["patch"], SIZES["dim"]
        x = nn.Conv(dim, (patch, patch), strides=(patch, patch), padding="VALID")(x)
        x = x.reshape(x.shape[0], -1, dim)
        for _ in range(SIZES["depth"]):
            x = Block()(x)
        return nn.Dense(3)(jnp.mean(nn.LayerNorm()(x), axis=1))


def as_flax(params):
    """Our params under the names of Flax."""

    def dense(p):
        return {"kernel": p["weight"], "bias": p["bias"]}

    def perceptron(p):
        return {"Dense_0": dense(p["expand"]), "Dense_1": dense(p["project"])}

    tree = {"Conv_0": dense(params["patches"]), "LayerNorm_0": params["norm"]}
    for i, block in enumerate(params["blocks"]):
        tree[f"Block_{i}"] = {
            "LayerNorm_0": block["norm1"],
            "LayerNorm_1": block["norm2"],
            "Perceptron_0": perceptron(block["tokens"]),
            "Perceptron_1": perceptron(block["features"]),
        }
    return tree | {"Dense_0": dense(params["head"])}


@pytest.mark.slow
def test_values_and_gradients_are_those_of_the_authors():
    model, x = mixer((4, 6, 2), 3, **SIZES), normal(1, 3, 4, 6, 2)
    params, _ = random_params(model.init)
    norm = params["norm"]

    def ours(params, x):
        return jnp.square(model.apply(params, {}, x)[0]).sum()

    def theirs(params, x):
        return jnp.square(Mixer().apply({"params": as_flax(params)}, x)).sum()

    assert norm.keys() == {"scale", "bias"}
    found, expected = (quick_jit(jax.value_and_grad(f, (0, 1)))(params, x) for f in (ours, theirs))
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected[1]))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale)  # noqa: E731
    jax.tree.map(close, found, expected)


def test_the_patches_must_divide_the_image():
    with pytest.raises(
        ValueError, match=r"patch: 4 must divide the height and width .*\(6, 8, 1\)"
    ):
        mixer((6, 8, 1), 3)
