"""The search for the op that made a nan, on steps in which that op is known, or there is none."""

import linecache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from model.base import Model
from model.layers.dropout import dropout
from model.layers.linear import linear, linear_init
from model.layers.norm import batch_norm, batch_norm_init, layer_norm, layer_norm_init
from training.base import Optimizer, TrainState, Update
from training.loss import cross_entropy
from training.objective import supervised, with_precision
from training.optimizers import sgd
from training.rows import GOOD
from training.update import gradient_update, with_refusal
from training.watching.nan_search import first_bad_op

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 8).astype(np.int32)


def net(layer):
    """A linear layer, the layer under test, and another linear layer."""

    def init(key):
        return {"body": linear_init(key, 4, 5), "head": linear_init(key, 5, 3)}, {}

    def apply(params, state, x, *, train=False, key=None):
        return linear(params["head"], layer(linear(params["body"], x))), state

    return Model(init, apply)


def prepared(
    model,
    batch=(X, Y),
    change=lambda params: params,
    precision="float32",
    update=gradient_update,
    **settings,
):
    """(a step, the state before it)"""
    objective = supervised(with_precision(model, precision), cross_entropy, {}, (), ())
    update = update(objective, **{"optimizer": sgd(lr=0.01)} | settings)
    params, state = model.init(jax.random.key(0))
    params = change(params)
    opt, ema = update.init(params)
    start, seed, halted, scale = jnp.int32(0), jnp.uint32(0), jnp.bool(False), jnp.float32(1)
    return update.step, TrainState(start, seed, params, state, opt, ema, halted, scale)


def search(model, batch=(X, Y), **settings):
    step, ts = prepared(model, batch, **settings)
    return first_bad_op(step, ts, batch, len(X))


def is_good(model):
    """Whether the search finds nothing, in a step that is not bad."""
    step, ts = prepared(model)
    _, row = jax.jit(with_refusal(step, {"loss": "MEAN"}))(ts, (X, Y), len(X))
    assert row["bad"] == GOOD
    return first_bad_op(step, ts, (X, Y), len(X)) is None


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


def line_of(function):
    """The first line of a function's body, as the search reports it."""
    name, number = function.__name__, function.__code__.co_firstlineno + 1
    text = linecache.getline(__file__, number).strip()
    return f"tests/training/watching/test_nan_search.py:{number} in {name} (`{text}`)"


def logarithm(x):
    return jnp.log(x)


FORWARD = (
    f"log made the first nan, in the forward pass: {line_of(logarithm)}, after body/bias; it got "
)


@pytest.mark.slow
def test_names_the_op_its_line_the_last_parameter_and_the_numbers():
    message = search(net(logarithm))
    params = net(None).init(jax.random.key(0))[0]["body"]
    got = X @ np.asarray(params["weight"]) + np.asarray(params["bias"])
    below = np.argwhere(got < 0)
    count, first = len(below), got[tuple(below[0])]
    assert message.startswith(
        f"{FORWARD}float32[8,5] all finite from {got.min():.4g} to {got.max():.4g}, and returned "
    )
    assert message.endswith(
        f": {count} of 40 not finite, the first at {below[0].tolist()}: log({first:.4g}) = nan"
    )


@pytest.mark.slow
def test_names_the_line_of_the_model_that_called_a_layer():
    def init(key):
        return {
            "body": linear_init(key, 4, 5),
            "norm": layer_norm_init(5),
            "head": linear_init(key, 5, 3),
        }, {}

    def apply(params, state, x, *, train=False, key=None):
        return linear(params["head"], layer_norm(params["norm"], linear(params["body"], x))), state

    def large(params):
        return params | {"norm": params["norm"] | {"scale": jnp.full(5, 3e38)}}

    message = search(Model(init, apply), change=large)
    assert message.startswith("mul made the first inf, in the forward pass: model/layers/norm.py:")
    assert "in layer_norm (`return add_bias(params, y * params[" in message
    caller = line_of(apply).partition(" (")[0]
    assert f"`), called from {caller}, after norm/scale; it got " in message


@jax.custom_vjp
def unchanged(x):
    return x


unchanged.defvjp(lambda x: (x, None), lambda _, g: (jnp.log(-jnp.abs(g)),))


@pytest.mark.slow
def test_an_op_of_the_backward_pass():
    message = search(net(unchanged))
    assert message.startswith("log made the first nan, in the backward pass: ")
    assert ", after head/weight; it got float32[8,5] all finite from " in message


def growing(grads, state, params=None):
    return jax.tree.map(lambda g: jnp.exp(g + 100), grads), state


def test_an_op_of_the_optimizer():
    message = search(net(jnp.tanh), optimizer=Optimizer(lambda params: {}, growing))
    line = line_of(growing).replace("in growing", "in <lambda>")
    assert message.startswith(
        f"exp made the first inf, in the update: {line}; it got float32[5] all finite from "
    )


def test_for_an_op_in_a_library_the_calling_line_of_the_toolkit_is_named():
    def silent(params):  # no gradient reaches the body
        return params | {"head": jax.tree.map(jnp.zeros_like, params["head"])}

    message = search(net(jnp.tanh), optimizer=optax.scale_by_rms(eps=0.0, decay=0.0), change=silent)
    assert ", in the update: optax/" in message
    assert ", called from training/update.py:" in message
    assert "optimizer.update(" in message


def test_data_that_is_not_finite_is_named():
    message = search(net(jnp.tanh), (changed(X, (2, 1), np.nan), Y))
    assert message == "the data itself: batch x[2, 1] is nan (1 of 32 numbers are not finite)"


