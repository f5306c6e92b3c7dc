"""Sixteen learning rates in three ways, as whole processes of the sample for one epoch, taking
turns: as sixteen runs of train.py, one after the other; as one run whose replicas have them
(training.vary); and as one sweep, which makes a program of them.

python -m benchmarks.vary [--rounds 3]
python -m benchmarks.vary --tiny --out FILE     two rates of a small model, once: whether it works
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness import ROOT, take_turns
from benchmarks.results import arguments, markdown, ratios, record, spread
from benchmarks.startup import of_mnist

RATES = [float(f"{rate:.3g}") for rate in np.geomspace(1e-4, 1e-1, 16)]
KEY = "optimizer.args.lr"
ONE_BY_ONE, TOGETHER, SWEEP = "one run for each", "one run, training.vary", "one sweep"
# Callbacks and reports are left out, as they are drawn once for a run, not for its replicas.
SHORT = ["training.epochs=1", "callbacks=[]", "logging.report=false"]
TINY = ["model=mlp", "model.args.dims=[8]", "data=digits"]
TINY += ["data.args.train_size=640", "data.args.test_size=64"]


def main():
    args = arguments("vary", __doc__, rounds=3, tiny=False)
    rates, overrides = (RATES[7:9], [*SHORT, *TINY]) if args.tiny else (RATES, SHORT + of_mnist())
    ways = {way: partial(take, way, rates, overrides) for way in (ONE_BY_ONE, TOGETHER, SWEEP)}
    results = {way: np.transpose(pairs) for way, pairs in take_turns(ways, args.rounds).items()}
    rows = [
        [way, spread(wall), spread(cpu), spread(ratios(wall, results[ONE_BY_ONE][0]))]
        for way, (wall, cpu) in results.items()
    ]
    head = ["", "seconds", "CPU seconds", f"time x {ONE_BY_ONE}"]
    record(args, "Sixteen learning rates", markdown(head, rows))


def take(way, rates, overrides):
    """(the seconds, the CPU seconds) of one way, with a new cache of compiled programs."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache"}
        commands = commands_of(way, rates, Path(folder))
        start, used = time.perf_counter(), of_children()
        for words in commands:
            command = [sys.executable, *words, f"checkpoint.dir={folder}/saved", *overrides]
            subprocess.run(
                command, check=True, env=environment, stdout=subprocess.DEVNULL, cwd=ROOT
            )
        return time.perf_counter() - start, of_children() - used


def commands_of(way, rates, folder):
    """The commands of one way, without what all of them have."""
    train = ["train.py", "-c", "config.json"]
    if way == ONE_BY_ONE:
        return [[*train, f"{KEY}={rate}"] for rate in rates]
    if way == TOGETHER:
        vary = json.dumps({KEY: rates})
        return [[*train, f"training.replicas={len(rates)}", f"training.vary={vary}"]]
    spec = folder / "rates.json"
    spec.write_text(json.dumps({"keys": {KEY: rates}, "form": "program"}))
    return [["sweep.py", "-c", "config.json", str(spec)]]


def of_children():
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
