"""What a training step of the vision transformer costs on accelerators, on paper: its time, its memory, and which preset to take.

python -m benchmarks.cost_model [--device H100] [--devices 8 64 512] [--batch 4096] [--precision bfloat16] [--efficiency 0.7]
python -m benchmarks.cost_model --compare   (memory and operations beside what XLA says of compiled steps, on 8 simulated devices)
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
from training.devices.mesh import in_words

DECADES = range(6, 12)  # powers of ten, in parameters
HEAD = [
    "parameters",
    "dim x depth",
    "sharding",
    "data x fsdp x tensor",
    "remat",
    "GB a device",
    "ms a step",
    "all-reduce, ms",
]
HEAD += ["gather and scatter, ms", "exposed, ms", "images/s", "MFU"]
ASSUMPTIONS = """\
{device.name}: {peak:,.0f} TFLOP/s at the peak, {memory:,.0f} GB at {bandwidth:,.4g} GB/s; {inside:,.4g} GB/s among
{device.near} devices, {outside:,.4g} GB/s beyond. Images of {height} x {width} in {step.tokens} patches, {step.batch:,} a step.
- Weights, gradients and AdamW's moments are float32, computed with and exchanged in {step.precision}.
- Products run at {efficiency:.0%} of the peak. What blocks keep goes through memory {visits} times, for the optimizer {passes}
  numbers a parameter do; neither goes on beside products.
- Exchanges are rings over the slower link of their group: 2 (n - 1) / n of the bytes to add up, (n - 1) / n to gather or to
  scatter, and {latency:.0f} us to begin one. Those of gradients and weights go on beside arithmetic, and add what is longer;
  those of `tensor` add all.
- Memory is cut as training.devices.sharding.Plan cuts it, gathered weights are there for two blocks at a time, and {usable:.0%} of a
  device's can be used. The simplest mesh within {worth:.0%} of the fastest is taken."""


def main():
    args = arguments()
    if args.compare:
        command = [sys.executable, "-m", "benchmarks.cost.compare"]
        sys.exit(subprocess.run(command, env=os.environ | SIMULATED, check=False).returncode)
    device = DEVICES[args.device]
    steps = [sized(10**power, args.batch, precision=args.precision) for power in DECADES]
    print(assumptions(device, steps[0], args.efficiency))
    for devices in args.devices:
        rows, notes = zip(
            *(row(step, devices, device, args.efficiency) for step in steps), strict=True
        )
        print(f"\n{devices} x {device.name}\n\n{markdown(HEAD, rows)}")
        print("".join(f"\n- {note}" for note in notes if note))


def arguments():
    parser = argparse.ArgumentParser(description="What a training step costs, on paper.")
    parser.add_argument("--device", default="H100", choices=DEVICES)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--batch", type=int, default=4096, help="images, of all devices together")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--efficiency",
        type=float,
        default=EFFICIENCY,
        help="the share of the peak that products reach",
    )
    parser.add_argument("--compare", action="store_true", help="compile steps, and compare")
    args = parser.parse_args()
    if min(args.devices) < 1 or args.batch < 1 or not 0 < args.efficiency <= 1:
        parser.error("--devices and --batch must be at least 1, --efficiency above 0 and at most 1")
    return args


def assumptions(device, step, efficiency):
    """What the figures rest on."""
    speeds = {
        name: getattr(device, name) / 1e9 for name in ("memory", "bandwidth", "inside", "outside")
    }
    shares = {"efficiency": efficiency, "usable": USABLE, "worth": WORTH - 1}
    counts = {
        "visits": VISITS,
        "passes": PASSES,
        "latency": 1e6 * LATENCY,
        "peak": device.flops[step.precision] / 1e12,
    }
    return ASSUMPTIONS.format(
        device=device,
        step=step,
        height=step.image[0],
        width=step.image[1],
        **speeds,
        **shares,
        **counts,
    )


def row(step, devices, device, efficiency):
    """(the cells of a model, what to say where it fits nowhere)."""
    plan, least = choose(step, devices, device, efficiency)
    name = [f"{count(step):,}", f"{step.dim} x {step.depth}"]
    if plan is None:
        blank = ["-"] * (len(HEAD) - 3)
        return [
            *name,
            "does not fit",
            *blank,
        ], f"{name[0]} parameters {unfit(step, least, devices, device, efficiency)}"
    sizes, time = plan.layout.sizes, plan.time
    cells = [
        plan.layout.preset,
        " x ".join(map(str, sizes.values())),
        "yes" if plan.layout.step.remat else "no",
    ]
    exchanges = (time.all_reduce + time.tensor, time.gather, time.exposed)
    cells += [
        f"{plan.memory.total / 1e9:.3g}",
        *(short(1e3 * seconds) for seconds in (time.total, *exchanges)),
    ]
    return [*name, *cells, short(step.batch / time.total), f"{time.mfu:.0%}"], ""


def unfit(step, least, devices, device, efficiency):
    """Why nothing fits, and what would."""
    if least is None:
        return f"fit on no mesh: {step.batch} images and {step.heads} heads do not divide over {devices} devices."
    limit = USABLE * device.memory / 1e9
    needs = f"need at least {least.memory.total / 1e9:,.3g} GB of {limit:.3g} a device ({arranged(least)})"
    more = enough(step, 2 * devices, device, efficiency)
    fewer, _ = choose(step._replace(batch=step.batch // 8), devices, device, efficiency)
    cures = [f"on {more.devices()} devices ({arranged(more)})"] if more else []
    cures += (
        [f"in batches of {step.batch // 8} ({arranged(fewer)}; see training.accumulate)"]
        if fewer
        else []
    )
    return (
        f"{needs}. They fit {' or '.join(cures)}."
        if cures
        else f"{needs}, and more devices would not help."
    )


def arranged(plan):
    return f"{in_words(plan.layout.sizes.values())}{', remat' if plan.layout.step.remat else ''}"


if __name__ == "__main__":
    main()
