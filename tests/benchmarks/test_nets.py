"""The networks of the speed distribution are the same ones in every framework."""

import random

import pytest

from benchmarks.nets import drawn_convolutions, recurrent_networks
from benchmarks.workloads import data_of, from_json

rng = random.Random(1)
NETWORKS = [drawn_convolutions(rng) for _ in range(4)] + list(recurrent_networks())[:3]


def parameters(peer, workload):
    module = pytest.importorskip(f"benchmarks.peers.{peer}")
    return module.trainer(workload, data_of(workload), "").parameters


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["flax", "torch"])
@pytest.mark.parametrize("number", range(len(NETWORKS)))
def test_a_drawn_network_has_as_many_parameters_in_every_framework(number, peer):
    workload = NETWORKS[number]._replace(batch_size=2, examples=2)
    # The biases of recurrent gates differ: PyTorch has two where one is enough.
    difference = 0.05 if workload.model == "rnn" else 0
    theirs = parameters(peer, workload)
    assert parameters("ours", workload) == pytest.approx(theirs, rel=difference)


def test_a_network_survives_its_way_to_a_worker():
    workload = NETWORKS[0]
    as_lists = {"layers": [list(layer) for layer in workload.args["layers"]]}
    fields = workload._asdict() | {"args": as_lists, "shape": list(workload.shape)}
    assert from_json(fields) == workload


def test_a_seed_always_draws_the_same_networks():
    first, second = (drawn_convolutions(random.Random(3)) for _ in range(2))
    assert first == second