def test_a_parameter_that_was_not_finite_before_the_step_is_named():
    def broken(params):
        return params | {
            "head": params["head"] | {"bias": params["head"]["bias"].at[1].set(jnp.inf)}
        }

    message = search(net(jnp.tanh), change=broken)
    assert message == (
        "not this step: the parameter head/bias[1] was already inf before it "
        "(1 of 3 numbers are not finite)"
    )


def test_a_label_outside_the_classes_is_named():
    message = search(net(jnp.tanh), (X, changed(Y, 5, 7)))
    assert message == "the data itself: batch y[5] is 7, a label outside the 3 classes, 0 to 2"


def guarded(x):
    return jnp.where(x > 0, jax.lax.stop_gradient(jnp.log(x)), x)


def checked(x):
    y = jax.lax.stop_gradient(jnp.log(x))
    return jnp.where(jnp.isfinite(y), y, x)


@pytest.mark.slow
def test_masked_values_are_ignored():
    assert is_good(net(guarded))
    assert is_good(net(checked))
    assert search(net(lambda x: logarithm(guarded(x)))).startswith(FORWARD)
    message = search(net(lambda x: jnp.where(x > 0, jnp.log(x), jnp.sqrt(x))))
    assert message.startswith("sqrt made the first nan, in the forward pass: ")


@pytest.mark.slow
def test_a_mask_of_infinities_is_ignored_unless_it_makes_a_nan():
    def masked(x, smallest):
        return jax.nn.softmax(jnp.where(x > smallest, x, -jnp.inf))

    assert is_good(net(lambda x: masked(x, x.min(-1, keepdims=True))))
    assert search(net(lambda x: logarithm(masked(x, x.min(-1, keepdims=True)) - 1e-6))).startswith(
        FORWARD
    )

    def masked_and_root(x):
        return jax.lax.stop_gradient(jnp.log(jnp.where(x > 0, 1, 0.0))) + jnp.sqrt(x)

    message = search(net(lambda x: jax.nn.softmax(masked_and_root(x))))
    assert message.startswith("sqrt made the first nan, in the forward pass: ")
    message = search(net(lambda x: masked(x, jnp.inf)))  # everything is masked
    assert message.startswith("sub made the first nan, in the forward pass: ")
    assert message.endswith("sub(-inf, -inf) = nan")


@pytest.mark.slow
def test_the_microbatch_is_named():
    # The second microbatch has rows 1, 3, 5 and 7.
    message = search(net(jnp.square), (changed(X, 3, 1e38), Y), accumulate=2)
    assert message.startswith(
        "square made the first inf, in the forward pass, in iteration 2 of 2 of a loop: "
    )
    assert "float32[4,5]: 5 of 20 not finite, the first at [1, 0]" in message


@pytest.mark.slow
def test_the_iteration_of_a_recurrent_layer_is_named():
    def cell(carry, _):
        h, count = carry
        return (jnp.where(count == 1, logarithm(-jnp.abs(h)), h), count + 1), None

    message = search(net(lambda x: jax.lax.scan(cell, (x, 0), jnp.arange(5), reverse=True)[0][0]))
    assert message.startswith(FORWARD.replace("pass:", "pass, in iteration 4 of 5 of a loop:"))


@jax.custom_jvp
def own_derivative(x):
    return logarithm(x)


own_derivative.defjvp(lambda x, t: (own_derivative(*x), t[0]))


@pytest.mark.parametrize(
    "layer",
    [
        own_derivative,
        jax.jit(logarithm),
        jax.checkpoint(logarithm),
        lambda x: jax.lax.cond(x.sum() < 1e9, logarithm, jnp.tanh, x),
        lambda x: jax.lax.platform_dependent(x, tpu=jnp.tanh, default=logarithm),
        lambda x: logarithm(jax.nn.relu(x) - 1e-3),
    ],
    ids=["custom_jvp", "jit", "checkpoint", "cond", "platform", "relu"],
)
def test_the_search_enters_calls_and_branches(layer):
    assert search(net(layer)).startswith(FORWARD)


@pytest.mark.slow
def test_bfloat16():
    message = search(net(logarithm), precision="bfloat16")
    assert message.startswith(f"{FORWARD}bfloat16[8,5] all finite from ")


@pytest.mark.slow
def test_a_model_with_statistics_and_dropout():
    def init(key):
        norm, state = batch_norm_init(5)
        return {"body": linear_init(key, 4, 5), "norm": norm, "head": linear_init(key, 5, 3)}, {
            "norm": state
        }

    def apply(params, state, x, *, train=False, key=None):
        x, kept = batch_norm(params["norm"], state["norm"], linear(params["body"], x), train=train)
        return linear(params["head"], dropout(key, x, 0.5, train=train)), {"norm": kept}

    assert is_good(Model(init, apply))
    # 1 / sqrt(inf) is 0, so only the statistics are not finite.
    message = search(Model(init, apply), (X * 1e30, Y))
    assert message.startswith(
        "square made the first inf, in the forward pass or its derivative (the loss is finite): "
    )
    assert ": model/layers/norm.py:" in message
    assert "in plain_batch_norm (`" in message


def test_a_users_own_update_compiled_as_a_whole():
    def own(objective, optimizer):
        whole = gradient_update(objective, optimizer)

        @jax.jit
        def own_step(ts, batch, valid):
            return whole.step(ts, (logarithm(batch[0]), batch[1]), valid)

        return Update(whole.init, own_step)

    message = search(net(jnp.tanh), update=own)
    assert message.startswith(FORWARD.replace(", after body/bias", ""))
