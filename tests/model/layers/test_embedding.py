"""The embedding layer against Flax's."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen

from model.layers.embedding import embedding, embedding_init
from tests.model.compare import DTYPES, assert_same, random_params

pytestmark = pytest.mark.contract

IDS = jnp.array([[0, 3, 3], [4, 0, 1]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_flax(dtype):
    def reference(params):
        return linen.Embed(5, 4).apply({"params": {"embedding": params["weight"]}}, IDS)

    params = random_params(embedding_init, 5, 4)
    assert_same(lambda params: embedding(params, IDS), reference, params, dtype=dtype)


@pytest.mark.parametrize("i", [5, -1, -5, -6])
def test_an_id_past_the_end_or_below_0_gives_nan(i):
    params = random_params(embedding_init, 5, 4)
    assert jnp.isnan(embedding(params, jnp.array(i, jnp.int8))).all()
    gradient = jax.grad(lambda params: jnp.nansum(embedding(params, jnp.array([i, 2]))))(params)
    assert gradient["weight"].any(1).tolist() == [False, False, True, False, False]
