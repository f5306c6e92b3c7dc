"""The frameworks that benchmarks/training.py compares: one module each, written in the idiom of the
framework's own documentation.

VARIANTS = ("",)                      the ways to run it that its documentation shows
trainer(workload, data, variant) ->   an object with
    parameters                        the number of parameters of the model
    epoch(seed) -> float              trains on data["train"] once, in a new order; returns the mean
                                      loss after all computation is done
    accuracy() -> float               on data["test"]

Each also measures the training accuracy, computes in float32, and takes its batches from arrays in
memory by a permutation, without a short last batch: the fastest loader that such data allows. No
module imports another's framework.
"""
