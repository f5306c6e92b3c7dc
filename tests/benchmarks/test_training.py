"""The training benchmark: its models, its targets and its fairness check; needs no framework."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.peers import ours
from benchmarks.training import OURS, targets_table, unfair_peers
from benchmarks.workloads import WORKLOADS, prepared, windows

SIZES = {"convnext": 13_810, "resnet": 78_042, "vit": 204_682, "mlp": 118_282}
SIZES |= {"mobilenet_v1": 38_314}
SIZES |= {"gpt": 817_536, "gpt_short": 809_344}


def client(multiple=1.0, **learned):
    learned = {"loss": 0.2, "accuracy": 0.9, "memory": 1, **learned}
    return SimpleNamespace(multiples=[multiple, multiple], parameters=100, learned=learned)


def examples(workload):
    """Eight examples of a workload, as its data has them."""
    if workload.is_text:
        return windows(workload._replace(examples=8), 0)
    images = np.random.default_rng(0).integers(0, 256, (8, 28, 28, 1), np.uint8)
    return prepared(workload, images, np.arange(8, dtype=np.uint8), 0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_models_have_the_sizes_for_which_the_targets_were_set(name):
    workload = WORKLOADS[name]
    x, y = examples(workload)
    assert x.shape == (8, *workload.shape) and y.dtype == np.int32
    if workload.is_text:
        assert y.shape == x.shape and x.max() < workload.classes
    else:
        assert x.dtype == np.float32 and 0 < x.max() <= 1
    assert ours.trainer(workload, {"train": (x, y), "test": (x, y)}).parameters == SIZES[name]


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        pytest.param(peer, name, marks=pytest.mark.slow if name == "mlp" else pytest.mark.torture)
        for name in SIZES
        if name != "gpt_short"
        for peer in WORKLOADS[name].peers
    ],
)
def test_a_peer_trains_a_model_of_the_same_size(peer, name):
    workload = WORKLOADS[name]._replace(batch_size=4)
    module = pytest.importorskip(f"benchmarks.peers.{peer}")
    pair = examples(workload)
    trainer = module.trainer(workload, {"train": pair, "test": pair}, "")
    assert trainer.parameters == pytest.approx(SIZES[name], rel=0.01)
    losses = [trainer.epoch(seed) for seed in range(3)]
    assert losses[2] < losses[0] and 0 <= trainer.accuracy() <= 1


@pytest.mark.torture
@pytest.mark.parametrize("peer", ["flax", "equinox", "haiku", "keras", "torch"])
def test_a_peer_trains_the_model_of_the_recipe(peer):
    """Residual blocks, several in a stage, and a schedule."""
    module = pytest.importorskip(f"benchmarks.peers.{peer}")
    options = {"dims": (4, 8), "depths": (1, 2), "kernel": 3, "residual": True}
    workload = WORKLOADS["convnext"]._replace(args=options, batch_size=4, schedule="one_cycle")
    workload = workload._replace(warmup=0.2, label_smoothing=0.2)
    pair = examples(workload)
    data = {"train": pair, "test": pair}
    trainer = module.trainer(workload, data, "")
    assert trainer.parameters == ours.trainer(workload, data).parameters
    assert np.isfinite(trainer.epoch(0))


@pytest.mark.slow
def test_fit_trains_one_epoch_per_request():
    y = np.arange(256, dtype=np.int32) % 10
    # In the image of the digit n, row n is white.
    x = np.broadcast_to(np.eye(28, dtype=np.float32)[y][:, :, None, None], (256, 28, 28, 1))
    trainer = ours.trainer(WORKLOADS["mlp"], {"train": (x, y), "test": (x, y)}, "")
    losses = [trainer.epoch(i) for i in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert trainer.turns.done.empty() and trainer.turns.run.epoch == 3
    assert 0 <= trainer.accuracy() <= 1


def test_a_target_compares_with_the_fastest_peer_under_the_same_conditions():
    clients = {
        OURS: {False: client(), True: client()},
        "Flax NNX": {False: client(3), True: client(1.5)},
        "Haiku": {False: client(2.5), True: client(3)},
    }
    best_jax_peer, torch = targets_table("mlp", "images", clients).splitlines()[2:]
    assert best_jax_peer.endswith("| at least 2 | 2.5 | yes | 1.5 | **no** |")
    assert torch.endswith("| - | not measured | - | not measured |")


def test_a_peer_that_does_not_learn_alike_is_reported():
    pair = {False: client(), True: client()}
    assert unfair_peers({OURS: pair, "Flax NNX": pair}) == []
    slow_learner = {False: client(accuracy=0.5), True: client()}
    (message,) = unfair_peers({OURS: pair, "Flax NNX": slow_learner})
    assert "Flax NNX" in message and "accuracy" in message
