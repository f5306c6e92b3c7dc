"""What the parts of a step must return, and how an error names the part at fault."""

from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from model.base import Model
from model.mlp import mlp
from training import contracts
from training.base import Objective, Optimizer
from training.engine import first_state, first_weights
from training.fit import fit, recipe_of
from training.loss import cross_entropy
from training.metrics import accuracy
from training.objective import supervised
from training.optimizers import adam, sgd
from training.update import gradient_update
from utils import UserError

MODEL = mlp((6,), 3, dims=(4,))
X = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32)
Y = np.arange(32) % 3
SEED = jax.ShapeDtypeStruct((), jnp.uint32)


def counting(params, state, x, *, train=False, key=None):
    return MODEL.apply(params, state, x)[0], {"seen": jnp.zeros((), int)}


def half(grads, state, params):
    return jax.tree.map(lambda g: g.astype(jnp.float16), grads), state


def growing(grads, state, params):
    return grads, (state, state)


WRONG = {
    "integers": (
        {"model": MODEL._replace(init=lambda key: ({"n": jnp.arange(3)}, {}))},
        "^model: the parameter n is int32; only floats can be trained; put everything else into",
    ),
    "no state": (
        {"model": MODEL._replace(init=lambda key: {"w": jnp.ones(3)})},
        r"^model: init\(key\) must return \(params, state\), with {} for no state",
    ),
    "no params": (
        {"model": MODEL._replace(init=lambda key: key.weights)},
        r"^model: the parameters cannot be made: .*test_contracts.py, line \d+, in <lambda>: Attr",
    ),
    "another state": (
        {"model": MODEL._replace(apply=counting)},
        r"^model: apply changes the form of its state, from \(none\) to \(seen int32\[\]\)",
    ),
    "other updates": (
        {"optimizer": Optimizer(lambda params: {}, half)},
        r"^optimizer or schedule: the form of the updates is \(float16.*expected \(float32",
    ),
    "another state of an optimizer": (
        {"optimizer": Optimizer(lambda params: jnp.zeros(3), growing)},
        r"^optimizer or schedule: the form of the state is .*expected \(float32\[3\]\)",
    ),
    "an optimizer that fails": (
        {"optimizer": Optimizer(lambda params: {}, lambda *_: 1 / 0)},
        r"^optimizer or schedule: the update fails: .*test_contracts.py, line .*ZeroDivisionError",
    ),
    "an optimizer without a state": (
        {"optimizer": Optimizer(lambda params: 1 / 0, half)},
        r"^optimizer: its state cannot be made: .*test_contracts.py, line .*ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_part_that_breaks_its_contract_is_named(case):
    settings, message = WRONG[case]
    settings = {"model": MODEL, "optimizer": sgd(0.1)} | settings
    with pytest.raises(UserError, match=message):
        fit(train=(X, Y), epochs=1, batch_size=16, **settings)


@pytest.mark.slow
def test_an_optimizer_of_optax_keeps_the_contract():
    """Its state holds a counter, and Python's numbers have a type, too."""
    run = fit(MODEL, (X, Y), optimizer=optax.adamw(0.01), epochs=1, batch_size=16)
    assert run.step == 2


def step_of(update):
    weights = jax.eval_shape(partial(first_weights, MODEL), SEED)
    ts = jax.eval_shape(partial(first_state, update), *weights, SEED)
    batch = jax.eval_shape(lambda: (jnp.asarray(X), jnp.asarray(Y)))
    return update.step, ts, batch


def test_a_compiled_step_contains_nothing_of_the_contracts():
    optimizer = adam(0.01)
    plain = supervised(MODEL, cross_entropy, {"accuracy": accuracy}, (), ())
    guarded = recipe_of(MODEL, optimizer=optimizer).make_update(unroll=False)
    programs = [
        jax.jit(lambda ts, batch, step=step: step(ts, batch, 30)).lower(ts, batch).as_text()
        for step, ts, batch in map(step_of, (gradient_update(plain, optimizer), guarded))
    ]
    assert programs[0] == programs[1]


@pytest.mark.slow
def test_a_model_of_a_class_keeps_its_own_attributes():
    class Own:
        width = 3

        def init(self, key):
            return MODEL.init(key)

        def apply(self, params, state, x, *, train=False, key=None):
            return MODEL.apply(params, state, x)[0]

    guarded, own = contracts.guarded_model(Own()), Own()
    assert guarded.width == 3 and not isinstance(guarded, Model)
    with pytest.raises(UserError, match=r"^model: apply must return \(output, state\)"):
        guarded.apply(*own.init(jax.random.key(0)), X)


@pytest.mark.slow
def test_a_module_is_a_model():
    module = ModuleType("own")
    module.init, module.apply = MODEL.init, MODEL.apply
    data = X[:8], Y[:8]
    assert fit(module, data, optimizer=sgd(0.1), epochs=1, batch_size=8).finished


def test_a_metric_has_one_value_per_example():
    objective = Objective(lambda p, s, batch, k, t: (batch[0].sum(1), s, {"m": jnp.zeros(3)}))
    with pytest.raises(UserError, match=r"^objective: the metric m must .* \(32, ...\), got \(3,"):
        contracts.guarded_objective(objective)({}, {}, (X, Y), None, True)
