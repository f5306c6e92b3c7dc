import jax
import jax.numpy as jnp
import pytest

from model.convnext import convnext
from utils import named_leaves


def shapes(*args, **options):
    return jax.eval_shape(convnext(*args, **options).init, jax.random.key(0))[0]


def test_the_sample_has_its_number_of_parameters():
    leaves = named_leaves(shapes((28, 28, 1), 10, dims=(8, 16, 32)))
    assert sum(leaf.size for leaf in leaves.values()) == 13_810
    assert leaves["blocks/0/dwconv/weight"].shape == (7, 7, 1, 8)
    assert leaves["head/hidden/weight"].shape == (32, 64)


@pytest.mark.parametrize("height, fits", [(16, True), (15, False)])
def test_the_smallest_image_it_accepts_is_the_smallest_that_works(height, fits):
    if not fits:
        with pytest.raises(ValueError, match="input_shape"):
            convnext((height, 16, 1), 10)
        return
    model = convnext((height, 16, 1), 10)
    out = jax.eval_shape(lambda key: model.apply(*model.init(key), jnp.ones((2, height, 16, 1)))[0], jax.random.key(0))
    assert out.shape == (2, 10)


def test_a_residual_block_passes_its_input_on():
    out = {}
    for residual in (False, True):
        model = convnext((4, 4, 1), 3, dims=(8,), residual=residual)
        params, state = model.init(jax.random.key(0))
        params["blocks"][0]["project"]["weight"] *= 0
        gradient = jax.grad(lambda x, m=model, p=params, s=state: m.apply(p, s, x)[0].sum())(jnp.ones((1, 4, 4, 1)))
        out[residual] = bool((gradient != 0).any())
    assert out == {False: False, True: True}
