"""Latency of exported files, side by side: each in a process of its own, on one thread, taking turns.

python -m benchmarks.latency FILE FILE ... [--rounds 25]   (.onnx or .tflite; ratios are to the last file)
"""

import argparse
import statistics
import subprocess
import sys
import time

import numpy as np

from benchmarks.results import spread
from inference.runtimes import open_model

BATCHES = (1, 64)
TURN = 0.05  # seconds that one file computes before the next takes its turn


def compare(files, rounds=25):
    """{name: {batch: microseconds in each round}} of {name: file}, for the sizes of the batch that a file takes; what a round
    tells is the median of many runs.
    """
    runners = {name: Runner(file) for name, file in files.items()}
    times = {
        name: {batch: [] for batch in BATCHES if takes(file, batch)} for name, file in files.items()
    }
    for i in range(rounds + 1):
        for batch in BATCHES:
            for name in files if i % 2 else reversed(files):
                if batch in times[name]:
                    taken = runners[name].measure(batch)
                    times[name][batch] += [taken] if i > 0 else []  # the first round warms up
    for runner in runners.values():
        runner.end()
    return times


def takes(file, batch):
    return all(shape[0] in (None, batch) for shape, _ in open_model(file).inputs.values())


def ratios(times, others):
    """Round by round, one file's times as a multiple of another's."""
    return [a / b for a, b in zip(times, others, strict=True)]


class Runner:
    """A process that holds one file, and measures when it is told to."""

    def __init__(self, file):
        command = [sys.executable, "-m", "benchmarks.latency", "--serve", str(file)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def measure(self, batch):
        self.process.stdin.write(f"{batch}\n")
        return float(self.process.stdout.readline())

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def serve(file):
    """For each size of the batch that comes in, the median microseconds of a run of the file go out."""
    runs = {}
    for line in sys.stdin:
        batch = int(line)
        if batch not in runs:
            runs[batch] = run_of(file, batch)
        print(median_time(runs[batch]), flush=True)


def run_of(file, batch):
    """What is timed: the runtime's own call, without what our wrapper adds."""
    model = open_model(file)
    arrays = {
        name: np.random.default_rng(0).random((batch, *shape[1:]), np.float32)
        for name, (shape, _) in model.inputs.items()
    }
    model(arrays)
    return (
        model.interpreter.invoke
        if file.endswith(".tflite")
        else lambda: model.session.run(None, arrays)
    )


def median_time(run):
    times, end = [], time.perf_counter() + TURN
    while (began := time.perf_counter()) < end:
        run()
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(*args.files)
    times = compare({file: file for file in args.files}, args.rounds)
    for batch in BATCHES:
        for file, found in times.items():
            ratio = spread(ratios(found[batch], times[args.files[-1]][batch]))
            print(f"batch {batch:2}: {spread(found[batch]):>24} us, x {ratio:24} {file}")


if __name__ == "__main__":
    main()
