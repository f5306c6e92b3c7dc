"""What the option `scan` of the models gains and costs: compile time and size of the training step
as a model gets deeper, and the time per step, with and without it.

python -m benchmarks.scan [rounds]
turns are interleaved in one process
"""

import statistics
import sys
import time
from operator import truediv

import jax
import numpy as np

from benchmarks.devices import instructions, measure
from benchmarks.results import markdown, record, short, spread
from benchmarks.steps import program_of, step_of
from model.convnext import convnext
from model.gpt import gpt
from model.resnet import resnet
from model.vit import vit
from training.devices.options import MeshOptions
from training.devices.placing import put
from training.engine import QUICKLY

DEPTHS = (4, 12, 24, 48)
VOCABULARY, LENGTH, IMAGE, BATCH = 65, 64, (16, 16, 3), 8
COMPILED = 2  # times that each program with `scan` is compiled; those without take long: once
TIMED = 12  # the largest depth at which steps are timed
TARGET = 1.5  # the compile time at the largest depth must stay below this times the smallest
FORMS = {"one by one": False, "scan": True}
OTHERS = {
    "vit, 6 blocks": lambda scan: vit(IMAGE, 10, dim=64, depth=6, scan=scan),
    "convnext, 6 blocks in 2 stages": lambda scan: convnext(
        IMAGE, 10, dims=(32, 64), depths=(3, 3), patch=2, residual=True, scan=scan
    ),
    "resnet, 6 blocks in 2 widths": lambda scan: resnet(
        IMAGE, 10, widths=(16, 32), depth=3, scan=scan
    ),
}
STEP_HEAD = ["one by one, ms per step", "scan, ms per step", "scan x one by one"]
NOTE = f"""\
The training step with AdamW, float32. First table: a `gpt` of width 64 on {BATCH} texts of \
{LENGTH} tokens. Compiling includes tracing; median (smallest - largest) of {COMPILED} with \
`scan`, once without, in seconds of all cores together. Instructions are XLA's in the compiled \
program. The target is a compile time at depth {DEPTHS[-1]} of at most {TARGET} x that at depth \
{DEPTHS[0]}. Second table: the other \
models on {BATCH} images of {"x".join(map(str, IMAGE))}. Times per step are medians (smallest - \
largest) over turns that alternate; ratios are computed turn by turn."""


def main(rounds=9):
    rows, others, seconds = [], [], {}
    for depth in DEPTHS:
        programs = {}
        for name, scan in FORMS.items():
            model = gpt((LENGTH,), VOCABULARY, dim=64, depth=depth, heads=4, scan=scan)
            times = []
            for _ in range(COMPILED if scan else 1):
                start = time.process_time()
                programs[name] = compiled(model, (LENGTH,), tokens=True)
                times.append(time.process_time() - start)
            seconds[name, depth] = times
        sizes = [f"{instructions(program.compiled):,}" for program, _ in programs.values()]
        compile_times = [spread(seconds[name, depth]) for name in FORMS]
        steps = step_cells(programs, rounds) if depth <= TIMED else ["-"] * 3
        rows.append([str(depth), *compile_times, *sizes, *steps])
        write(rows, others, seconds)
    for name, make in OTHERS.items():
        programs = {form: compiled(make(scan), IMAGE) for form, scan in FORMS.items()}
        others.append([name, *step_cells(programs, rounds)])
        write(rows, others, seconds)


def write(rows, others, seconds):
    """Write what has been measured so far, since all of it takes long."""
    if ("scan", DEPTHS[-1]) in seconds:
        growth = [grown(seconds, name) for name in FORMS]
        cells = [f"x {short(value)}" for value in growth]
        rows = [*rows, [f"{DEPTHS[-1]} / {DEPTHS[0]}", *cells, *[""] * 5]]
        reached = "reached" if growth[-1] <= TARGET else "**not reached**"
    else:
        reached = f"not measured, as the program was stopped before depth {DEPTHS[-1]}"
    head = ["depth", "one by one, CPU s to compile", "scan, CPU s to compile"]
    head += ["one by one, instructions", "scan, instructions"]
    text = f"{markdown([*head, *STEP_HEAD], rows)}\n\nThe target is {reached}.\n\n"
    if others:
        text += f"{markdown(['model', *STEP_HEAD], others)}\n\n"
    record("Equal blocks compiled as one", "python -m benchmarks.scan", text + NOTE)


def compiled(model, shape, tokens=False):
    """(its compiled training step, a function that takes a number of steps)"""
    step = step_of(model, shape, BATCH, tokens=tokens)
    program, arguments, plan = program_of(step, MeshOptions())
    program.prepare(*arguments)

    def first():
        """Arrays on the device, made after the compile time was taken."""
        draw = np.random.default_rng(0)
        x, y = (np.zeros(leaf.shape, leaf.dtype) for leaf in step.batch)
        x = draw.integers(0, VOCABULARY, x.shape, x.dtype) if tokens else x + draw.random(x.shape)
        batch = put((x.astype(step.batch[0].dtype), y), plan.batch())
        make = jax.jit(step.make, compiler_options=QUICKLY)
        return put(make(np.uint32(0)), plan.of_state(step.carry)), batch

    kept = []

    def run(steps):
        kept[:] = kept or first()
        for _ in range(steps):
            kept[0], _ = program((), kept[0], kept[1], np.int32(BATCH))
        jax.block_until_ready(kept[0])

    return program, run


def step_cells(programs, rounds):
    """The cells of the times per step."""
    times = measure({name: run for name, (_, run) in programs.items()}, rounds)
    ratios = list(map(truediv, times["scan"], times["one by one"]))
    milliseconds = [spread([1e3 * t for t in times[name]]) for name in FORMS]
    return [*milliseconds, spread(ratios)]


def grown(seconds, name):
    """The compile time at the largest depth, divided by that at the smallest."""
    last, first = (statistics.median(seconds[name, depth]) for depth in (DEPTHS[-1], DEPTHS[0]))
    return last / first


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
