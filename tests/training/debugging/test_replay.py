"""Replaying a function one op at a time, compared with the function compiled as a whole."""

import jax
import jax.numpy as jnp
import numpy as np

from training.debugging.nan_search import ancestors
from training.debugging.replay import Replay, Value

RNG = np.random.default_rng(0)


def test_a_replay_computes_the_same_numbers_and_frees_those_that_are_not_needed():
    def cell(carry, row):
        return jnp.tanh(carry @ row) + 1, (carry.sum(), row)

    def function(x, rows):
        x, (sums, seen) = jax.lax.scan(cell, jnp.exp(x) * 2, rows, reverse=True)
        x = jax.lax.cond(x.sum() > 1e3, jnp.sin, lambda x: jnp.cos(x) + 1, x)
        return x, sums, seen, jax.lax.scan(lambda c, _: (c, c), x[0], None, length=2)

    inputs = (
        RNG.normal(size=(8, 4)).astype(np.float32),
        RNG.normal(size=(3, 4, 4)).astype(np.float32),
    )
    replay = Replay(jax.make_jaxpr(function)(*inputs), [Value(a, name="input") for a in inputs])
    replay.evaluate(replay.outputs)
    leaves = jax.tree.leaves(jax.jit(function)(*inputs))
    for value, expected in zip(replay.outputs, leaves, strict=True):
        np.testing.assert_allclose(value.array, expected, rtol=1e-5)
    ops = set().union(*map(ancestors, replay.outputs)) - {None}
    held = {value for op in ops for value in op.outputs if value.array is not None}
    assert held == {value for value in replay.outputs if value.maker}
