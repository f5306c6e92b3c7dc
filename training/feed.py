"""How data reaches a step: whole on the device and gathered by rows of indices, or streamed in batches.

Both feeds have `shapes` (of one batch), `steps` (in an epoch; None where nobody knows), `nbytes` (on the device) and `waited`
(seconds for batches); `program(name, step, report, looped, places)` makes the program for a step, and `forms()` are those of what
a call brings to it; `fill(dataset)` brings data that was not there at first, `begin(epoch, start)` goes to a batch of an epoch,
`calls(count)` answers the arguments of the calls that take up to `count` batches, `peek()` those of the next one,
`batch(epoch, position)` a batch as it was, and `close()` ends it.
Of several processes each reads the rows of a batch that its own devices hold, and of what is resident all.
"""

import logging
import time
from functools import partial
from itertools import chain, islice

import jax
import jax.numpy as jnp
import numpy as np

from data_loader.base import Arrays, has_items, length
from data_loader.loader import batches, collate, epoch_order, padded, prefetch
from training.devices.placing import put
from training.devices.sharding import check_divides, replicated, sharded
from training.programs import over_batch, over_rows, placed

logger = logging.getLogger("main")


class Resident:
    """A dataset on the device: the host ships an epoch's order as int32 indices, and the program gathers. `arrays` may be shapes
    of what `fill` brings."""

    waited = 0.0

    def __init__(self, arrays, options, lanes, shuffle, limit=None):
        self.options, self.lanes, self.shuffle = options, lanes, shuffle
        check_divides(options.batch_size, lanes.mesh)
        coming = any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(arrays))
        self.data = None if coming else put(arrays, replicated(lanes.mesh))
        self.form = jax.tree.map(form_on_device, arrays)
        leaves = jax.tree.leaves(self.form)
        self.size, self.nbytes = len(leaves[0]), sum(map(bytes_of, leaves))
        self.steps = limited(-(-self.size // options.batch_size), limit)
        self.shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((options.batch_size, *a.shape[1:]), a.dtype), self.form
        )

    def fill(self, dataset):
        """Put the data onto the device, if it is not there yet."""
        if self.data is None:
            self.data = put(dataset.arrays, replicated(self.lanes.mesh))

    def forms(self):
        """Those of the data, an epoch's order, how many examples of each row are genuine, a row, and a count of rows."""
        mesh, rows = (
            self.lanes.mesh,
            (-(-self.size // self.options.batch_size), self.options.batch_size),
        )
        order = jax.ShapeDtypeStruct(rows, jnp.int32, sharding=sharded(mesh, 1))
        valid, number = (
            jax.ShapeDtypeStruct(rows[:1], jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
        )
        return (
            placed(self.form, replicated(mesh)),
            order,
            placed(valid, replicated(mesh)),
            number,
            number,
        )

    def program(self, name, step, report, looped, places=None):
        """Many steps in one call, or one."""
        self.looped = looped
        axes = (0, 0, None, 0, None, None, None)
        return self.lanes.program(
            name, over_rows(step, report, self.lanes.mesh, looped), axes, looped, places
        )

    def begin(self, epoch, start=0):
        """Draw the order of an epoch; its first `start` batches were taken before."""
        drawn = epoch_orders(self.size, self.options, self.lanes, self.shuffle, epoch)
        self.orders = self.lanes.put_orders([order for order, _ in drawn])
        self.valid = put(drawn[0][1], replicated(self.lanes.mesh))
        self.row = start

    def calls(self, count):
        """(the arguments of each lane, batches taken) of each call."""
        end = min(self.row + count, self.steps)
        while self.row < end:
            taken = end - self.row if self.looped else 1
            yield (
                [
                    (self.data, order, self.valid, np.int32(self.row), np.int32(taken))
                    for order in self.orders
                ],
                taken,
            )
            self.row += taken

    def peek(self):
        """The arguments of the next call's first lane; None where there is none."""
        lanes, _ = next(self.calls(1), (None, None))
        return lanes and lanes[0]

    def batch(self, epoch, position):
        """(batch, genuine examples) of each replica at a position of an epoch, on the host."""
        drawn = epoch_orders(self.size, self.options, self.lanes, self.shuffle, epoch)
        return [
            (
                jax.tree.map(lambda a, o=order: np.asarray(a[o[position]]), self.data),
                valid[position],
            )
            for order, valid in drawn
        ]

    def close(self):
        """Nothing is open."""


class Streamed:
    """Batches from the host, one call each; `source(epoch, start)` yields ([a batch for each replica], examples in it, genuine
    ones), of each batch the rows that this process reads."""

    def __init__(self, source, options, lanes, steps, limit=None):
        self.source, self.options, self.lanes, self.limit, self.waited = (
            source,
            options,
            lanes,
            limit,
            0.0,
        )
        self.steps = limited(steps, limit)
        self.exact = getattr(source, "exact", True)  # whether it can go to a batch of an epoch
        self.stream = self.read(1, 0)
        first = next(self.stream)
        self.waiting = chain([first], self.stream)  # the first epoch, begun for its shapes
        (batch, *_), _ = first
        self.shapes = lanes.shapes_of_one(batch)
        self.form = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), batch
        )
        self.nbytes = sum(a.nbytes for a in jax.tree.leaves(batch)) * (options.prefetch + 1)

    def fill(self, _dataset):
        """It is there."""

    def forms(self):
        """Those of a batch, and of how many of its examples are genuine."""
        return self.form, jax.ShapeDtypeStruct((), jnp.int32)

    def read(self, epoch, start):
        """The thread that reads ahead and puts batches onto the devices."""
        source = self.source(epoch, start)
        ready = (
            (self.lanes.put_batch(batch, size), np.int32(valid)) for batch, size, valid in source
        )
        return prefetch(ready, self.options.prefetch)

    def program(self, name, step, report, looped, places=None):
        """One step a call."""
        return self.lanes.program(name, over_batch(step, report), (0, 0, 0, None), looped, places)

    def begin(self, epoch, start=0):
        """Read an epoch from its batch `start` on."""
        if self.waiting is None or (self.exact and (epoch, start) != (1, 0)):
            self.close()
            self.waiting = self.stream = self.read(epoch, start)
        self.items, self.waiting = self.waiting, None
        if start and not self.exact:
            logger.warning(
                "The training data has no start_at(epoch, batch): reading %d batches again to pass them",
                start,
            )
            self.items = islice(self.items, start, None)
        if self.limit is not None:
            self.items = islice(self.items, self.limit - start)

    def calls(self, count):
        """(the arguments of each lane, batches taken) of each call."""
        for _ in range(count):
            asked = time.perf_counter()
            lanes, valid = next(self.items, (None, None))
            self.waited += time.perf_counter() - asked
            if lanes is None:
                return
            yield [(batch, valid) for batch in lanes], 1

    def peek(self):
        """The arguments of the next call's first lane; None where there is none."""
        item = next(self.items, None)
        self.items = self.items if item is None else chain([item], self.items)
        return item and (item[0][0], item[1])

    def batch(self, epoch, position):
        """(batch, genuine examples) of each replica at a position of an epoch, read again; None where they cannot be had."""
        if not self.exact or jax.process_count() > 1:  # this process knows but some of its rows
            return None
        pieces, _, valid = next(iter(self.source(epoch, position)), (None, 0, 0))
        return pieces and [(piece, valid) for piece in pieces]

    def close(self):
        """End the thread that reads ahead."""
        self.stream.close()


def make_feed(dataset, options, lanes, *, shuffle, budget, limit=None):
    """The feed that fits the data: resident where it is held in arrays within the budget of bytes, else streamed."""
    if type(dataset) is Arrays and nbytes(dataset) <= budget and options.collate_fn is None:
        return Resident(dataset.arrays, options, lanes, shuffle, limit)
    if not has_items(dataset):
        return Streamed(Brought(dataset, lanes), options, lanes, length(dataset), limit)
    steps = -(-len(dataset) // options.batch_size)
    return Streamed(partial(drawn, dataset, options, lanes, shuffle), options, lanes, steps, limit)


def limited(steps, limit):
    """How many batches are taken of `steps`, of which nobody may know how many they are."""
    return steps if None in (steps, limit) else min(steps, limit)


def nbytes(dataset):
    """The size of a dataset held in arrays."""
    return sum(map(bytes_of, jax.tree.leaves(dataset.arrays)))


def form_on_device(a):
    """What an array of the host's will be there."""
    return jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype))


def bytes_of(a):
    """The size of an array, or of one of such a shape."""
    return a.size * a.dtype.itemsize


def epoch_orders(size, options, lanes, shuffle, epoch):
    """The order of an epoch for each replica, by its seed."""
    return [
        epoch_order(size, options.batch_size, seed=seed, epoch=epoch, shuffle=shuffle)
        for seed in lanes.seeds
    ]


class Brought:
    """The batches of the user's own loader, the same for every replica; `start_at(epoch, batch)`, if it has one, goes there."""

    def __init__(self, iterable, lanes):
        self.iterable, self.lanes, self.rows = iterable, lanes, None
        self.exact = hasattr(iterable, "start_at")

    def __call__(self, epoch, start):
        whole = self.iterable.start_at(epoch, start) if self.exact else self.iterable
        for batch, valid in padded(whole, self.rows, start):
            self.rows = len(
                jax.tree.leaves(batch)[0]
            )  # even where an epoch is gone on with at its last, short batch
            if jax.process_count() > 1:  # each brings whole batches, the same ones
                mine = self.lanes.rows(self.rows)
                batch = jax.tree.map(lambda a, mine=mine: a[mine], batch)
            yield [batch] * len(self.lanes.seeds), self.rows, valid


def drawn(dataset, options, lanes, shuffle, epoch, start):
    """Batches of a dataset, in the order of each replica's seed."""
    orders, mine = (
        epoch_orders(len(dataset), options, lanes, shuffle, epoch),
        lanes.rows(options.batch_size),
    )
    streams = [
        batches(dataset, order[:, mine], options.collate_fn or collate, start)
        for order, _ in orders
    ]
    for pieces, valid in zip(zip(*streams, strict=True), orders[0][1][start:], strict=True):
        yield list(pieces), options.batch_size, valid
