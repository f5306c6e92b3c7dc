"""Batches of arrays in memory, for the frameworks that take NumPy arrays."""

import numpy as np

TEST_BATCH = 500


def training_batches(data, batch_size, seed):
    """The batches (x, y) of one epoch in a random order, without a short last batch."""
    x, y = data
    order = np.random.default_rng(seed).permutation(len(x))
    for i in range(0, len(x) - batch_size + 1, batch_size):
        rows = order[i : i + batch_size]
        yield x[rows], y[rows]


def device_memory():
    """The peak memory of the first device of JAX, in bytes; None on a CPU."""
    import jax  # PyTorch's process has none

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def accuracy_of(predict, data):
    """The accuracy of a function from images to logits."""
    x, y = data
    logits = [predict(x[i : i + TEST_BATCH]) for i in range(0, len(x), TEST_BATCH)]
    return float(np.mean(np.argmax(np.concatenate(logits), -1) == y))
