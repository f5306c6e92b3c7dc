"""Engines made from shapes, ahead of the data."""

import jax
import numpy as np
import pytest

from data_loader.base import Arrays
from model.mlp import mlp
from training.engine import Engine
from training.fit import fit
from training.loss import cross_entropy
from training.objective import supervised
from training.optimizers import adam
from training.options import LoaderOptions
from training.update import gradient_update

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(70, 6)), RNG.integers(0, 3, 70)  # of 64 bits, which the device has not
MODEL, OPTIMIZER = mlp((6,), 3, dims=(8,)), adam(lr=0.01)


def ahead(size=70, tried=("test",)):
    """The engine that `fit` would make, from shapes."""
    objective = supervised(MODEL, cross_entropy, {}, (), ())
    shapes = {
        name: Arrays(*(jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype) for a in (X, Y)))
        for name, n in (("train", size), ("test", 70))
    }
    make_update = lambda unroll: gradient_update(objective, OPTIMIZER, unroll=unroll)  # noqa: E731
    return Engine(
        MODEL,
        objective,
        make_update,
        shapes,
        LoaderOptions(batch_size=16),
        freeze=True,
        tried=tried,
    )


@pytest.mark.parametrize(("size", "taken"), [(70, True), (64, False)])
def test_a_run_takes_the_engine_that_suits_its_data_and_ends_at_the_same_bits(size, taken):
    settings = {"optimizer": OPTIMIZER, "metrics": [], "epochs": 2, "batch_size": 16}
    engine = ahead(size)
    step, test = engine.program.coming, engine.evaluator.programs["test"].coming
    run, alone = (fit(MODEL, (X, Y), (X, Y), engine=each, **settings) for each in (engine, None))
    assert (run.runner.engine is engine) == taken
    if taken:
        assert run.runner.program.compiled is step.result()
        assert engine.evaluator.programs["test"].compiled is test.result()
    assert run.metrics["test_loss"] == alone.metrics["test_loss"]
    jax.tree.map(np.testing.assert_array_equal, run.params, alone.params)


def test_what_fails_to_compile_is_told_where_it_is_needed(monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_: 1 / 0)
    engine = ahead()
    with pytest.raises(ZeroDivisionError):
        fit(MODEL, (X, Y), (X, Y), optimizer=OPTIMIZER, metrics=[], batch_size=16, engine=engine)
