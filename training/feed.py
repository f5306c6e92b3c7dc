"""How data reaches a step: whole on the device and gathered by rows of indices, or streamed in batches.

A feed is used as: `batch()` for the shapes, `prepare(step, report, looped)` once, `begin(epoch)` for each epoch, and
`run(consts, carries, count)` until it takes nothing. A lane is one call of the compiled program: one replica, or all stacked.
"""

from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np

from data_loader.loader import batches, epoch_order, padded, prefetch
from training.programs import compiled, over_batch, over_rows
from training.sharding import replicated, sharded


class Lanes:
    """The replicas of a run as calls of one program: each by itself, or stacked on a leading axis and vmapped."""

    def __init__(self, seeds, mesh, stacked=False):
        self.seeds, self.mesh, self.stacked = seeds, mesh, stacked

    def stack(self, trees):
        """From one tree for each replica to one for each lane."""
        return [jax.tree.map(lambda *a: jnp.stack(a), *trees)] if self.stacked else list(trees)

    def unstack(self, trees):
        """From one tree for each lane back to one for each replica."""
        if not self.stacked:
            return list(trees)
        return [jax.tree.map(itemgetter(r), trees[0]) for r in range(len(self.seeds))]

    def put(self, pieces, axis=0):
        """One piece of data for each replica onto the devices, cut along `axis`; one entry for each lane."""
        if self.stacked:
            pieces = [jax.tree.map(lambda *a: np.stack(a), *pieces)]
        return jax.device_put(pieces, sharded(self.mesh, axis + self.stacked))

    def mapped(self, program, axes):
        """The program over all replicas at once where they are stacked; `axes` tells which arguments are."""
        return jax.vmap(program, in_axes=axes) if self.stacked else program


class Resident:
    """A dataset on the device: the host ships an epoch's order as int32 indices, and the program gathers."""

    def __init__(self, arrays, options, lanes, shuffle):
        self.options, self.lanes, self.shuffle = options, lanes, shuffle
        self.data = jax.device_put(arrays, replicated(lanes.mesh))
        self.size = len(jax.tree.leaves(arrays)[0])
        self.steps = -(-self.size // options.batch_size)
        self.program = None

    def batch(self):
        """The shapes of one batch."""
        rows = self.options.batch_size
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), self.data)

    def prepare(self, step, report, looped):
        """Choose the program: many steps in one call, or one after the other."""
        self.looped = looped
        program = over_rows(step, report, self.lanes.mesh, looped)
        self.traced = self.lanes.mapped(program, (0, 0, None, 0, None, None, None))

    def begin(self, epoch, start=0):
        """Draw the order of an epoch."""
        settings = {"epoch": epoch, "shuffle": self.shuffle}
        drawn = [epoch_order(self.size, self.options.batch_size, seed=seed, **settings) for seed in self.lanes.seeds]
        self.orders = self.lanes.put([order for order, _ in drawn], axis=1)
        self.valid = jax.device_put(drawn[0][1], replicated(self.lanes.mesh))
        self.row = start

    def run(self, consts, carries, count):
        """Up to `count` batches in every lane: (carries, reports, batches taken)."""
        count = min(count, self.steps - self.row)
        reports = [None] * len(carries)
        for row in range(self.row, self.row + count, max(count, 1) if self.looped else 1):
            for lane, order in enumerate(self.orders):
                rest = (self.data, order, self.valid, np.int32(row), np.int32(count))
                self.program = self.program or compiled(self.traced, self.lanes.mesh, (consts[lane], carries[lane], *rest))
                carries[lane], reports[lane] = self.program(consts[lane], carries[lane], *rest)
        self.row += count
        return carries, reports, count

    def close(self):
        """Nothing is open."""


class Streamed:
    """Batches from the host, one call each; `source(epoch, start)` yields ([a batch for each replica], genuine examples)."""

    def __init__(self, source, options, lanes, steps):
        self.source, self.options, self.lanes, self.steps = source, options, lanes, steps
        self.stream, self.opened, self.peeked, self.program = None, None, [], None

    def open(self, epoch, start):
        """Start the thread that reads ahead, unless it already waits there."""
        if self.opened == (epoch, start):
            return
        self.close()
        pieces = self.source(epoch, start)
        self.stream = prefetch(((self.lanes.put(batch), np.int32(valid)) for batch, valid in pieces), self.options.prefetch)
        self.opened = (epoch, start)

    def batch(self):
        """The shapes of the first batch, which stays the first of its epoch."""
        self.open(1, 0)
        self.peeked = [next(self.stream)]
        lane = self.peeked[0][0][0]
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[self.lanes.stacked :], a.dtype), lane)

    def prepare(self, step, report, looped):
        """One step a call."""
        self.traced = self.lanes.mapped(over_batch(step, report), (0, 0, 0, None))

    def begin(self, epoch, start=0):
        """Go to a batch of an epoch."""
        self.open(epoch, start)
        self.opened = None

    def run(self, consts, carries, count):
        """Up to `count` batches in every lane: (carries, reports, batches taken)."""
        taken, reports = 0, [None] * len(carries)
        while taken < count and (item := self.peeked.pop() if self.peeked else next(self.stream, None)):
            for lane, batch in enumerate(item[0]):
                rest = (batch, item[1])
                self.program = self.program or compiled(self.traced, self.lanes.mesh, (consts[lane], carries[lane], *rest))
                carries[lane], reports[lane] = self.program(consts[lane], carries[lane], *rest)
            taken += 1
        return carries, reports, taken

    def close(self):
        """End the thread that reads ahead."""
        if self.stream is not None:
            self.stream.close()
        self.stream, self.opened, self.peeked = None, None, []


def make_feed(dataset, options, lanes, *, shuffle):
    """The feed that fits the data: resident where it is held in arrays within the budget, else streamed."""
    arrays = getattr(dataset, "arrays", None)
    size = sum(a.nbytes for a in jax.tree.leaves(arrays))
    if arrays is not None and size <= options.device_budget_mb * 2**20 and options.collate_fn is None:
        return Resident(arrays, options, lanes, shuffle)
    if not hasattr(dataset, "__getitem__"):
        steps = len(dataset) if hasattr(dataset, "__len__") else None
        return Streamed(lambda epoch, start: shared(dataset, lanes), options, lanes, steps)
    steps = -(-len(dataset) // options.batch_size)
    return Streamed(lambda epoch, start: drawn(dataset, options, lanes, shuffle, epoch, start), options, lanes, steps)


def shared(iterable, lanes):
    """The batches of the user's own loader, the same for every replica."""
    for batch, valid in padded(iterable):
        yield [batch] * len(lanes.seeds), valid


def drawn(dataset, options, lanes, shuffle, epoch, start):
    """Batches of a dataset, in the order of each replica's seed."""
    settings = {"epoch": epoch, "shuffle": shuffle}
    orders = [epoch_order(len(dataset), options.batch_size, seed=seed, **settings) for seed in lanes.seeds]
    collate = {"collate_fn": options.collate_fn} if options.collate_fn else {}
    streams = [batches(dataset, order, start=start, **collate) for order, _ in orders]
    for pieces, valid in zip(zip(*streams, strict=True), orders[0][1][start:], strict=True):
        yield list(pieces), valid
