"""The benchmark of training: what it trains, and what it says of what it measured; other frameworks are not needed."""

import ast
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.marks import OURS, faults, marks_table
from benchmarks.peers import ours
from benchmarks.workloads import WORKLOADS, prepared

PEERS = Path(ours.__file__).parent
FRAMEWORKS = {"flax", "equinox", "haiku", "keras", "torch", "tensorflow"}
SIZES = {"convnext": 13_810, "resnet": 78_042, "vit": 204_682, "mlp": 118_282}


def runner(multiple=1.0, **learned):
    learned = {"loss": 0.2, "accuracy": 0.9, "memory": 1, **learned}
    return SimpleNamespace(multiples=[multiple, multiple], parameters=100, learned=learned)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_models_are_those_that_the_marks_were_set_for(name):
    workload = WORKLOADS[name]
    x, y = prepared(
        np.full((8, 28, 28, 1), 255, np.uint8), np.zeros(8, np.uint8), workload.shape, 0
    )
    assert (
        x.shape == (8, *workload.shape)
        and x.dtype == np.float32
        and 0 < x.max() <= 1
        and y.dtype == np.int32
    )
    assert ours.trainer(workload, {"train": (x, y), "test": (x, y)}, "").parameters == SIZES[name]


def test_an_epoch_of_fit_is_trained_when_it_is_asked_for():
    y = np.arange(256, dtype=np.int32) % 10
    x = np.broadcast_to(
        np.eye(28, dtype=np.float32)[y][:, :, None, None], (256, 28, 28, 1)
    )  # the row of its number is white
    trainer = ours.trainer(WORKLOADS["mlp"], {"train": (x, y), "test": (x, y)}, "")
    losses = [trainer.epoch(i) for i in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert trainer.turns.done.empty() and trainer.turns.view.epoch == 3
    assert 0 <= trainer.accuracy() <= 1


def test_a_failure_of_fit_is_that_of_the_epoch():
    x, y = np.zeros((4, 28, 28, 1), np.float32), np.zeros(3, np.int32)
    with pytest.raises(Exception, match="one row for each example"):
        ours.trainer(WORKLOADS["mlp"], {"train": (x, y), "test": (x, y)}, "").epoch(0)


def test_a_mark_is_against_the_fastest_of_its_peers_in_equal_conditions():
    runners = {
        OURS: {False: runner(), True: runner()},
        "Flax NNX": {False: runner(3), True: runner(1.5)},
        "Haiku": {False: runner(2.5), True: runner(3)},
    }
    best_jax_peer, torch = marks_table("mlp", runners).splitlines()[2:]
    assert best_jax_peer.endswith("| at least 2 | 2.5 | yes | 1.5 | **no** |")
    assert torch.endswith("| - | not measured | - | not measured |")


def test_a_peer_that_does_not_learn_alike_is_named():
    pair = {False: runner(), True: runner()}
    assert faults({OURS: pair, "Flax NNX": pair}) == []
    (fault,) = faults({OURS: pair, "Flax NNX": {False: runner(accuracy=0.5), True: runner()}})
    assert "Flax NNX" in fault and "accuracy" in fault


def test_no_framework_is_imported_outside_its_own_module():
    for path in PEERS.parent.rglob("*.py"):
        if path.name != "exporters.py":  # it imports each inside the function that needs it
            assert {name.split(".")[0] for name in imports(path)} & FRAMEWORKS <= {path.stem}, path


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
