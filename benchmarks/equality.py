"""Does a result depend on how a batch is split? The losses of the same run on other numbers of devices and processes.

python -m benchmarks.equality            # 1, 2, 4, 8 simulated devices, in 1 and 2 processes; writes its section of RESULTS.md
python -m benchmarks.equality --quick    # two steps of each

Every run is `fit` with the same global batch. Float64 proves that the meaning is the same; float32 shows what rounding does.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.results import markdown, record
from training.devices.launcher import free_port

ROOT = Path(__file__).resolve().parents[1]
STEPS = {"float64": 100, "float32": 20}
BOUND = {"float64": 1e-9, "float32": 1e-5}
BATCH = 16
# (devices, processes, mesh); the first is what the others are compared with
PLACES = [(1, 1, {}), (2, 1, {}), (4, 1, {}), (8, 1, {}), (2, 2, {}), (4, 2, {}), (8, 2, {})]
PLACES += [(8, 1, {"fsdp": 8}), (8, 2, {"data": 2, "fsdp": 4})]
TENSOR = [(8, 1, {"data": 2, "fsdp": 2, "tensor": 2})]
TEXT = f"""The largest relative difference of any loss (of every step, and of the test set by averaged weights) from the run on
one device. The global batch is {BATCH}; resnet has batch norm, vit dropout. Asked: 1e-9 in float64, 1e-5 in float32."""
CASES = ("convnext", "resnet", "vit", "vit, accumulate 2")


def main():
    """Run every case everywhere, print the table, keep it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two steps of each")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(**json.loads(arguments.worker))
    rows = []
    for case in CASES:
        first, places = {}, PLACES + (TENSOR if case != "resnet" else [])
        for devices, processes, mesh in places:
            found = {
                p: losses(case, p, 2 if arguments.quick else STEPS[p], devices, processes, mesh)
                for p in STEPS
            }
            first = first or found
            apart = {p: np.abs(found[p] / first[p] - 1).max() for p in STEPS}
            shown = [
                f"{gap:.1e}{'' if gap < BOUND[p] else ' **too far**'}" for p, gap in apart.items()
            ]
            rows.append([case, described(devices, processes, mesh), *shown])
            print(*rows[-1], sep=" | ", flush=True)
    if not arguments.quick:
        table = markdown(
            ["case", "devices, processes, mesh", *(f"{p}, {STEPS[p]} steps" for p in STEPS)], rows
        )
        record("Equality", "python -m benchmarks.equality", f"{TEXT}\n\n{table}")


def described(devices, processes, mesh):
    """4 devices in 2 processes, data 2 x fsdp 2."""
    return f"{devices}, {processes}{', ' if mesh else ''}{' x '.join(f'{axis} {size}' for axis, size in mesh.items())}"


def losses(case, precision, steps, devices, processes, mesh, timeout=900):
    """The loss of every step, which all processes must agree on."""
    told = json.dumps({"case": case, "precision": precision, "steps": steps, "mesh": mesh})
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": str(int(precision == "float64")),
    }
    # Most of the time is compilation.
    each = f"--xla_force_host_platform_device_count={devices // processes}"
    environment |= {"XLA_FLAGS": each, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    if processes > 1:
        environment |= {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
            "JAX_NUM_PROCESSES": str(processes),
        }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.equality", "--worker", told],
            cwd=ROOT,
            env=environment | ({"JAX_PROCESS_ID": str(i)} if processes > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    try:
        said = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, complaint) in zip(started, said, strict=True):
        if process.returncode:
            raise SystemExit(
                f"{case} on {described(devices, processes, mesh)}: {complaint[-2000:]}"
            )
    found = [json.loads(out.split("LOSSES")[1]) for out, _ in said]
    assert all(each == found[0] for each in found), "processes tell of different losses"
    return np.array(found[0])


def work(case, precision, steps, mesh):
    """Train in this process, which may be one of several, and tell the losses."""
    import logging

    from training.devices import joining
    from training.fit import fit
    from training.optimizers import adam
    from training.preprocess import to_unit

    joining.join()
    logging.getLogger("main").setLevel(logging.ERROR)
    rng = np.random.default_rng(0)
    count = steps * BATCH // 2 - 5  # two epochs, with a short last batch
    x, y = (
        rng.integers(0, 256, (count, 8, 8, 1)).astype(np.uint8),
        rng.integers(0, 3, count).astype(np.int32),
    )
    told = Told()
    options = {
        "preprocess": [to_unit],
        "optimizer": adam(lr=0.001),
        "batch_size": BATCH,
        "epochs": 2,
        "mesh": mesh,
        "ema": 0.9,
    }
    options |= {
        "log": {"every_steps": 1},
        "callbacks": [told],
        "accumulate": 2 if "accumulate" in case else 1,
    }
    run = fit(model(case), (x, y), (x[:20], y[:20]), **options)
    held_out = [row["test_loss"] for row in run.history]  # by averaged weights
    print("LOSSES" + json.dumps([*told.losses, *held_out]))


class Told:
    """Keeps the loss of every step."""

    def __init__(self):
        self.losses = []

    def on_step_end(self, view):
        self.losses.append(view.metrics["train_loss"])


def model(case):
    """Small, but with batch norm, or dropout, and leaves large enough to be cut."""
    from model.convnext import convnext
    from model.resnet import resnet
    from model.vit import vit

    if case == "convnext":
        return convnext((8, 8, 1), 3, dims=(32,))
    if case == "resnet":
        return resnet((8, 8, 1), 3, widths=(16, 32), depth=1)
    return vit((8, 8, 1), 3, dim=64, depth=2, heads=4, dropout=0.0 if "accumulate" in case else 0.1)


if __name__ == "__main__":
    main()
