"""The cost model against what XLA compiles for 8 simulated devices, and against figures by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh

from benchmarks.cost import choice, duration
from benchmarks.cost.hardware import DEVICES, link
from benchmarks.cost.vit_step import count, laid_out, sized
from training.base import TrainState
from training.devices.mesh import AXES
from training.devices.sharding import Plan, shard_bytes
from training.optimizers import adamw

ROOT = Path(__file__).resolve().parents[2]
H100 = DEVICES["H100"]

PROGRAM = """
import json, sys
from benchmarks.cost.compare import compared, small
few = [
    (small(192, 1, 64), (1, 8, 1)),
]
more = [
    (small(512, 2, 8), (1, 1, 1)),
    (small(256, 2, 64), (1, 8, 1)),
    (small(512, 2, 64), (4, 1, 2)),
    (small(64, 4, 32), (1, 1, 1)),
    (small(128, 3, 16, patch=2, remat=True), (1, 1, 1)),
    (small(192, 3, 64), (8, 1, 1)),
    (small(256, 3, 64), (1, 8, 1)),
    (small(384, 2, 64, remat=True), (2, 4, 1)),
]
cases = {"few": few, "more": more}[sys.argv[1]]
print("RESULT" + json.dumps([compared(case._replace(heads=4), shape) for case, shape in cases]))
"""


@pytest.fixture(scope="module", params=["few", pytest.param("more", marks=pytest.mark.torture)])
def figures(request):
    """[(our bytes, XLA's, our operations, XLA's)] of steps that were not used to fit the model."""
    flags = "--xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, request.param],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.split("RESULT")[1])


@pytest.mark.torture
def test_memory_is_that_of_the_compiled_step(figures):
    ratios = [ours / xla for ours, xla, *_ in figures]
    assert ratios == pytest.approx([1] * len(ratios), abs=0.15)


@pytest.mark.slow
def test_operations_are_those_of_the_compiled_step(figures):
    ratios = [ours / xla for *_, ours, xla in figures]
    assert ratios == pytest.approx([1] * len(ratios), abs=0.1)


@pytest.mark.parametrize("power", [6, 8, 11])
def test_a_model_has_about_as_many_parameters_as_requested(power):
    assert count(sized(10**power, 8)) == pytest.approx(10**power, rel=0.3)


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_the_state_is_sharded_as_by_the_plan(shape):
    step = sized(10**7, 8)
    params = step.shapes()
    ts = TrainState(None, None, params, {}, jax.eval_shape(adamw().init, params), None, {}, None)
    sizes = jax.tree.map(shard_bytes, ts, Plan(AbstractMesh(shape, AXES)).of_state(ts))
    assert laid_out(step, shape).state == sum(jax.tree.leaves(sizes))


def test_fsdp_divides_the_state():
    whole, shard = (laid_out(sized(10**8, 8), (1, fsdp, 1)).state for fsdp in (1, 8))
    assert whole / shard == pytest.approx(8, rel=0.01)


def test_data_parallel_is_chosen_for_a_small_model_and_not_for_a_large_one():
    small, _ = choice.choose(sized(10**6, 4096), 8, H100, duration.EFFICIENCY)
    assert small.layout.preset == "data_parallel" and choice.fits(small, H100)
    large, _ = choice.choose(sized(10**11, 4096), 512, H100, duration.EFFICIENCY)
    assert large.layout.preset != "data_parallel" and choice.fits(large, H100)


@pytest.mark.slow
def test_for_a_model_that_does_not_fit_a_number_of_devices_that_suffices_is_found():
    step = sized(10**11, 4096)
    plan, least = choice.choose(step, 8, H100, duration.EFFICIENCY)
    assert plan is None and least.memory.total > H100.memory
    more = choice.enough(step, 16, H100, duration.EFFICIENCY)
    assert more.devices() > 8 and choice.fits(more, H100)


def test_a_ring_over_hosts_takes_the_slower_link():
    """By hand: the 8 GPUs of a host share 8 cards of 50 GB/s; a group with one GPU per host has one
    card each."""
    links = [link(H100, *group) for group in ((8, 1), (64, 1), (8, 8), (8, 4))]
    assert links == [450e9, 400e9, 50e9, 100e9]
    assert duration.all_reduce(1e9, 8, 8, H100) == pytest.approx(2 * 7 / 8 * 1e9 / 50e9)
    assert duration.all_gather(1e9, 8, 1, H100) == pytest.approx(7 / 8 * 1e9 / 450e9)
    assert duration.all_reduce(1e9, 1, 1, H100) == 0


def test_collectives_that_arithmetic_hides_add_nothing():
    assert duration.exposed(arithmetic=1.0, overlapping=0.5, blocking=0.1) == pytest.approx(0.1)
    assert duration.exposed(arithmetic=1.0, overlapping=1.5, blocking=0.1) == pytest.approx(0.6)
