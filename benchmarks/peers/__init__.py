"""The frameworks that benchmarks/training.py compares: one module each, in the idiom of the framework's own documentation.

VARIANTS = ("",)                      the ways to run it that its documentation shows
trainer(workload, data, variant) ->   an object with
    parameters                        how many numbers the model learns
    epoch(seed) -> float              trains on data["train"] once, in a new order; the mean loss, once all is computed
    accuracy() -> float               on data["test"]

Each measures the accuracy in training beside the loss, computes in float32, and draws its batches from arrays in memory by a
permutation, a short last one left out: the fastest loader that such data allows. No module imports another's framework.
"""
