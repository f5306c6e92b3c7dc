"""`@op`: functions are traced as ops during export only, and always compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.layers.activations import gelu
from model.layers.conv import conv2d, conv2d_init
from model.layers.linear import linear, linear_init
from model.layers.norm import layer_norm, layer_norm_init
from model.layers.op import marks_shown, op

pytestmark = pytest.mark.contract

PARAMS, X = layer_norm_init(4), jnp.arange(24.0).reshape(2, 3, 4)


def names(function, *args):
    """The names of the ops and primitives in a trace."""
    eqns = jax.make_jaxpr(function)(*args).eqns
    return [
        eqn.params["function"].__name__ if eqn.primitive.name == "marked" else eqn.primitive.name
        for eqn in eqns
    ]


@pytest.mark.slow
def test_a_jitted_layer_shows_its_mark_during_export_only():
    jitted = jax.jit(lambda x: layer_norm(PARAMS, x))
    before = jitted(X)
    plain = names(jitted, X)
    with marks_shown():
        inner = jax.make_jaxpr(jitted)(X).eqns[0].params["jaxpr"].eqns
        assert [eqn.params["function"].__name__ for eqn in inner] == ["layer_norm"]
        np.testing.assert_array_equal(jitted(X), before)  # a marked op can also be run
    assert names(jitted, X) == plain
    assert "marked" not in str(jax.make_jaxpr(jitted)(X))


@pytest.mark.slow
def test_an_error_ends_the_marking():
    with pytest.raises(ZeroDivisionError), marks_shown():
        raise ZeroDivisionError
    assert "gelu" not in names(gelu, X)


@pytest.mark.slow
def test_arrays_become_operands_and_other_arguments_attributes():
    @op
    def scaled(params, x, *, by=2, shift=None):
        return {"y": params["w"] * x * by, "rest": [x]}

    with marks_shown():
        (eqn,) = jax.make_jaxpr(lambda w, x: scaled({"w": w}, x, by=3))(jnp.ones(4), X).eqns
        attributes = [a.value for a in eqn.params["attributes"] if a]
        assert eqn.params["function"].__name__ == "scaled"
        assert attributes == [3] and len(eqn.invars) == 2
        np.testing.assert_array_equal(scaled({"w": jnp.ones(4)}, X, by=3)["y"], 3 * X)


def test_an_op_that_captures_an_array_of_its_caller_is_traced_unmarked():
    @op
    def applied(x, function):
        return function(x)

    def caller(w, x):
        return applied(x, lambda y: y * w)

    with marks_shown():
        assert "marked" not in names(caller, jnp.ones(4), X)
        mapped = jax.vmap(caller, (0, None))(jnp.ones((2, 4)), X)
        np.testing.assert_array_equal(mapped, jnp.stack([X, X]))
        assert names(lambda x: applied(x, lambda y: y * PARAMS["scale"]), X) == ["applied"]


@pytest.mark.slow
def test_vmap_keeps_the_mark_of_an_op_of_any_rank():
    weights = linear_init(jax.random.key(0), 4, 5)
    with marks_shown():
        assert "linear" in names(jax.vmap(lambda x: linear(weights, x), 1, 1), X)
        mapped = jax.vmap(lambda x: linear(weights, x), 1, 1)(X)
        stacked = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), weights)
        each = jax.vmap(linear, (0, None))(stacked, X)
        assert "linear" not in names(jax.vmap(lambda w: linear(w, X)), stacked)
    np.testing.assert_allclose(mapped, X @ weights["weight"] + weights["bias"], rtol=1e-5)
    np.testing.assert_allclose(each[1], 2 * (X @ weights["weight"] + weights["bias"]), rtol=1e-5)


@pytest.mark.slow
def test_vmap_removes_the_mark_of_an_op_of_fixed_rank():
    weights, images = conv2d_init(jax.random.key(0), 1, 2, 3), jnp.ones((2, 5, 6, 6, 1))
    with marks_shown():
        assert "conv2d" not in names(jax.vmap(lambda x: conv2d(weights, x)), images)
        mapped = jax.vmap(lambda x: conv2d(weights, x))(images)
    np.testing.assert_allclose(mapped[1], conv2d(weights, images[1]), rtol=1e-5)


@pytest.mark.slow
def test_marked_ops_have_gradients_and_compile():
    def loss(x):
        return gelu(layer_norm(PARAMS, x)).sum()

    expected = jax.grad(loss)(X)
    with marks_shown():
        np.testing.assert_allclose(jax.grad(loss)(X), expected, atol=1e-6)
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(X), expected, atol=1e-6)
