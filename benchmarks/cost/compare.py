"""The cost model beside XLA: real training steps, compiled for simulated CPU devices from shapes alone, and never run.

python -m benchmarks.cost_model --compare   (which starts this with 8 simulated devices)
"""

import statistics
import sys
from typing import NamedTuple

from benchmarks.cost.memory import CPU, memory
from benchmarks.cost.vit_step import Vit, flops, laid_out
from benchmarks.results import markdown, record
from benchmarks.steps import mesh_name, program_of, step_of
from training.devices.options import MeshOptions

ONE, DATA, FSDP, BOTH, TENSOR = (1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 4, 1), (4, 1, 2)
NOTE = (
    "Of one device, in float32: what `memory_analysis` says of arguments, temporaries and results that are not donated, and the "
    "operations that `cost_analysis` counts, of everything. With fewer tokens than a weight has columns, fsdp's weights are not "
    "gathered. The CPU's compiler gathers all other ones at the start and adds up all gradients at the end; they are priced so "
    "here, but not on accelerators."
)


def small(dim, depth, batch, patch=4, **others):
    """A model of images as small as CIFAR's."""
    return Vit(
        dim, depth, max(dim // 64, 4), batch, (32, 32, 3), patch, 10, precision="float32", **others
    )


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
    """Bytes, and floating-point operations, of one device."""

    ours: float
    xla: float
    our_flops: float
    xla_flops: float


def compared(case, shape):
    """The model's figures beside those of the compiled step."""
    priced, devices = memory(laid_out(case, shape), CPU), shape[0] * shape[1] * shape[2]
    compiled = compile_step(case, shape)
    told = compiled.memory_analysis()
    held = (
        told.argument_size_in_bytes
        + told.temp_size_in_bytes
        + told.output_size_in_bytes
        - told.alias_size_in_bytes
    )
    return Compared(priced.total, held, flops(case)[1] / devices, compiled.cost_analysis()["flops"])


def compile_step(case, shape):
    """As a run compiles it."""
    step = step_of(case.model(), case.image, case.batch, case.precision)
    program, forms, _ = program_of(step, MeshOptions(*shape))
    return program.lowered(forms).compile(program.options)


def main():
    rows, memories, operations = [], [], []
    for case, shape in CASES:
        print(f"{case.dim} x {case.depth}, {mesh_name(shape)}", file=sys.stderr)
        found = compared(case, shape)
        memories.append(found.ours / found.xla)
        operations.append(found.our_flops / found.xla_flops)
        cells = [
            mesh_name(shape),
            f"{case.dim} x {case.depth}",
            str(case.tokens),
            str(case.batch),
            "yes" if case.remat else "no",
        ]
        sizes = [f"{size / 1e6:,.1f}" for size in found[:2]]
        rows.append([*cells, *sizes, f"{memories[-1]:.3f}", f"{operations[-1]:.3f}"])
    rows.append(["median (range)", "", "", "", "", "", "", middle(memories), middle(operations)])
    head = [
        "mesh",
        "dim x depth",
        "tokens",
        "batch",
        "remat",
        "model, MB",
        "XLA, MB",
        "model / XLA",
        "operations, model / XLA",
    ]
    record(
        "Cost model",
        "python -m benchmarks.cost_model --compare",
        f"{markdown(head, rows)}\n\n{NOTE}",
    )


def middle(ratios):
    """Three digits say more of a ratio near 1 than `spread` would."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})"


if __name__ == "__main__":
    main()
