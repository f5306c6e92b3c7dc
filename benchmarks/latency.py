"""Latency of exported files, each in a process of its own, on one thread, taking turns.

python -m benchmarks.latency FILE FILE ... [--rounds 25]
.onnx or .tflite; ratios are to the last file
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
    """{name: {batch: microseconds in each round}} of {name: file}, for the batch sizes that each
    file accepts; each value is the median of the many calls of one turn."""
    timers = {name: FileTimer(file) for name, file in files.items()}
    times = {
        name: {batch: [] for batch in BATCHES if accepts(file, batch)}
        for name, file in files.items()
    }
    for i in range(rounds + 1):
        for batch in BATCHES:
            for name in files if i % 2 else reversed(files):
                if batch in times[name]:
                    microseconds = timers[name].measure(batch)
                    times[name][batch] += [microseconds] if i > 0 else []  # round 0 warms up
    for timer in timers.values():
        timer.end()
    return times


def accepts(file, batch):
    return all(shape[0] in (None, batch) for shape, _ in open_model(file).inputs.values())


def ratios(times, others):
    """One file's times as multiples of another's, round by round."""
    return [a / b for a, b in zip(times, others, strict=True)]


class FileTimer:
    """A process that holds one file and measures it on request."""

    def __init__(self, file):
        command = [sys.executable, "-m", "benchmarks.latency", "--serve", str(file)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, text=True, bufsize=1)

    def measure(self, batch):
        self.process.stdin.write(f"{batch}\n")
        return float(self.process.stdout.readline())

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def serve(file):
    """Read batch sizes from stdin, and write the median microseconds of a call for each."""
    calls = {}
    for line in sys.stdin:
        batch = int(line)
        if batch not in calls:
            calls[batch] = runtime_call(file, batch)
        print(median_time(calls[batch]), flush=True)


def runtime_call(file, batch):
    """The runtime's own call, without the overhead of our wrapper."""
    model = open_model(file)
    arrays = {
        name: np.random.default_rng(0).random((batch, *shape[1:]), np.float32)
        for name, (shape, _) in model.inputs.items()
    }
    model(arrays)
    if file.endswith(".tflite"):
        return model.interpreter.invoke
    return lambda: model.session.run(None, arrays)


def median_time(call):
    times, end = [], time.perf_counter() + TURN
    while (start := time.perf_counter()) < end:
        call()
        times.append(1e6 * (time.perf_counter() - start))
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
        for file, by_batch in times.items():
            ratio = spread(ratios(by_batch[batch], times[args.files[-1]][batch]))
            print(f"batch {batch:2}: {spread(by_batch[batch]):>24} us, x {ratio:24} {file}")


if __name__ == "__main__":
    main()
