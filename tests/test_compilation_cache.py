"""Compiling again, or loading from the cache that the other tests share, gives the same bits."""

from collections import Counter

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from model.mlp import mlp
from model.resnet import resnet
from training.fit import fit
from training.optimizers import adamw
from training.run import TIMES

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 8, 8, 1)).astype(np.float32), RNG.integers(0, 3, 60).astype(np.int32)
MODELS = {
    "looped": mlp((8, 8, 1), 3, dims=(16,), dropout=0.2),
    "step by step": resnet((8, 8, 1), 3, widths=(4,), depth=1),
}


@pytest.fixture
def programs_in():
    """use(folder): forget what was compiled so far, and use this folder as the cache."""
    before = jax.config.jax_compilation_cache_dir

    def use(folder):
        jax.clear_caches()
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", str(folder))

    yield use
    use(before)


@pytest.fixture
def compiled():
    """The number of programs loaded ("cache_hits") and compiled ("cache_misses")."""
    counts = Counter()

    def listen(event, **_):
        counts[event.removeprefix("/jax/compilation_cache/")] += 1

    jax.monitoring.register_event_listener(listen)
    yield counts
    jax.monitoring.unregister_event_listener(listen)


def outcome(model):
    """The history of a run without times, and its final state."""
    run = fit(
        model,
        (X, Y),
        (X, Y),
        optimizer=adamw(lr=0.01),
        epochs=2,
        batch_size=16,
        log={"every_steps": 1},
        ema=0.9,
    )
    history = [{k: v for k, v in row.items() if k not in TIMES} for row in run.history]
    return history, jax.device_get(run.states()[0])


@pytest.mark.torture
@pytest.mark.parametrize("form", ["looped", "step by step"])
def test_a_run_ends_with_the_same_bits_whether_compiled_again_or_loaded_from_the_cache(
    tmp_path, form, programs_in, compiled
):
    histories, states, misses = [], [], []
    for folder in ("a", "b", "b"):
        compiled.clear()
        programs_in(tmp_path / folder)
        history, state = outcome(MODELS[form])
        histories.append(history)
        states.append(state)
        misses.append(compiled["cache_misses"])
    assert misses[0] == misses[1] > 5 and misses[2] == 0 < compiled["cache_hits"]
    assert histories[0] == histories[1] == histories[2]
    for state in states[1:]:
        jax.tree.map(np.testing.assert_array_equal, states[0], state)
