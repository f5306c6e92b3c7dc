"""Sixteen learning rates in three ways, as whole processes of the sample for one epoch, taking
turns: as sixteen runs of train.py, one after the other; as one run whose replicas have them
(training.vary); and as one sweep, which makes a program of them and a folder for each.

python -m benchmarks.vary [rounds]     writes RESULTS.md
python -m benchmarks.vary --tiny       two rates of a small model, once: whether it works
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
ONE_BY_ONE, TOGETHER, SWEEP = "one run for each", "one run, training.vary", "one sweep"
WAYS = (ONE_BY_ONE, TOGETHER, SWEEP)
# Callbacks and reports are left out, as they are drawn once for a run, not for its replicas.
SHORT = ["training.epochs=1", "callbacks=[]", "logging.report=false"]
TINY = [
    "model=mlp",
    "model.args.dims=[8]",
    "data=digits",
    "data.args.train_size=640",
    "data.args.test_size=64",
]


def main(*words):
    tiny = "--tiny" in words
    rounds = 1 if tiny else int(*words or [3])
    rates, overrides = (RATES[7:9], [*SHORT, *TINY]) if tiny else (RATES, SHORT + of_mnist())
    table = measured(rounds, rates, overrides)
    if tiny:
        print(table)
    else:
        record("Sixteen learning rates", "python -m benchmarks.vary", table)


def of_mnist():
    return [f"data.args.dir={os.environ['MNIST_DIR']}"] if "MNIST_DIR" in os.environ else []


def measured(rounds, rates, overrides):
    """The table of the seconds that each way took."""
    wall, cpu = {name: [] for name in WAYS}, {name: [] for name in WAYS}
    for i in range(rounds):
        for name in WAYS[:: 1 if i % 2 else -1]:
            with tempfile.TemporaryDirectory() as folder:
                commands = commands_of(name, rates, Path(folder))
                start, used = time.perf_counter(), of_children()
                for command in commands:
                    run([*command, f"checkpoint.dir={folder}/saved", *overrides], folder)
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(of_children() - used)
    rows = []
    for name in WAYS:
        ratios = [*map(truediv, wall[name], wall[ONE_BY_ONE])]
        rows.append([name, spread(wall[name]), spread(cpu[name]), spread(ratios)])
    return markdown(["", "seconds", "CPU seconds", f"time x {ONE_BY_ONE}"], rows)


def commands_of(name, rates, folder):
    """The commands of one way, without what all of them have."""
    train = ["train.py", "-c", "config.json"]
    if name == ONE_BY_ONE:
        return [[*train, f"{KEY}={rate}"] for rate in rates]
    if name == TOGETHER:
        vary = json.dumps({KEY: rates})
        return [[*train, f"training.replicas={len(rates)}", f"training.vary={vary}"]]
    spec = folder / "rates.json"
    spec.write_text(json.dumps({"keys": {KEY: rates}, "form": "program"}))
    return [["sweep.py", "-c", "config.json", str(spec)]]


def run(words, folder):
    environment = os.environ | {"XDG_CACHE_HOME": str(Path(folder) / "cache")}
    command = [sys.executable, *words]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def of_children():
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(*sys.argv[1:])
