"""What a step pays for being written for a mesh: on one device, beside the same step without a mesh; on 8, beside one.

python -m benchmarks.devices [rounds]   (turns interleaved in one process; the simulated devices have a process of their own)
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
from itertools import cycle
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
from training.programs import Program, memory_of, options_for, over_rows
from utils import format_bytes

NAMES = ("convnext", "resnet", "vit")
TARGET = 1.03  # times the step without a mesh
SECONDS = 0.1  # a turn lasts at least so long
MESHES = ((1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 4, 1), (4, 1, 2))
IMAGE, BATCH, WIDTH = (32, 32, 3), 64, {"patch": 4, "dim": 128, "depth": 4, "heads": 4}
COLLECTIVES = r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
NOTE = (
    "First: the program as the toolkit compiles it, with its mesh of one device and its shardings, over plain `jax.jit` of the "
    f"same steps with neither, under the same compiler options; the ratio is to stay under {TARGET}. Then: a vision transformer "
    f"({', '.join(f'{name} {value}' for name, value in WIDTH.items())}) on the same batch of {BATCH} images of 32x32x3, over "
    "meshes of 8 simulated devices, which share the cores that one device has alone: the work is the same, so the ratio is what "
    "cutting it and exchanging cost, and what more threads gain. Held: parameters, moments and sums, of one device; in between: "
    "what the program needs besides. Medians (quartiles); ratios are taken round by round."
)


def main(rounds=60):
    one = markdown(
        [
            "model",
            "instructions, plain / with a mesh",
            "plain, ms a step",
            "with a mesh",
            "x plain",
            "reached",
        ],
        [beside_plain(name, rounds) for name in NAMES],
    )
    command = [sys.executable, "-m", "benchmarks.devices", "simulated", str(max(rounds // 4, 5))]
    done = subprocess.run(
        command, env=os.environ | SIMULATED, stdout=subprocess.PIPE, text=True, check=True
    )
    head = ["mesh", "ms a step", "x one device", "held", "in between", "exchanges in the program"]
    record(
        "Devices",
        "python -m benchmarks.devices",
        f"{one}\n\n{markdown(head, json.loads(done.stdout))}\n\n{NOTE}",
    )


def beside_plain(name, rounds):
    """The row of a model."""
    forms = one_device(WORKLOADS[name])
    sizes = " / ".join(f"{instructions(form.args[1]):,}" for form in forms.values())
    times = measure(forms, rounds)
    (plain, _), (mesh, ratio) = cells(times, "plain")
    reached = statistics.median(map(truediv, times["mesh"], times["plain"])) < TARGET
    return [name, sizes, plain, mesh, ratio, "yes" if reached else "**no**"]


def instructions(compiled):
    """How many XLA has made of a program: a figure without noise."""
    return len(re.findall(r"^ +(?:ROOT )?%\S+ = ", compiled.as_text(), re.MULTILINE))


def cells(times, base):
    """[[ms a step of each form, its ratio to one of them]]"""
    return [
        [
            quartiles([1e3 * t for t in found]),
            quartiles(list(map(truediv, found, times[base])), "{:.3f}".format),
        ]
        for found in times.values()
    ]


def quartiles(values, form=short):
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{form(middle)} ({form(low)} - {form(high)})"


def measure(forms, rounds):
    """{form: seconds a step in each round}: one after the other, and every second round in the other order."""
    steps = {name: calibrated(run) for name, run in forms.items()}
    steps = dict.fromkeys(forms, max(steps.values()))
    times = {name: [] for name in forms}
    for order, _ in zip(cycle((list(forms), list(forms)[::-1])), range(rounds), strict=False):
        for name in order:
            times[name].append(seconds(forms[name], steps[name]) / steps[name])
    return times


def calibrated(run):
    """How many steps fill a turn."""
    run(1)
    return max(1, round(SECONDS / max(seconds(run, 1), 1e-6)))


def seconds(run, steps):
    start = time.perf_counter()
    run(steps)
    return time.perf_counter() - start


def one_device(workload):
    """{form: function that takes so many steps}, over a dataset on the device."""
    model = getattr(import_module(f"model.{workload.model}"), workload.model)(
        workload.shape, 10, **workload.args
    )
    step, mesh = (
        step_of(model, workload.shape, workload.batch_size),
        make_mesh(devices=jax.devices()[:1]),
    )
    data = data_for(workload._replace(examples=4 * workload.batch_size))["train"]
    order = np.arange(4 * workload.batch_size, dtype=np.int32).reshape(4, -1)
    valid = np.full(4, workload.batch_size, np.int32)
    whole, places = replicated(mesh), Plan(mesh).of_state(step.carry)
    given = put(data, whole), put(order, sharded(mesh, 1)), put(valid, whole)
    program = Program(
        over_rows(step.run, step.report, mesh, step.looped),
        mesh,
        options=options_for(step.looped),
        places=places,
    )
    carry = put(jax.jit(step.make)(np.uint32(0)), places)
    program.prepare((), carry, *given, np.int32(0), np.int32(1))
    bare, first = jax.device_put((data, order, valid)), jax.jit(step.make)(np.uint32(0))
    lowered = jax.jit(without_mesh(step), donate_argnums=1).lower(
        (), first, *bare, np.int32(0), np.int32(1)
    )
    plain = lowered.compile(options_for(step.looped))
    return {
        "plain": partial(steps_of, [first], plain, bare, step.looped),
        "mesh": partial(steps_of, [carry], program.compiled, given, step.looped),
    }


def without_mesh(step):
    """over_rows of training/programs.py, but for the place of the batch."""

    def one(const, carry, data, order, valid, row):
        return step.run(const, carry, jax.tree.map(lambda a: a[order[row]], data), valid[row])

    def loop(const, carry, data, order, valid, start, count):
        carry = jax.lax.fori_loop(
            start, start + count, lambda i, c: one(const, c, data, order, valid, i), carry
        )
        return carry, step.report(carry)

    def single(const, carry, data, order, valid, start, _count):
        carry = one(const, carry, data, order, valid, start)
        return carry, step.report(carry)

    return loop if step.looped else single


def steps_of(held, program, given, looped, count):
    """Take so many steps, in calls of the four batches that there are."""
    taken = 0
    while taken < count:
        some = min(count - taken, len(given[2])) if looped else 1
        held[0], _ = program(
            (),
            held[0],
            *given,
            np.int32(taken % len(given[2]) if not looped else 0),
            np.int32(some),
        )
        taken += some
    jax.block_until_ready(held[0])


def simulated(rounds):
    """The rows of the second table."""
    step = step_of(vit(IMAGE, 10, **WIDTH), IMAGE, BATCH)
    draw = np.random.default_rng(0)
    batch = (
        draw.normal(size=(BATCH, *IMAGE)).astype(np.float32),
        draw.integers(0, 10, BATCH).astype(np.int32),
    )
    forms, facts = {}, []
    for shape in MESHES:
        program, shapes, plan = program_of(step, MeshOptions(*shape))
        carry = put(jax.jit(step.make)(np.uint32(0)), plan.of_state(step.carry))
        given = carry, put(batch, sharded(plan.mesh)), put(np.int32(BATCH), replicated(plan.mesh))
        program.prepare((), *given)
        forms[mesh_name(shape)] = partial(steps_over, [carry], program, *given[1:])
        facts.append(facts_of(program, shapes[1]))
    measured = cells(measure(forms, rounds), "one device")
    return [[name, *times, *fact] for name, times, fact in zip(forms, measured, facts, strict=True)]


def steps_over(held, program, batch, valid, count):
    for _ in range(count):
        held[0], _ = program((), held[0], batch, valid)
    jax.block_until_ready(held[0])


def facts_of(program, carry):
    """What a device holds, what it needs besides, and the exchanges that XLA's partitioner has put into the program."""
    held = sum(shard_bytes(leaf, leaf.sharding) for leaf in jax.tree.leaves(carry))
    found = Counter(re.findall(COLLECTIVES, program.compiled.as_text()))
    exchanges = ", ".join(f"{times} {name}" for name, times in sorted(found.items())) or "none"
    return [
        format_bytes(held),
        format_bytes(memory_of(program.compiled)["temp_size_in_bytes"]),
        exchanges,
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["simulated"]:
        print(json.dumps(simulated(int(sys.argv[2]))))
    else:
        main(*map(int, sys.argv[1:]))
