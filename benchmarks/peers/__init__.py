"""The frameworks that benchmarks/training.py compares: one module each, written in the idiom of the
framework's own documentation.

trainer(workload, data, variant) ->   an object with
    parameters                        the number of parameters of the model
    epoch(seed) -> float              trains on data["train"] once, in a new order; returns the mean
                                      loss after all computation is done
    accuracy() -> float               on data["test"]
    device_memory()                   the peak memory of the device in bytes; None on a CPU

Each also measures the training accuracy, computes in float32, and takes its batches from arrays in
memory by a permutation, without a short last batch: the fastest loader that such data allows. No
module imports another's framework.
"""

import numpy as np

TEST_BATCH = 500


def accuracy_of(predict, data):
    """The accuracy of a function from inputs to logits."""
    x, y = data
    logits = [predict(x[i : i + TEST_BATCH]) for i in range(0, len(x), TEST_BATCH)]
    return float(np.mean(np.argmax(np.concatenate(logits), -1) == y))
