"""Sixteen learning rates: as sixteen runs of train.py, one after the other, and as one run whose
replicas have them (training.vary). Whole processes of the sample for one epoch, taking turns.

python -m benchmarks.vary [rounds]
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from operator import truediv
from pathlib import Path

import numpy as np

from benchmarks.results import markdown, record, spread

RATES = [float(f"{rate:.3g}") for rate in np.geomspace(1e-4, 1e-1, 16)]
KEY = "optimizer.args.lr"
ONE_BY_ONE, TOGETHER = "sixteen runs", "one run, training.vary"


def main(rounds=3):
    wall, cpu = {ONE_BY_ONE: [], TOGETHER: []}, {ONE_BY_ONE: [], TOGETHER: []}
    for i in range(rounds):
        for name in [ONE_BY_ONE, TOGETHER][:: 1 if i % 2 else -1]:
            with tempfile.TemporaryDirectory() as folder:
                start, used = time.perf_counter(), of_children()
                for overrides in runs(name):
                    train(folder, overrides)
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(of_children() - used)
    rows = [
        [
            name,
            spread(wall[name]),
            spread(cpu[name]),
            spread([*map(truediv, wall[name], wall[ONE_BY_ONE])]),
        ]
        for name in wall
    ]
    head = ["", "seconds", "CPU seconds", f"time x {ONE_BY_ONE}"]
    record("Sixteen learning rates", "python -m benchmarks.vary", markdown(head, rows))


def runs(name):
    """The overrides of each run."""
    if name == ONE_BY_ONE:
        return [[f"{KEY}={rate}"] for rate in RATES]
    return [[f"training.replicas={len(RATES)}", f"training.vary={json.dumps({KEY: RATES})}"]]


def train(folder, overrides):
    """The sample for one epoch; its callbacks and report are left out, as they are drawn once for a
    run, not for each of its replicas."""
    command = [sys.executable, "train.py", "-c", "config.json", f"checkpoint.dir={folder}/saved"]
    command += ["training.epochs=1", "callbacks=[]", "logging.report=false", *overrides]
    command += [f"data.args.dir={os.environ['MNIST_DIR']}"] if "MNIST_DIR" in os.environ else []
    environment = os.environ | {"XDG_CACHE_HOME": str(Path(folder) / "cache")}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def of_children():
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
