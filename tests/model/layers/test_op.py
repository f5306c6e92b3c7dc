"""The export mark: seen in a trace where that is wanted, nowhere else, and of the same meaning wherever it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.layers.activations import gelu
from model.layers.conv import conv2d, conv2d_init
from model.layers.linear import linear, linear_init
from model.layers.norm import layer_norm, layer_norm_init
from model.layers.op import marks_shown, op

PARAMS, X = layer_norm_init(4), jnp.arange(24.0).reshape(2, 3, 4)


def names(function, *args):
    """The ops and primitives of a trace."""
    eqns = jax.make_jaxpr(function)(*args).eqns
    return [
        eqn.params["function"].__name__ if eqn.primitive.name == "marked" else eqn.primitive.name
        for eqn in eqns
    ]


def test_marks_show_only_while_exporting_though_a_layer_was_jitted_before():
    jitted = jax.jit(lambda x: layer_norm(PARAMS, x))
    before = jitted(X)
    plain = names(jitted, X)
    with marks_shown():
        inner = jax.make_jaxpr(jitted)(X).eqns[0].params["jaxpr"].eqns
        assert [eqn.params["function"].__name__ for eqn in inner] == ["layer_norm"]
        np.testing.assert_array_equal(jitted(X), before)  # a marked op computes, too
    assert names(jitted, X) == plain
    assert "marked" not in str(jax.make_jaxpr(jitted)(X))


def test_marks_are_gone_after_an_error():
    with pytest.raises(ZeroDivisionError), marks_shown():
        raise ZeroDivisionError
    assert "gelu" not in names(gelu, X)


def test_arrays_are_operands_and_all_else_attributes():
    @op
    def scaled(params, x, *, by=2, shift=None):
        return {"y": params["w"] * x * by, "rest": [x]}

    with marks_shown():
        (eqn,) = jax.make_jaxpr(lambda w, x: scaled({"w": w}, x, by=3))(jnp.ones(4), X).eqns
        args, kwargs = eqn.params["function"], [a.value for a in eqn.params["attributes"] if a]
        assert args.__name__ == "scaled" and kwargs == [3] and len(eqn.invars) == 2
        np.testing.assert_array_equal(scaled({"w": jnp.ones(4)}, X, by=3)["y"], 3 * X)


def test_an_op_that_takes_an_array_of_its_caller_is_traced_as_it_is():
    @op
    def applied(x, function):
        return function(x)

    def caller(w, x):
        return applied(x, lambda y: y * w)

    with marks_shown():
        assert "marked" not in names(caller, jnp.ones(4), X)
        np.testing.assert_array_equal(
            jax.vmap(caller, (0, None))(jnp.ones((2, 4)), X), jnp.stack([X, X])
        )
        assert names(lambda x: applied(x, lambda y: y * PARAMS["scale"]), X) == ["applied"]


def test_vmap_keeps_the_mark_where_leading_axes_do_not_matter():
    weights = linear_init(jax.random.key(0), 4, 5)
    with marks_shown():
        assert "linear" in names(jax.vmap(lambda x: linear(weights, x), 1, 1), X)
        mapped = jax.vmap(lambda x: linear(weights, x), 1, 1)(X)
        each = jax.vmap(lambda w, x: linear(w, x), (0, None))(
            jax.tree.map(lambda a: jnp.stack([a, 2 * a]), weights), X
        )
        assert "linear" not in names(
            jax.vmap(lambda w: linear(w, X)), jax.tree.map(lambda a: a[None], weights)
        )
    np.testing.assert_allclose(mapped, X @ weights["weight"] + weights["bias"], rtol=1e-5)
    np.testing.assert_allclose(each[1], 2 * (X @ weights["weight"] + weights["bias"]), rtol=1e-5)


def test_vmap_looks_inside_where_they_do():
    weights, images = conv2d_init(jax.random.key(0), 1, 2, 3), jnp.ones((2, 5, 6, 6, 1))
    with marks_shown():
        assert "conv2d" not in names(jax.vmap(lambda x: conv2d(weights, x)), images)
        found = jax.vmap(lambda x: conv2d(weights, x))(images)
    np.testing.assert_allclose(found[1], conv2d(weights, images[1]), rtol=1e-5)


def test_what_is_marked_has_its_gradient_and_compiles():
    def loss(x):
        return gelu(layer_norm(PARAMS, x)).sum()

    wanted = jax.grad(loss)(X)
    with marks_shown():
        np.testing.assert_allclose(jax.grad(loss)(X), wanted, atol=1e-6)
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(X), wanted, atol=1e-6)
