"""The search for what made a nan: against steps with a culprit that is known, or with none."""

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
from training.debugging.nan_search import first_bad_op
from training.loss import cross_entropy
from training.objective import supervised, with_precision
from training.optimizers import sgd
from training.update import gradient_update, zero_sums

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 8).astype(np.int32)


def net(layer):
    """A linear layer, the one that is tried, and another linear layer."""

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
    """(a step, the state before it)."""
    objective = supervised(with_precision(model, precision), cross_entropy, {}, (), ())
    update = update(objective, **{"optimizer": sgd(lr=0.01)} | settings)
    params, state = model.init(jax.random.key(0))
    params = change(params)
    sums = zero_sums(objective, params, state, batch, freeze=True)
    return update.step, TrainState(
        jnp.int32(0), jnp.uint32(0), params, state, *update.init(params), sums, jnp.float32(1)
    )


def search(model, batch=(X, Y), **settings):
    step, ts = prepared(model, batch, **settings)
    return first_bad_op(step, ts, batch, len(X))


def is_good(model):
    """Whether the step itself has nothing to complain of, and the search neither."""
    step, ts = prepared(model)
    assert jax.jit(step)(ts, (X, Y), len(X)).sums["bad_steps"] == 0
    return first_bad_op(step, ts, (X, Y), len(X)) is None


def changed(array, place, value):
    array = array.copy()
    array[place] = value
    return array


def line_of(function):
    """The line below that of the function's name, as the search tells it."""
    name, number = function.__name__, function.__code__.co_firstlineno + 1
    return f"tests/training/debugging/test_nan_search.py:{number} in {name} (`{open(__file__).readlines()[number - 1].strip()}`)"


def logarithm(x):
    return jnp.log(x)


FORWARD = (
    f"log made the first nan, in the forward pass: {line_of(logarithm)}, after body/bias; it got "
)


def test_names_the_operation_its_place_the_parameter_before_it_and_the_numbers():
    told = search(net(logarithm))
    params = net(None).init(jax.random.key(0))[0]["body"]
    given = X @ np.asarray(params["weight"]) + np.asarray(params["bias"])
    below = np.argwhere(given < 0)
    count, first = len(below), given[tuple(below[0])]
    assert told.startswith(
        f"{FORWARD}float32[8,5] all finite from {given.min():.4g} to {given.max():.4g}, and gave "
    )
    assert told.endswith(
        f": {count} of 40 not finite, the first at {below[0].tolist()}: log({first:.4g}) = nan"
    )


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

    told = search(Model(init, apply), change=large)
    assert told.startswith("mul made the first inf, in the forward pass: model/layers/norm.py:")
    assert "in layer_norm (`return (y * params[" in told
    assert f"`), called from {line_of(apply).partition(' (')[0]}, with norm/scale; it got " in told


def root(x):
    return jnp.sqrt(0 * x)


def test_a_slope_that_is_infinite_is_of_the_backward_pass():
    told = search(net(root))
    assert told.startswith(
        "div made the first inf, in the backward pass, as the slope of this line: "
    )
    assert (
        f": {line_of(root)}, after body/bias; it got float32 0.5 and float32[8,5] all finite from "
        in told
    )
    assert told.endswith("div(0.5, 0) = inf")
    assert search(net(jax.checkpoint(root))).startswith(
        f"div made the first inf, in the backward pass: {line_of(root)}"
    )


@jax.custom_vjp
def unchanged(x):
    return x


unchanged.defvjp(lambda x: (x, None), lambda _, g: (jnp.log(-jnp.abs(g)),))


def test_an_operation_of_the_backward_pass():
    told = search(net(unchanged))
    assert told.startswith("log made the first nan, in the backward pass: ")
    assert ", after head/weight; it got float32[8,5] all finite from " in told


def growing(grads, state, params=None):
    return jax.tree.map(lambda g: jnp.exp(g + 100), grads), state


def test_an_operation_of_the_optimizer():
    told = search(net(jnp.tanh), optimizer=Optimizer(lambda params: {}, growing))
    place = line_of(growing).replace("in growing", "in <lambda>")
    assert told.startswith(
        f"exp made the first inf, in the update: {place}; it got float32[5] all finite from "
    )


def test_an_operation_within_a_library_names_the_line_of_ours_that_called_it():
    def silent(params):
        return params | {
            "head": jax.tree.map(jnp.zeros_like, params["head"])
        }  # no gradient reaches the body

    told = search(net(jnp.tanh), optimizer=optax.scale_by_rms(eps=0.0, decay=0.0), change=silent)
    assert ", in the update: optax/" in told
    assert ", called from training/update.py:" in told
    assert "optimizer.update(" in told


def test_data_that_is_not_finite_is_named():
    told = search(net(jnp.tanh), (changed(X, (2, 1), np.nan), Y))
    assert told == "the data itself: batch x[2, 1] is nan (1 of 32 numbers are not finite)"


def test_a_parameter_that_was_not_finite_before_is_named():
    def broken(params):
        return params | {
            "head": params["head"] | {"bias": params["head"]["bias"].at[1].set(jnp.inf)}
        }

    told = search(net(jnp.tanh), change=broken)
    assert (
        told
        == "not this step: the parameter head/bias[1] is inf already before it (1 of 3 numbers are not finite)"
    )


