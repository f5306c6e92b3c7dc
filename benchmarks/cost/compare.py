"""Compares the cost model with XLA: real training steps, compiled for simulated CPU devices from
shapes alone, and never run.

python -m benchmarks.cost_model --compare   (starts this module with 8 simulated devices)
"""

import math
import statistics
import sys
from typing import NamedTuple

from benchmarks.cost.memory import CPU, memory
from benchmarks.cost.vit_step import Vit, flops, laid_out
from benchmarks.results import markdown, record
from benchmarks.steps import mesh_name, program_of, step_of
from training.devices.options import MeshOptions

ONE, DATA, FSDP, BOTH, TENSOR = (1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 4, 1), (4, 1, 2)
NOTE = """\
One device, float32: XLA's memory is that of arguments, temporaries and results that are not \
donated, from `memory_analysis`; its operations are all those that `cost_analysis` counts. With \
fewer tokens than a weight has columns, fsdp's weights are not gathered. The CPU compiler gathers \
all others at the start and reduces all gradients at the end; the model assumes this here, but not \
on accelerators."""


def small(dim, depth, batch, patch=4, **others):
    """A model for images as small as CIFAR's."""
    heads, others = max(dim // 64, 4), {"precision": "float32", **others}
    return Vit(dim, depth, heads, batch, (32, 32, 3), patch, 10, **others)


CASES = [
    *((small(64, depth, batch), ONE) for depth, batch in ((2, 8), (4, 128), (12, 64))),
    *((small(256, depth, batch), ONE) for depth, batch in ((4, 64), (12, 8))),
    *((small(1024, 2, batch), ONE) for batch in (8, 64)),
    (small(256, 8, 64, remat=True), ONE),
    *((small(128, 6, 32, patch=2, remat=remat), ONE) for remat in (False, True)),
    (small(64, 3, 4, patch=1), ONE),
    *((small(*sizes), DATA) for sizes in ((64, 4, 1024), (256, 4, 64), (1024, 2, 8))),
    *(
        (small(*sizes), FSDP)
        for sizes in ((64, 4, 1024), (256, 4, 8), (256, 4, 64), (1024, 6, 8), (1024, 2, 64))
    ),
    *((small(*sizes, remat=True), FSDP) for sizes in ((256, 8, 64), (1024, 2, 64))),
    *((small(*sizes), BOTH) for sizes in ((256, 4, 64), (1024, 2, 64))),
    (small(128, 6, 32, patch=2), BOTH),
    *(
        (small(*sizes), TENSOR)
        for sizes in ((64, 4, 1024), (256, 4, 64), (512, 4, 64), (1024, 2, 64))
    ),
    (small(256, 4, 64, remat=True), TENSOR),
    (small(128, 6, 32, patch=2), TENSOR),
]


class Compared(NamedTuple):
    """Bytes and floating-point operations of one device."""

    ours: float
    xla: float
    our_flops: float
    xla_flops: float


def compared(case, shape):
    """The model's figures and those of the compiled step."""
    compiled = compile_step(case, shape)
    analysis = compiled.memory_analysis()
    size = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    size += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    our_size, our_flops = memory(laid_out(case, shape), CPU).total, flops(case)[1]
    return Compared(our_size, size, our_flops / math.prod(shape), compiled.cost_analysis()["flops"])


def compile_step(case, shape):
    """The step, compiled as a run compiles it."""
    step = step_of(case.model(), case.image, case.batch, case.precision)
    program, shapes, _ = program_of(step, MeshOptions(*shape))
    program.prepare(*shapes)
    return program.compiled


def main():
    rows, memories, operations = [], [], []
    for case, shape in CASES:
        print(f"{case.dim} x {case.depth}, {mesh_name(shape)}", file=sys.stderr)
        result = compared(case, shape)
        memories.append(result.ours / result.xla)
        operations.append(result.our_flops / result.xla_flops)
        name, remat = f"{case.dim} x {case.depth}", "yes" if case.remat else "no"
        cells = [mesh_name(shape), name, str(case.tokens), str(case.batch), remat]
        sizes = [f"{size / 1e6:,.1f}" for size in result[:2]]
        rows.append([*cells, *sizes, f"{memories[-1]:.3f}", f"{operations[-1]:.3f}"])
    rows.append(["median (range)", *[""] * 6, ratio_spread(memories), ratio_spread(operations)])
    head = ["mesh", "dim x depth", "tokens", "batch", "remat", "model, MB", "XLA, MB"]
    head += ["model / XLA", "operations, model / XLA"]
    table = f"{markdown(head, rows)}\n\n{NOTE}"
    record("Cost model", "python -m benchmarks.cost_model --compare", table)


def ratio_spread(ratios):
    """As `spread`, with three decimals, since these ratios are near 1."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})"


if __name__ == "__main__":
    main()
