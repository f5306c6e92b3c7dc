"""What a step written for a mesh costs: on one device, against the same step without a mesh; on 8
simulated devices, against one.

python -m benchmarks.devices [rounds]
turns are interleaved in one process; the simulated devices have a process of their own
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from importlib import import_module
from operator import truediv

import jax
import numpy as np

from benchmarks.results import markdown, record, short
from benchmarks.steps import SIMULATED, mesh_name, program_of, step_of
from benchmarks.workloads import WORKLOADS, data_for
from model.vit import vit
from training.devices.mesh import make_mesh, replicated, sharded
from training.devices.options import MeshOptions
from training.devices.placing import put
from training.devices.sharding import Plan, shard_bytes
from training.engine import Program, memory_of, platform_options
from training.feed import over_orders
from utils import format_bytes

NAMES = ("convnext", "resnet", "vit")
TARGET = 1.03  # the ratio to the step without a mesh must stay below this
SECONDS = 0.1  # the approximate length of a turn
MESHES = ((1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 4, 1), (4, 1, 2))
IMAGE, BATCH, WIDTH = (32, 32, 3), 64, {"patch": 4, "dim": 128, "depth": 4, "heads": 4}
COLLECTIVES = r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
NOTE = f"""\
First table: the program as the toolkit compiles it, with its mesh of one device and its \
shardings, against plain `jax.jit` of the same steps with neither, with the same compiler options; \
the ratio must stay below {TARGET}. Second table: a vision transformer \
({", ".join(f"{name} {value}" for name, value in WIDTH.items())}) on the same batch of {BATCH} \
images of 32x32x3, over meshes of 8 simulated devices, which share the cores that one device has \
alone: the work is the same, so the ratio shows what splitting it and communicating cost, and what \
more threads gain. State: parameters, moments and sums on one device; temporary: the other memory \
that the program needs. Medians (quartiles); ratios are computed round by round."""


def main(rounds=60):
    head = ["model", "instructions, plain / with a mesh", "plain, ms per step", "with a mesh"]
    head += ["x plain", "reached"]
    one_device = markdown(head, [against_plain(name, rounds) for name in NAMES])
    command = [sys.executable, "-m", "benchmarks.devices", "simulated", str(max(rounds // 4, 5))]
    done = subprocess.run(
        command, env=os.environ | SIMULATED, stdout=subprocess.PIPE, text=True, check=True
    )
    head = ["mesh", "ms per step", "x one device", "state", "temporary", "collectives"]
    eight_devices = markdown(head, json.loads(done.stdout))
    tables = f"{one_device}\n\n{eight_devices}\n\n{NOTE}"
    record("Devices", "python -m benchmarks.devices", tables)


def against_plain(name, rounds):
    """The row of a model."""
    forms = one_device_forms(WORKLOADS[name])
    sizes = " / ".join(f"{instructions(form.args[1]):,}" for form in forms.values())
    times = measure(forms, rounds)
    (plain, _), (mesh, ratio) = cells(times, "plain")
    reached = statistics.median(map(truediv, times["mesh"], times["plain"])) < TARGET
    return [name, sizes, plain, mesh, ratio, "yes" if reached else "**no**"]


def instructions(compiled):
    """The number of XLA instructions in a compiled program: a figure without noise."""
    return len(re.findall(r"^ +(?:ROOT )?%\S+ = ", compiled.as_text(), re.MULTILINE))


def cells(times, base):
    """[[ms per step of each form, its ratio to the form `base`]]"""
    rows = []
    for seconds in times.values():
        ratios = list(map(truediv, seconds, times[base]))
        rows.append([quartiles([1e3 * t for t in seconds]), quartiles(ratios, "{:.3f}".format)])
    return rows


def quartiles(values, form=short):
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{form(middle)} ({form(low)} - {form(high)})"


def measure(forms, rounds):
    """{form: seconds per step in each round}, taking turns; every second round goes in reverse."""
    steps = max(steps_per_turn(run) for run in forms.values())
    times = {name: [] for name in forms}
    for i in range(rounds):
        for name in list(forms)[:: -1 if i % 2 else 1]:
            times[name].append(seconds(forms[name], steps) / steps)
    return times


def steps_per_turn(run):
    """The number of steps that fill a turn."""
    run(1)
    return max(1, round(SECONDS / max(seconds(run, 1), 1e-6)))


def seconds(run, steps):
    start = time.perf_counter()
    run(steps)
    return time.perf_counter() - start


def one_device_forms(workload):
    """{form: function that takes a number of steps}, over a dataset on the device."""
    factory = getattr(import_module(f"model.{workload.model}"), workload.model)
    model = factory(workload.shape, 10, **workload.args)
    step = step_of(model, workload.shape, workload.batch_size)
    mesh = make_mesh(devices=jax.devices()[:1])
    data = data_for(workload._replace(examples=4 * workload.batch_size))["train"]
    order = np.arange(4 * workload.batch_size, dtype=np.int32).reshape(4, -1)
    valid = np.full(4, workload.batch_size, np.int32)
    whole, shardings = replicated(mesh), Plan(mesh).of_state(step.carry)
    arrays = put(data, whole), put(order, sharded(mesh, 1)), put(valid, whole)
    loop = jax.lax.fori_loop if step.looped else None
    program = Program(
        over_orders(step.run, sharded(mesh), loop, len(order)),
        whole,
        options=platform_options(),
        shardings=shardings,
    )
    carry = put(jax.jit(step.make)(np.uint32(0)), shardings)
    program.prepare((), carry, *arrays, np.int32(0), np.int32(1))
    plain_arrays = jax.device_put((data, order, valid))
    plain_carry = jax.jit(step.make)(np.uint32(0))
    without_mesh = over_orders(step.run, None, loop, len(order))
    lowered = jax.jit(without_mesh, donate_argnums=1).lower(
        (), plain_carry, *plain_arrays, np.int32(0), np.int32(1)
    )
    plain = lowered.compile(platform_options())
    return {
        "plain": partial(run_rows, [plain_carry], plain, plain_arrays, step.looped),
        "mesh": partial(run_rows, [carry], program.compiled, arrays, step.looped),
    }


def run_rows(carry, program, arrays, looped, steps):
    """Take `steps` steps over the rows of a dataset: all four batches per call, or one at a time.

    `carry` is a list of one TrainState, which is replaced."""
    batches, done = len(arrays[2]), 0
    while done < steps:
        count = min(steps - done, batches) if looped else 1
        first = 0 if looped else done % batches
        carry[0], _ = program((), carry[0], *arrays, np.int32(first), np.int32(count))
        done += count
    jax.block_until_ready(carry[0])


def simulated(rounds):
    """The rows of the second table."""
    step = step_of(vit(IMAGE, 10, **WIDTH), IMAGE, BATCH)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(BATCH, *IMAGE)).astype(np.float32)
    batch = x, draw.integers(0, 10, BATCH).astype(np.int32)
    forms, properties = {}, []
    for shape in MESHES:
        program, shapes, plan = program_of(step, MeshOptions(*shape))
        carry = put(jax.jit(step.make)(np.uint32(0)), plan.of_state(step.carry))
        valid = put(np.int32(BATCH), replicated(plan.mesh))
        arrays = put(batch, sharded(plan.mesh)), valid
        program.prepare((), carry, *arrays)
        forms[mesh_name(shape)] = partial(run_batches, [carry], program, *arrays)
        properties.append(properties_of(program, shapes[1]))
    times = cells(measure(forms, rounds), "one device")
    return [[name, *a, *b] for name, a, b in zip(forms, times, properties, strict=True)]


def run_batches(carry, program, batch, valid, steps):
    """Take `steps` steps on the same batch; `carry` is as in `run_rows`."""
    for _ in range(steps):
        carry[0], _ = program((), carry[0], batch, valid)
    jax.block_until_ready(carry[0])


def properties_of(program, carry):
    """The cells of a program: bytes of state and of temporary memory on a device, and the
    collectives that XLA's partitioner has inserted."""
    state = sum(shard_bytes(leaf, leaf.sharding) for leaf in jax.tree.leaves(carry))
    temporary = memory_of(program.compiled)["temp_size_in_bytes"]
    counts = Counter(re.findall(COLLECTIVES, program.compiled.as_text()))
    collectives = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
    return [format_bytes(state), format_bytes(temporary), collectives]


if __name__ == "__main__":
    if sys.argv[1:2] == ["simulated"]:
        print(json.dumps(simulated(int(sys.argv[2]))))
    else:
        main(*map(int, sys.argv[1:]))
