"""Estimates what a training step of the vision transformer costs on accelerators: its time, its
memory, and which sharding preset is best.

python -m benchmarks.cost_model [--device H100] [--devices 8 64 512] [--batch 4096]
                                [--precision bfloat16] [--efficiency 0.7]
python -m benchmarks.cost_model --compare
compares memory and operations with XLA's figures for compiled steps, on 8 simulated devices
"""

import argparse
import os
import subprocess
import sys

from benchmarks.cost.choice import USABLE, WORTH, choose, enough
from benchmarks.cost.duration import EFFICIENCY, LATENCY, PASSES, VISITS
from benchmarks.cost.hardware import DEVICES
from benchmarks.cost.vit_step import count, sized
from benchmarks.results import markdown, short
from benchmarks.steps import SIMULATED
from training.devices.mesh import text_of_sizes

POWERS = range(6, 12)  # of ten, in parameters
HEAD = ["parameters", "dim x depth", "sharding", "data x fsdp x tensor", "remat", "GB per device"]
HEAD += [
    "ms per step",
    "all-reduce, ms",
    "gather and scatter, ms",
    "exposed, ms",
    "images/s",
    "MFU",
]
ASSUMPTIONS = """\
{device.name}: {peak:,.0f} TFLOP/s peak, {memory:,.0f} GB at {bandwidth:,.4g} GB/s;
{inside:,.4g} GB/s between the {device.near} devices of a host or slice, {outside:,.4g} GB/s beyond.
Images of {height} x {width} in {step.tokens} patches, {step.batch:,} per step.
- Weights, gradients and AdamW's moments are float32; computation and communication use
  {step.precision}.
- Matrix products run at {efficiency:.0%} of the peak. The stored activations of the blocks pass
  through memory {visits} times, and the optimizer reads or writes {passes} numbers per parameter;
  neither overlaps with products.
- Collectives are rings over the slowest link of their group: 2 (n - 1) / n of the bytes for an
  all-reduce, (n - 1) / n for a gather or a scatter, and {latency:.0f} us to start one. Those of
  gradients and weights overlap with arithmetic, and the longer of the two counts; those of
  `tensor` do not overlap.
- The state is sharded by training.devices.sharding.Plan, gathered weights are in memory for two
  blocks at a time, and {usable:.0%} of a device's memory is usable. The simplest mesh within
  {worth:.0%} of the fastest is chosen."""


def main():
    args = arguments()
    if args.compare:
        command = [sys.executable, "-m", "benchmarks.cost.compare"]
        sys.exit(subprocess.run(command, env=os.environ | SIMULATED, check=False).returncode)
    device = DEVICES[args.device]
    steps = [sized(10**power, args.batch, precision=args.precision) for power in POWERS]
    print(assumptions(device, steps[0], args.efficiency))
    for devices in args.devices:
        rows, notes = zip(
            *(row(step, devices, device, args.efficiency) for step in steps), strict=True
        )
        print(f"\n{devices} x {device.name}\n\n{markdown(HEAD, rows)}")
        print("".join(f"\n- {note}" for note in notes if note))


def arguments():
    parser = argparse.ArgumentParser(description="Estimate what a training step costs.")
    add = parser.add_argument
    add("--device", default="H100", choices=DEVICES)
    add("--devices", type=int, nargs="+", action="extend", help="default: 8 64 512")
    add("--batch", type=int, default=4096, help="images, over all devices")
    add("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    efficiency_help = "the fraction of the peak that matrix products reach"
    add("--efficiency", type=float, default=EFFICIENCY, help=efficiency_help)
    add("--compare", action="store_true", help="compile steps, and compare with XLA's figures")
    args = parser.parse_args()
    args.devices = args.devices or [8, 64, 512]
    if min(args.devices) < 1 or args.batch < 1 or not 0 < args.efficiency <= 1:
        parser.error("--devices and --batch must be at least 1, --efficiency above 0 and at most 1")
    return args


def assumptions(device, step, efficiency):
    """The assumptions behind the figures."""
    gigabytes = {
        name: getattr(device, name) / 1e9 for name in ("memory", "bandwidth", "inside", "outside")
    }
    return ASSUMPTIONS.format(
        device=device,
        step=step,
        height=step.image[0],
        width=step.image[1],
        efficiency=efficiency,
        usable=USABLE,
        worth=WORTH - 1,
        visits=VISITS,
        passes=PASSES,
        latency=1e6 * LATENCY,
        peak=device.flops[step.precision] / 1e12,
        **gigabytes,
    )


def row(step, devices, device, efficiency):
    """(the cells of a model, a note if it does not fit)."""
    plan, smallest = choose(step, devices, device, efficiency)
    name = [f"{count(step):,}", f"{step.dim} x {step.depth}"]
    if plan is None:
        note = f"{name[0]} parameters {why_not(step, smallest, devices, device, efficiency)}"
        return [*name, "does not fit", *["-"] * (len(HEAD) - 3)], note
    time = plan.time
    seconds = (time.total, time.all_reduce + time.tensor, time.gather, time.exposed)
    return [
        *name,
        plan.layout.preset,
        " x ".join(map(str, plan.layout.sizes.values())),
        "yes" if plan.layout.step.remat else "no",
        f"{plan.memory.total / 1e9:.3g}",
        *(short(1e3 * value) for value in seconds),
        short(step.batch / time.total),
        f"{time.mfu:.0%}",
    ], ""


def why_not(step, smallest, devices, device, efficiency):
    """Why a step does not fit, and what would make it fit."""
    if smallest is None:
        divided = f"{step.batch} images and {step.heads} heads"
        return f"fit on no mesh: {divided} cannot be divided over {devices} devices."
    needed, usable = smallest.memory.total / 1e9, USABLE * device.memory / 1e9
    problem = f"need at least {needed:,.3g} GB of {usable:.3g} per device ({plan_name(smallest)})"
    more = enough(step, 2 * devices, device, efficiency)
    fewer, _ = choose(step._replace(batch=step.batch // 8), devices, device, efficiency)
    fixes = [f"on {more.devices()} devices ({plan_name(more)})"] if more else []
    if fewer:
        batches = f"in batches of {step.batch // 8}"
        fixes.append(f"{batches} ({plan_name(fewer)}; see training.accumulate)")
    if fixes:
        return f"{problem}. They fit {' or '.join(fixes)}."
    return f"{problem}, and more devices would not help."


def plan_name(plan):
    return (
        f"{text_of_sizes(plan.layout.sizes.values())}{', remat' if plan.layout.step.remat else ''}"
    )


if __name__ == "__main__":
    main()
