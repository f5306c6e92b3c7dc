"""The four modes of specialize_key, on two processes with two devices each."""

import json

import numpy as np
import pytest

from tests.processes import finished, start_all

PROGRAM = """
import json
import jax, numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import PartitionSpec as P
from training import joining
from training.keys import specialize_key
from training.sharding import make_mesh
from typing import get_args
from training.keys import Mode

joining.join()
mesh, found = make_mesh(), {}
for mode in get_args(Mode):
    def draw(key):
        return jax.random.normal(specialize_key(key, mode, mesh), (1, 3))
    drawn = jax.jit(jax.shard_map(draw, mesh=mesh, in_specs=P(), out_specs=P(mesh.axis_names), check_vma=False))
    found[mode] = np.asarray(process_allgather(drawn(jax.random.key(0)), tiled=True)).tolist()
print("FOUND" + json.dumps([found, [d.process_index for d in mesh.devices.flat]]))
"""


def test_what_is_unique_by_host_and_by_device():
    said = [
        json.loads(out.split("FOUND")[1])
        for out, _ in finished(start_all(PROGRAM, processes=2, devices=2))
    ]
    assert said[0] == said[1], "the processes see different numbers"
    found, hosts = said[0]
    assert hosts == [0, 0, 1, 1]
    a, b, c, d = range(4)  # two devices of each host
    same = {
        "unique_host_unique_device": set(),
        "unique_host_same_device": {(a, b), (c, d)},
        "same_host_unique_device": {(a, c), (b, d)},
        "same_host_same_device": {(i, j) for i in range(4) for j in range(i + 1, 4)},
    }
    for mode, drawn in found.items():
        drawn = np.array(drawn)
        assert drawn.shape == (4, 3)
        equal = {(i, j) for i in range(4) for j in range(i + 1, 4) if (drawn[i] == drawn[j]).all()}
        assert equal == same[mode], mode


def test_a_mode_that_is_none_is_told():
    from training.keys import specialize_key

    with pytest.raises(
        ValueError, match=r"must be one of unique_host_unique_device, .*, got 'unique'"
    ):
        specialize_key(None, "unique", None)
