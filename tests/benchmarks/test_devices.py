"""The devices benchmark: it compares the same steps, and counts the collectives of a program."""

import re
from collections import Counter

import jax
import numpy as np
import pytest

from benchmarks import devices
from benchmarks.workloads import Workload

TINY = Workload("mlp", "mlp", {"dims": (8,)}, (28, 28, 1), 32, 0.001)


@pytest.mark.torture
def test_the_steps_with_and_without_a_mesh_are_the_same():
    forms = devices.one_device_forms(TINY)
    for run in forms.values():
        run(6)  # more than the four batches of one call
    plain, mesh = (run.args[0][0] for run in forms.values())
    assert plain.step == mesh.step == 6
    for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(mesh.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_second_round_goes_in_reverse():
    calls = []
    forms = {name: lambda _, name=name: calls.append(name) for name in "ab"}
    devices.measure(forms, 2)
    assert "".join(calls[-4:]) == "abba"


def test_collectives_are_counted_where_they_run_and_not_where_their_results_are_read():
    text = """
      %all-reduce.4 = (f32[8]{0}, f32[2]{0}) all-reduce(%a, %b), channel_id=1
      %get = f32[8]{0} get-tuple-element(%all-reduce.4), index=0
      %gather = f32[8]{0} all-gather-start(%get), dimensions={0}
      %done = f32[8]{0} all-gather-done(%gather)
    """
    assert Counter(re.findall(devices.COLLECTIVES, text)) == {"all-reduce": 1, "all-gather": 1}