def test_a_label_outside_the_classes_is_named():
    told = search(net(jnp.tanh), (X, changed(Y, 5, 7)))
    assert told == "the data itself: batch y[5] is 7, a label outside the 3 classes, 0 to 2"


def guarded(x):
    return jnp.where(x > 0, jax.lax.stop_gradient(jnp.log(x)), x)


def checked(x):
    y = jax.lax.stop_gradient(jnp.log(x))
    return jnp.where(jnp.isfinite(y), y, x)


def test_what_is_masked_is_innocent():
    assert is_good(net(guarded))
    assert is_good(net(checked))
    assert search(net(lambda x: logarithm(guarded(x)))).startswith(FORWARD)
    told = search(net(lambda x: jnp.where(x > 0, jnp.log(x), jnp.sqrt(x))))
    assert told.startswith("sqrt made the first nan, in the forward pass: ")


def test_a_mask_of_infinities_is_innocent_until_it_makes_a_nan():
    def masked(x, smallest):
        return jax.nn.softmax(jnp.where(x > smallest, x, -jnp.inf))

    assert is_good(net(lambda x: masked(x, x.min(-1, keepdims=True))))
    assert search(net(lambda x: logarithm(masked(x, x.min(-1, keepdims=True)) - 1e-6))).startswith(
        FORWARD
    )
    told = search(
        net(
            lambda x: jax.nn.softmax(
                jax.lax.stop_gradient(jnp.log(jnp.where(x > 0, 1, 0.0))) + jnp.sqrt(x)
            )
        )
    )
    assert told.startswith("sqrt made the first nan, in the forward pass: ")
    told = search(net(lambda x: masked(x, jnp.inf)))  # nothing is left
    assert told.startswith("sub made the first nan, in the forward pass: ")
    assert told.endswith("sub(-inf, -inf) = nan")


def test_a_nan_of_the_code_itself_is_told_as_such():
    told = search(net(lambda x: jnp.where(x > 0, x, jnp.nan)))
    assert told.startswith("select_n made the first nan, in the forward pass: ")
    assert told.endswith("it is written in the code, or made of nothing but numbers written there")


def test_the_microbatch_is_told():
    told = search(
        net(jnp.square), (changed(X, 3, 1e38), Y), accumulate=2
    )  # rows 1, 3, 5, 7 are the second one
    assert told.startswith(
        "square made the first inf, in the forward pass, in round 2 of 2 of a loop: "
    )
    assert "float32[4,5]: 5 of 20 not finite, the first at [1, 0]" in told


def test_the_round_of_a_recurrent_layer_is_told():
    def cell(carry, _):
        h, count = carry
        return (jnp.where(count == 1, logarithm(-jnp.abs(h)), h), count + 1), None

    told = search(net(lambda x: jax.lax.scan(cell, (x, 0), jnp.arange(5), reverse=True)[0][0]))
    assert told.startswith(FORWARD.replace("pass:", "pass, in round 4 of 5 of a loop:"))


@jax.custom_jvp
def own_slope(x):
    return logarithm(x)


own_slope.defjvp(lambda x, t: (own_slope(*x), t[0]))


@pytest.mark.parametrize(
    "layer",
    [
        own_slope,
        jax.jit(logarithm),
        jax.checkpoint(logarithm),
        lambda x: jax.lax.cond(x.sum() < 1e9, logarithm, jnp.tanh, x),
        lambda x: jax.lax.platform_dependent(x, tpu=jnp.tanh, default=logarithm),
        lambda x: logarithm(jax.nn.relu(x) - 1e-3),
    ],
    ids=["custom_jvp", "jit", "checkpoint", "cond", "platform", "relu"],
)
def test_looks_into_calls_and_branches(layer):
    assert search(net(layer)).startswith(FORWARD)


shared = jax.jit(jnp.log)


def innocent(x):
    return shared(jnp.abs(x) + 1)


def guilty(x):
    return shared(x - 1e3)


def test_what_was_traced_once_is_blamed_where_it_was_called_wrongly():
    told = search(net(lambda x: guilty(innocent(x))))
    assert told.startswith(f"log made the first nan, in the forward pass: {line_of(guilty)}")


def test_bfloat16():
    told = search(net(logarithm), precision="bfloat16")
    assert told.startswith(f"{FORWARD}bfloat16[8,5] all finite from ")


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
    told = search(
        Model(init, apply), (X * 1e30, Y)
    )  # 1 / sqrt(inf) is 0, so only the statistics show it
    assert told.startswith(
        "square made the first inf, in the forward pass (the loss survived it, by a mask or an inverse): "
    )
    assert ": model/layers/norm.py:" in told
    assert "in plain_batch_norm (`" in told


def test_an_update_of_ones_own_compiled_as_a_whole():
    def own(objective, optimizer):
        init, step = gradient_update(objective, optimizer)
        return Update(
            init, jax.jit(lambda ts, batch, valid: step(ts, (logarithm(batch[0]), batch[1]), valid))
        )

    told = search(net(jnp.tanh), update=own)
    assert told.startswith(FORWARD.replace(", after body/bias", ""))
