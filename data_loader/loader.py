"""From a dataset to batches: the order of an epoch, stacking, prefetching, and batches that a user brings."""

import hashlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np

from data_loader.base import Arrays, Batch, has_items
from data_loader.nest import map_nest, named_nest
from utils import UserError

SPLIT = 2**64 - 1  # the random stream of the split; epochs count from 0 and never reach it


def epoch_order(n, batch_size, *, seed, epoch, shuffle):
    """(indices (steps, batch_size), genuine ones per row (steps,)): a short last row goes on with the epoch's first examples."""
    if n == 0:
        raise UserError("the dataset is empty: it has no example to train or evaluate on")
    if batch_size < 1:
        raise ValueError(f"batch_size: {batch_size} is too small; at least 1")
    order = random_stream(seed, epoch).permutation(n) if shuffle else np.arange(n)
    steps = -(-n // batch_size)
    valid = np.full(steps, batch_size, np.int32)
    valid[-1] = n - (steps - 1) * batch_size
    return np.resize(order.astype(np.int32), (steps, batch_size)), valid


def random_stream(seed, stream):
    """A generator that is a pure function of (seed, stream)."""
    return np.random.Generator(np.random.Philox(key=(stream << 64) | seed % 2**64))


class Subset:
    """Some examples of a dataset, read when asked for."""

    def __init__(self, dataset, indices):
        self.dataset = dataset
        self.indices = indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        chosen = self.indices[index]
        return self.dataset[chosen if takes_rows(self.dataset) else int(chosen)]

    def read_batches(self, order, collate_fn):
        """The batches, as the whole dataset reads them: see `reads`."""
        return self.dataset.read_batches(self.indices[order], collate_fn)


def takes_rows(dataset):
    """Whether many examples can be had at once, dataset[array of indices], as only our own arrays promise."""
    return type(dataset) is Arrays or (type(dataset) is Subset and takes_rows(dataset.dataset))


def reads(dataset):
    """Whether a dataset reads batches in a way of its own."""
    return reads(dataset.dataset) if type(dataset) is Subset else hasattr(dataset, "read_batches")


def held_out(n, val_size):
    """How many of n examples a val_size takes: a count (int) or a fraction (float); 0 takes none."""
    count = round(n * val_size) if isinstance(val_size, float) else val_size
    if val_size and not 0 < count < n:
        raise UserError(
            f"val_size: {val_size} takes {count} of {n} examples; allowed: 1 to {n - 1}, or a fraction in (0, 1)"
        )
    return count


def split(dataset, val_size, seed):
    """(train, val): two disjoint parts of a dataset, chosen by the seed, each in the dataset's order."""
    n = len(dataset)
    count = held_out(n, val_size)
    order = random_stream(seed, SPLIT).permutation(n)
    return _subset(dataset, np.sort(order[count:])), _subset(dataset, np.sort(order[:count]))


def _subset(dataset, indices):
    if type(dataset) is not Arrays or any(
        isinstance(a, np.memmap) for _, a in named_nest(dataset.arrays)
    ):
        return Subset(dataset, indices)  # a memory-mapped file stays on disk
    return Arrays(*dataset[indices], dataset.source)


class Firsts:
    """The first batches of an iterable of batches, in every epoch."""

    def __init__(self, iterable, count):
        self.iterable, self.count = iterable, count

    def __iter__(self):
        return islice(self.iterable, self.count)


def first_batches(dataset, count, batch_size):
    """The first so many batches of a dataset, or of an iterable of batches, as a dataset of their own."""
    if not has_items(dataset):
        return Firsts(dataset, count)
    return _subset(dataset, np.arange(min(len(dataset), count * batch_size)))


def collate(examples) -> Batch:
    """One batch of a list of examples: every leaf stacked along a new first axis."""
    try:
        return map_nest(lambda *leaves: np.stack(leaves), *examples)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"the examples of a batch do not stack: {error}; a collate_fn of your own can pad them"
        ) from error


def batches(dataset, order, collate_fn=collate, start=0):
    """The batches of the rows of `order`, from row `start` on."""
    if reads(dataset):
        yield from dataset.read_batches(order[start:], collate_fn)
        return
    whole = takes_rows(dataset) and collate_fn is collate
    for row in order[start:]:
        yield dataset[row] if whole else collate_fn([dataset[int(i)] for i in row])


def prefetch(iterable, depth=2):
    """The same items, the next `depth` of them made ahead of time in a thread."""
    iterator, end = iter(iterable), object()
    pool = ThreadPoolExecutor(1, "prefetch")
    try:
        ahead = deque(pool.submit(next, iterator, end) for _ in range(depth))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(pool.submit(next, iterator, end))
            yield item
    finally:  # also when the consumer leaves early
        pool.shutdown(cancel_futures=True)


def padded(iterable, rows=None, start=0):
    """(batch, genuine examples) of batches made elsewhere, the first of them batch `start` of its epoch; one with less than
    `rows` examples, those of the first batch, repeats its own, so that nothing recompiles."""
    first = None
    for i, batch in enumerate(iterable, start):
        batch = map_nest(
            np.array, batch
        )  # a copy: a loader may refill its buffer while we read ahead
        size, form = _form(f"batch {i}", batch)
        first = first or (rows or size, form)
        if form != first[1]:
            raise UserError(
                f"batch {i}: found {_show(form)}; the first had {_show(first[1])}; all must agree"
            )
        if not 0 < size <= first[0]:
            raise UserError(
                f"batch {i}: found {size} examples; allowed: 1 to {first[0]}, the size of the first"
            )
        if size < first[0]:
            rows = np.arange(first[0]) % size
            batch = map_nest(lambda leaf, rows=rows: leaf[rows], batch)
        yield batch, size
    if first is None and start == 0:
        raise UserError(
            "the iterable gave no batch: it is empty, or an iterator used up in an earlier epoch"
        )


def _form(name, batch):
    """(leading size, {leaf: (shape without it, dtype)}) of a batch."""
    leaves = dict(named_nest(batch))
    sizes = {leaf: a.shape[0] if a.ndim else None for leaf, a in leaves.items()}
    if len(set(sizes.values())) != 1 or None in sizes.values():
        raise UserError(f"{name}: every array needs the same first axis; found {sizes}")
    return next(iter(sizes.values())), {leaf: (a.shape[1:], a.dtype) for leaf, a in leaves.items()}


def _show(form):
    return ", ".join(f"{leaf} {dtype}{list(shape)}" for leaf, (shape, dtype) in form.items())


def fingerprint(dataset):
    """A short hash of a dataset: all of its arrays, or else its length and its first and last example."""
    content = dataset.arrays if type(dataset) is Arrays else (dataset[0], dataset[len(dataset) - 1])
    digest = hashlib.sha256(str(len(dataset)).encode())
    for name, leaf in named_nest(content):
        leaf = np.asarray(leaf, order="C")
        digest.update(f"{name} {leaf.shape} {leaf.dtype.str}".encode())
        digest.update(leaf)
    return digest.hexdigest()[:16]
