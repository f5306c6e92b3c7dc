"""Latency of exported files, each in a process of its own, on one thread, taking turns.

python -m benchmarks.latency --files FILE,FILE,... [--rounds 25]
.onnx or .tflite; ratios are to the last file
"""

import statistics
import sys
import time
from functools import partial

import numpy as np

from benchmarks.harness import Worker, take_turns
from benchmarks.results import arguments, ratios, spread
from inference.runtimes import open_model

BATCHES = (1, 64)
TURN = 0.05  # seconds that one file computes before the next takes its turn


class File:
    """An exported file, in a worker process."""

    def __init__(self, path):
        self.model, self.path = open_model(path), path
        self.calls = {}

    def batches(self):
        """The batch sizes that it accepts."""
        first = {shape[0] for shape, _ in self.model.inputs.values()}
        return [batch for batch in BATCHES if first <= {None, batch}]

    def microseconds(self, batch):
        """The median of the many calls of one turn."""
        if batch not in self.calls:
            self.calls[batch] = self.runtime_call(batch)
        call = self.calls[batch]
        times, end = [], time.perf_counter() + TURN
        while (start := time.perf_counter()) < end:
            call()
            times.append(1e6 * (time.perf_counter() - start))
        return statistics.median(times)

    def runtime_call(self, batch):
        """The runtime's own call, without the overhead of our wrapper."""
        model = open_model(self.path)
        arrays = {
            name: np.random.default_rng(0).random((batch, *shape[1:]), np.float32)
            for name, (shape, _) in model.inputs.items()
        }
        model(arrays)
        if str(self.path).endswith(".tflite"):
            return model.interpreter.invoke
        return lambda: model.session.run(None, arrays)


def compare(files, rounds=25):
    """{(name, batch): microseconds in each round} of {name: file}, for the batch sizes that each
    file accepts."""
    workers = {name: Worker("benchmarks.latency:File", str(file)) for name, file in files.items()}
    calls = {
        (name, batch): partial(worker.call, "microseconds", batch)
        for batch in BATCHES
        for name, worker in workers.items()
        if batch in worker.call("batches")
    }
    times = take_turns(calls, rounds)
    for worker in workers.values():
        worker.close()
    return times


def main():
    args = arguments("latency", __doc__, files="", rounds=25)
    files = args.files.split(",")
    if not args.files:
        sys.exit("--files: name some .onnx or .tflite files")
    times = compare({file: file for file in files}, args.rounds)
    for (file, batch), values in times.items():
        ratio = spread(ratios(values, times[files[-1], batch]))
        print(f"batch {batch:2}: {spread(values):>24} us, x {ratio:24} {file}")


if __name__ == "__main__":
    main()
