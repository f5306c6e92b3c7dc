"""The benchmark of meshes: that it compares the same steps, and what it reads off a program."""

import re
from collections import Counter

import jax
import numpy as np
import pytest

from benchmarks import devices
from benchmarks.workloads import Workload

TINY = Workload("mlp", "mlp", {"dims": (8,)}, (28, 28, 1), 32, 0.001)


@pytest.mark.torture
def test_with_a_mesh_and_without_the_same_steps_are_taken():
    forms = devices.one_device(TINY)
    for run in forms.values():
        run(6)  # more than the batches that one call has
    plain, mesh = (run.args[0][0] for run in forms.values())
    assert plain.step == mesh.step == 6
    for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(mesh.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_second_round_goes_the_other_way():
    taken = []
    forms = {name: lambda _, name=name: taken.append(name) for name in "ab"}
    devices.measure(forms, 2)
    assert "".join(taken[-4:]) == "abba"


def test_exchanges_are_counted_where_they_are_made_and_not_where_they_are_read():
    text = """
      %all-reduce.4 = (f32[8]{0}, f32[2]{0}) all-reduce(%a, %b), channel_id=1
      %get = f32[8]{0} get-tuple-element(%all-reduce.4), index=0
      %gather = f32[8]{0} all-gather-start(%get), dimensions={0}
      %done = f32[8]{0} all-gather-done(%gather)
    """
    assert Counter(re.findall(devices.COLLECTIVES, text)) == {"all-reduce": 1, "all-gather": 1}
