"""The sample of config.json learns, on real MNIST and on the drawn digits that stand in for it."""

import os
from pathlib import Path

import jax
import pytest

from training.fit import fit
from wiring.build import build
from wiring.config import override, read

ROOT = Path(__file__).resolve().parents[1]


def train(*overrides):
    """The run of the sample after one epoch."""
    config = read(ROOT / "config.json")
    for text in ("training.epochs=1", *overrides):
        config = override(config, text)
    parts = build(config, "config.json")
    names = ("loss", "metrics", "optimizer", "preprocess", "augment", "objective", "update", "seed")
    settings = {name: getattr(parts, name) for name in names}
    settings |= vars(parts.loader) | vars(parts.training)
    del settings["vary"]  # `fit` has no paths of a config
    return fit(parts.model, **parts.data.load(), **settings)


@pytest.mark.slow
def test_the_sample_learns_mnist():
    if not os.environ.get("MNIST_DIR"):
        pytest.skip("MNIST_DIR is not set, so real MNIST is not available")
    run = train(f"data.args.dir={os.environ['MNIST_DIR']}", "data.args.offline=error")
    assert sum(leaf.size for leaf in jax.tree.leaves(run.params)) == 13_810
    assert run.history[0]["test_accuracy"] > 0.85
    assert run.trainer.looped  # none of its convolutions is slow in a loop


@pytest.mark.torture
def test_the_drawn_digits_are_learned_but_not_completely_in_one_epoch():
    run = train("data=digits")
    assert 0.7 < run.history[0]["test_accuracy"] < 0.995
