"""Trainers: what they compile, and how they are restored from a snapshot."""

from contextlib import closing

import jax
import numpy as np
import pytest

from data_loader.base import Arrays
from data_loader.loader import epoch_order
from model.gpt import gpt
from model.mlp import mlp
from model.resnet import resnet
from training.engine import Trainer
from training.fit import fit, recipe_of
from training.optimizers import adam

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(70, 6)), RNG.integers(0, 3, 70)  # 64-bit; JAX keeps 32
MODEL = mlp((6,), 3, dims=(8,))
SETTINGS = {"optimizer": adam(lr=0.01), "metrics": [], "epochs": 2, "batch_size": 16}
SETS = {"train": Arrays(X, Y), "test": Arrays(X, Y)}


def test_a_failed_compilation_raises_where_the_program_is_needed(monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(MODEL, (X, Y), (X, Y), **SETTINGS)


@pytest.mark.slow
def test_microbatches_of_convolutions_are_in_no_loop_and_need_less_memory():
    """In a compiled loop of the CPU a convolution is many times slower."""
    data = {"train": Arrays(np.zeros((32, 8, 8, 3), np.float32), np.zeros(32, int))}
    needs = {}
    for count in (1, 4):
        model = resnet((8, 8, 3), 3, widths=(8,), depth=1)
        options = SETTINGS | {"batch_size": 32, "accumulate": count}
        with closing(Trainer(recipe_of(model, **options), data)) as trainer:
            trainer.start()
            trainer.prepare()
            program = trainer.program.compiled
            assert " while(" not in program.as_text()
            needs[count] = program.memory_analysis().temp_size_in_bytes
    assert needs[4] < 0.6 * needs[1]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_restored_snapshot_continues_to_the_same_bits(replicas):
    trainer = Trainer(recipe_of(MODEL, **SETTINGS, replicas=replicas), SETS)
    trainer.start()
    trainer.begin(1)
    trainer.train(2)
    states = jax.device_get(trainer.snapshot())
    trainer.train(2)
    after = jax.device_get(trainer.replica_states())
    trainer.restore(states, trainer.seeds)
    trainer.begin(1, start=2)
    trainer.train(2)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.replica_states()), after)


@pytest.mark.slow
@pytest.mark.usefixtures("cudnn_attention")
@pytest.mark.parametrize("apart", [False, True])
def test_several_seeds_in_half_precision_are_one_program_for_a_gpu(apart):
    """With separate documents, attention has a mask, which JAX's rule for vmap does not take."""
    tokens = RNG.integers(0, 5, (16, 8))
    x = {"tokens": tokens, "segments": np.sort(tokens, axis=1)} if apart else tokens
    sets = {"train": Arrays(x, tokens), "test": Arrays(x, tokens)}
    model = gpt((8,), 5, dim=16, depth=1, heads=2)
    recipe = recipe_of(model, **SETTINGS, precision="bfloat16", replicas=2)
    with closing(Trainer(recipe, sets, stacked=True)) as trainer:
        trainer.start()
        trainer.begin(1)
        trainer.feeds["test"].begin(1)
        training = trainer.program, trainer.lane_numbers[0], trainer.states[0]
        consts = trainer.at(0, 0, trainer.weights())
        evaluation = trainer.evaluation_programs["test"], consts[0], trainer.no_examples()
        for name, (program, *own) in {"train": training, "test": evaluation}.items():
            arguments = *own, *trainer.feeds[name].specs()
            traced = jax.jit(program.function).trace(*arguments)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            assert ("__cudnn$fmha" in text) != apart


@pytest.mark.slow
def test_the_seed_and_the_rate_of_restored_states_count():
    trainer = Trainer(recipe_of(MODEL, **SETTINGS), SETS)
    trainer.start()
    [ts] = jax.device_get(trainer.snapshot())
    trainer.restore([ts._replace(lr_scale=np.float32(0.5))], [7])
    rows, _ = epoch_order(70, 16, seed=7, epoch=1, shuffle=True)
    [((x, _), _)] = trainer.feed.batch(1, 2)
    np.testing.assert_array_equal(x, X[rows[2]].astype(np.float32))
    assert trainer.rate_scale == 0.5  # by which learning rates are logged
