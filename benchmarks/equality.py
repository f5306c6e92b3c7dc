"""Does a result depend on how a batch is split over devices and processes?

python -m benchmarks.equality            # 1, 2, 4, 8 simulated devices, in 1 and 2 processes
python -m benchmarks.equality --quick    # two steps of each, without writing RESULTS.md

Compares the losses of the same `fit` with the same global batch. Float64 proves that the
computation is the same; float32 shows the effect of rounding.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.harness import in_process
from benchmarks.results import arguments, markdown, record
from training.devices.launcher import free_port

STEPS = {"float64": 100, "float32": 20}
BOUND = {"float64": 1e-9, "float32": 1e-5}
BATCH = 16
# (devices, processes, mesh); the others are compared with the first.
LAYOUTS = [(1, 1, {}), (2, 1, {}), (4, 1, {}), (8, 1, {}), (2, 2, {}), (4, 2, {}), (8, 2, {})]
LAYOUTS += [(8, 1, {"fsdp": 8}), (8, 2, {"data": 2, "fsdp": 4})]
TENSOR = [(8, 1, {"data": 2, "fsdp": 2, "tensor": 2})]
TEXT = f"""\
The largest relative difference of any loss (of every step, and of the test set with averaged
weights) from the run on one device. The global batch is {BATCH}; resnet has batch norm, vit has
dropout. Required: below 1e-9 in float64, below 1e-5 in float32."""
CASES = ("convnext", "resnet", "vit", "vit, accumulate 2")


def main():
    """Run every case on every layout, and record the table."""
    args, rows = arguments("equality", __doc__, quick=False), []
    for case in CASES:
        reference, layouts = {}, LAYOUTS + (TENSOR if case != "resnet" else [])
        for layout in layouts:
            results = {
                precision: losses(case, precision, 2 if args.quick else steps, *layout)
                for precision, steps in STEPS.items()
            }
            reference = reference or results
            cells = [difference_cell(results[p], reference[p], BOUND[p]) for p in STEPS]
            rows.append([case, layout_name(*layout), *cells])
            print(*rows[-1], sep=" | ", flush=True)
    if not args.quick:
        columns = [f"{precision}, {steps} steps" for precision, steps in STEPS.items()]
        table = markdown(["case", "devices, processes, mesh", *columns], rows)
        record(args, "Equality", TEXT, table)


def difference_cell(losses, reference, bound):
    difference = np.abs(losses / reference - 1).max()
    return f"{difference:.1e}{'' if difference < bound else ' **too far**'}"


def layout_name(devices, processes, mesh):
    """`4, 2, data 2 x fsdp 2`: 4 devices in 2 processes, with this mesh."""
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    return f"{devices}, {processes}{', ' if mesh else ''}{axes}"


def losses(case, precision, steps, devices, processes, mesh):
    """The loss of every step, on which all processes must agree."""
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": str(int(precision == "float64")),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices // processes}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # most of the time is compilation
    }
    if processes > 1:
        address = f"127.0.0.1:{free_port()}"
        variables |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}

    def train(i):
        own = {"JAX_PROCESS_ID": str(i)} if processes > 1 else {}
        words = "benchmarks.equality:trained", case, steps, mesh
        return in_process(*words, variables=variables | own, timeout=900)

    with ThreadPoolExecutor(processes) as pool:
        results = list(pool.map(train, range(processes)))
    assert all(each == results[0] for each in results), "the losses of the processes differ"
    return np.array(results[0])


def trained(case, steps, mesh):
    """The losses of a run in this process, which may be one of several."""
    import logging

    from training.devices import joining
    from training.fit import fit
    from training.optimizers import adam
    from training.preprocess import to_unit

    joining.join()
    logging.getLogger("main").setLevel(logging.ERROR)
    rng = np.random.default_rng(0)
    count = steps * BATCH // 2 - 5  # two epochs, with a short last batch
    x = rng.integers(0, 256, (count, 8, 8, 1)).astype(np.uint8)
    y = rng.integers(0, 3, count).astype(np.int32)
    step_losses = StepLosses()
    run = fit(
        model(case),
        (x, y),
        (x[:20], y[:20]),
        preprocess=[to_unit],
        optimizer=adam(lr=0.001),
        batch_size=BATCH,
        epochs=2,
        mesh=mesh,
        ema=0.9,
        accumulate=2 if "accumulate" in case else 1,
        log={"every_steps": 1},
        callbacks=[step_losses],
    )
    test_losses = [row["test_loss"] for row in run.history]  # with averaged weights
    return [*step_losses.losses, *test_losses]


class StepLosses:
    """A callback that keeps the loss of every step."""

    def __init__(self):
        self.every, self.losses = {"steps": 1}, []

    def on_steps(self, run):
        self.losses.append(run.metrics["train_loss"])


def model(case):
    """A small model, but with batch norm or dropout, and with leaves large enough to be sharded."""
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
