"""The embedding layer against Flax's."""

import jax.numpy as jnp
import pytest
from flax import linen

from model.layers.embedding import embedding, embedding_init
from tests.model.compare import DTYPES, assert_same, random_params

IDS = jnp.array([[0, 3, 3], [4, 0, 1]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_flax(dtype):
    def reference(params):
        return linen.Embed(5, 4).apply({"params": {"embedding": params["weight"]}}, IDS)

    params = random_params(embedding_init, 5, 4)
    assert_same(lambda params: embedding(params, IDS), reference, params, dtype=dtype)


def test_an_id_past_the_end_gives_nan():
    assert jnp.isnan(embedding(random_params(embedding_init, 5, 4), jnp.array(5))).all()
