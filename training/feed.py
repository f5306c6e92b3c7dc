"""How data reaches a step: the whole set is on the device and gathered by rows of indices, or
batches are streamed.

Both feeds have `shapes` (of one batch), `steps` (in an epoch; None if unknown), `nbytes` (on the
device) and `waited` (seconds spent waiting for batches). `program(name, step, fori_loop, capacity,
shardings)` makes the program for a step (`fori_loop` is None for one step per call; a call takes
at most `capacity` steps), and `specs()` returns the specs of its arguments after the constants and
the carry. `begin(epoch, start)` goes to a batch of an epoch, `calls(count)` yields the arguments of
the calls that take up to `count` batches, `batch(epoch, position)` returns an earlier batch, and
`close()` ends the feed. With several processes, each reads the rows of a batch that its own devices
hold, or all of a resident dataset.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Int, PyTree

from data_loader.base import Arrays, has_items, length
from data_loader.loader import batches, collate, epoch_order, in_epoch, padded, prefetch
from training.base import Sets
from utils import UserError

if TYPE_CHECKING:
    from training.engine import Program, Replicas
    from training.options import LoaderOptions
    from training.rows import EvaluationRow, Row

logger = logging.getLogger("main")


# step(constants, carry, batch, count of genuine examples) -> (carry, row)
Step: TypeAlias = Callable[[Any, Any, PyTree, Array], "tuple[Any, Row | EvaluationRow]"]
Call: TypeAlias = tuple[list[tuple], int]  # (the arguments of a program for each lane, batches)
# source(epoch, start) yields ([a batch for each replica], its size, count of genuine examples)
Source: TypeAlias = Callable[[int, int], Iterator[tuple[list[PyTree], int, int]]]


class Resident:
    """A dataset on the device: the host sends an epoch's order as int32 indices, and the program
    gathers the batches."""

    waited = 0.0

    def __init__(
        self,
        arrays: PyTree,
        options: LoaderOptions,
        replicas: Replicas,
        shuffle: bool,
        limit: int | None = None,
    ) -> None:
        self.options, self.replicas, self.shuffle = options, replicas, shuffle
        self.data = replicas.plan.put(arrays)
        leaves, rows = jax.tree.leaves(self.data), options.batch_size
        self.size, self.nbytes = len(leaves[0]), sum(a.nbytes for a in leaves)
        self.batches = -(-self.size // rows)
        self.steps = min(self.batches, limit or self.batches)
        self.shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), self.data
        )

    def specs(self) -> tuple[PyTree, ...]:
        """The data, and the specs of an epoch's order, of the count of genuine examples in each of
        its rows, of a row and of a number of steps."""
        number = jax.ShapeDtypeStruct((), jnp.int32)
        order = self.replicas.order_spec(self.batches, self.options.batch_size)
        valid = jax.ShapeDtypeStruct((self.batches,), jnp.int32, sharding=self.replicas.plan.whole)
        return self.data, order, valid, number, number

    def program(
        self,
        name: str,
        step: Step,
        fori_loop: Callable | None,
        capacity: int,
        shardings: PyTree = None,
    ) -> Program:
        """The program that takes many steps in one call, by a `fori_loop`, or one."""
        self.capacity = capacity if fori_loop else 1
        axes = 0, 0, None, 0, None, None, None  # const, carry, data, order, valid, start, count
        function = over_orders(step, self.replicas.plan.batch(), fori_loop, capacity)
        return self.replicas.program(name, function, axes, shardings)

    def begin(self, epoch: int, start: int = 0) -> None:
        """Draw the order of an epoch, and go to its batch `start`."""
        drawn = epoch_orders(self.size, self.options, self.replicas, self.shuffle, epoch)
        self.orders = self.replicas.put_orders([order for order, _ in drawn])
        self.valid = self.replicas.plan.put(drawn[0][1])
        self.next = start

    def calls(self, count: int) -> Iterator[Call]:
        """(the arguments for each lane, batches taken) of each call."""
        end = min(self.next + count, self.steps)
        while self.next < end:
            taken = min(end - self.next, self.capacity)
            which = np.int32(self.next), np.int32(taken)
            yield [(self.data, order, self.valid, *which) for order in self.orders], taken
            self.next += taken

    def latest(self) -> PyTree:
        """The batch of the first lane in the latest step, on the device."""

        def rows(order: Array) -> PyTree:
            return jax.tree.map(lambda a: a[order[self.next - 1]], self.data)

        return jax.vmap(rows)(self.orders[0]) if self.replicas.stacked else rows(self.orders[0])

    def batch(self, epoch: int, position: int) -> list[tuple[PyTree, int]]:
        """(batch, count of genuine examples) of each replica at a position of an epoch, on the
        host."""
        drawn = epoch_orders(self.size, self.options, self.replicas, self.shuffle, epoch)

        def rows(order: np.ndarray) -> PyTree:
            return jax.tree.map(lambda a: np.asarray(a[order[position]]), self.data)

        return [(rows(order), valid[position]) for order, valid in drawn]

    def close(self) -> None:
        """There is nothing to close."""


class Streamed:
    """Batches from the host, one call each. A batch of the `source` has only the rows that this
    process reads."""

    def __init__(
        self,
        source: Source,
        options: LoaderOptions,
        replicas: Replicas,
        steps: int | None,
        limit: int | None = None,
    ) -> None:
        self.source, self.options, self.replicas, self.limit = source, options, replicas, limit
        self.steps = steps if steps is None or limit is None else min(steps, limit)
        self.waited = 0.0
        self.seekable = getattr(source, "seekable", True)  # whether an epoch can begin at any batch
        self.stream, self.begun = self.read(1, 0), (1, 0, tuple(replicas.seeds))
        first = next(self.stream)
        self.begun_epoch = chain([first], self.stream)  # read for `shapes`
        (batch, *_), _ = first
        self.shapes = replicas.shapes_of_one(batch)
        self.spec = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), batch
        )
        self.nbytes = sum(a.nbytes for a in jax.tree.leaves(batch)) * (options.prefetch + 1)

    def specs(self) -> tuple[PyTree, ...]:
        """The specs of a batch, and of the count of its genuine examples."""
        return self.spec, jax.ShapeDtypeStruct((), jnp.int32)

    def read(self, epoch: int, start: int) -> Generator[tuple[list[PyTree], np.int32], None, None]:
        """The batches of an epoch, which a thread reads ahead and puts onto the devices."""
        put_batch = self.replicas.put_batch
        source = self.source(epoch, start)
        ready = ((put_batch(batch, size), np.int32(valid)) for batch, size, valid in source)
        return prefetch(ready, self.options.prefetch)

    def program(
        self,
        name: str,
        step: Step,
        _fori_loop: Callable | None,
        _capacity: int,
        shardings: PyTree = None,
    ) -> Program:
        """The program that takes one step per call."""
        axes = 0, 0, 0, None  # const, carry, batch, valid
        return self.replicas.program(name, over_batch(step), axes, shardings)

    def begin(self, epoch: int, start: int = 0) -> None:
        """Read an epoch from its batch `start` on."""
        wanted = epoch, start, tuple(self.replicas.seeds)  # a checkpoint may have other seeds
        if self.begun_epoch is None or (self.seekable and wanted != self.begun):
            self.close()
            self.begun_epoch = self.stream = self.read(epoch, start)
        self.items, self.begun_epoch = self.begun_epoch, None
        if start and not self.seekable:
            logger.warning(
                "The training data has no start_at(epoch, batch): "
                "reading %d of its batches again to skip them",
                start,
            )
            self.items = islice(self.items, start, None)
        if self.limit is not None:
            self.items = islice(self.items, max(0, self.limit - start))

    def calls(self, count: int) -> Iterator[Call]:
        """(the arguments for each lane, batches taken) of each call."""
        for _ in range(count):
            before = time.perf_counter()
            lanes, valid = next(self.items, (None, None))
            self.waited += time.perf_counter() - before
            if lanes is None:
                return
            self.taken = lanes[0]
            yield [(batch, valid) for batch in lanes], 1

    def latest(self) -> PyTree:
        """The batch of the first lane in the latest step, on the device."""
        return self.taken

    def batch(self, epoch: int, position: int) -> list[tuple[PyTree, int]] | None:
        """(batch, count of genuine examples) of each replica at a position of an epoch, read again;
        None where they cannot be read again."""
        if not self.seekable or jax.process_count() > 1:  # a process reads only some of the rows
            return None
        pieces, _, valid = next(iter(self.source(epoch, position)), (None, 0, 0))
        return pieces and [(piece, valid) for piece in pieces]

    def close(self) -> None:
        """End the thread that reads ahead."""
        self.stream.close()


Feed: TypeAlias = Resident | Streamed


def make_feed(
    dataset: Any,
    options: LoaderOptions,
    replicas: Replicas,
    *,
    shuffle: bool,
    budget: int,
    limit: int | None = None,
) -> Feed:
    """The feed for a dataset: resident if it is arrays within the budget in bytes, or streamed."""
    if type(dataset) is Arrays and nbytes(dataset) <= budget and stacks(options):
        return Resident(dataset.arrays, options, replicas, shuffle, limit)
    if not has_items(dataset):
        source = UserBatches(dataset, replicas)
        return Streamed(source, options, replicas, length(dataset), limit)
    steps = -(-len(dataset) // options.batch_size)
    source = partial(drawn_batches, dataset, options, replicas, shuffle)
    return Streamed(source, options, replicas, steps, limit)


def stacks(options: LoaderOptions) -> bool:
    """Whether batches are stacked examples, as they are unless the user gives a collate_fn."""
    return options.collate_fn in (None, collate)


def make_feeds(
    sets: Sets, options: LoaderOptions, replicas: Replicas, limit: int | None = None
) -> dict[str, Feed]:
    """{set: its feed}; the first sets that fit the budget are resident."""
    feeds, budget = {}, options.device_budget_mb * 2**20
    try:
        for name, dataset in sets.items():
            shuffle = name == "train" and options.shuffle
            if has_items(dataset):
                replicas.plan.check_batch(options.of(name).batch_size, options.size_option(name))
            feed = make_feed(
                dataset, options.of(name), replicas, shuffle=shuffle, budget=budget, limit=limit
            )
            feeds[name] = feed
            budget -= feed.nbytes if isinstance(feed, Resident) else 0
            first = next(iter(feeds))
            if options.of(name).collate_fn == options.of(first).collate_fn:
                check_form(name, feed.shapes, first, feeds[first].shapes)
    except BaseException:
        for feed in feeds.values():
            feed.close()
        raise
    return feeds


def check_form(name: str, batch: PyTree, first: str, expected: PyTree) -> None:
    """Refuse a set whose examples do not have the shapes and types of the first set's."""

    def form(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda a: f"{a.dtype}{list(a.shape[1:])}", tree)

    if form(batch) != form(expected):
        whose = "training" if first == "train" else first
        raise UserError(
            f"data: an example of the {name} set is {form(batch)}, "
            f"one of the {whose} set is {form(expected)}"
        )


def nbytes(dataset: Arrays) -> int:
    """The bytes of a dataset held in arrays."""
    return sum(a.nbytes for a in jax.tree.leaves(dataset.arrays))


def epoch_orders(
    size: int, options: LoaderOptions, replicas: Replicas, shuffle: bool, epoch: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The order of an epoch for each replica, by its seed."""
    order = partial(epoch_order, size, options.batch_size, epoch=epoch, shuffle=shuffle)
    return [order(seed=seed) for seed in replicas.seeds]


class UserBatches:
    """The batches of the user's own loader, the same for every replica. A loader may have
    `start_at(epoch, batch)`, which goes to a batch."""

    def __init__(self, iterable: Any, replicas: Replicas) -> None:
        self.iterable, self.replicas = iterable, replicas
        self.rows: int | None = None
        self.seekable = hasattr(iterable, "start_at")

    def __call__(self, epoch: int, start: int) -> Iterator[tuple[list[PyTree], int, Any]]:
        whole = self.iterable.start_at(epoch, start) if self.seekable else self.iterable
        for batch, valid in padded(whole, self.rows, start if self.seekable else 0):
            # Remembered, since a resumed epoch may begin at its last, short batch.
            self.rows = rows = len(jax.tree.leaves(batch)[0])
            if jax.process_count() > 1:  # the loader of each process yields the same whole batches
                own = self.replicas.rows(rows)
                batch = jax.tree.map(lambda a, own=own: a[own], batch)
            yield [batch] * len(self.replicas.seeds), rows, valid


def drawn_batches(
    dataset: Any, options: LoaderOptions, replicas: Replicas, shuffle: bool, epoch: int, start: int
) -> Iterator[tuple[list[PyTree], int, int]]:
    """Batches of a dataset, in the order given by each replica's seed. A shuffled dataset may
    change its examples with the epoch."""
    orders = epoch_orders(len(dataset), options, replicas, shuffle, epoch)
    own, collate_fn = replicas.rows(options.batch_size), options.collate_fn or collate
    drawn = [in_epoch(dataset, seed, epoch) if shuffle else dataset for seed in replicas.seeds]
    streams = [
        batches(data, order[:, own], collate_fn, start)
        for data, (order, _) in zip(drawn, orders, strict=True)
    ]
    for pieces, valid in zip(zip(*streams, strict=True), orders[0][1][start:], strict=True):
        yield list(pieces), options.batch_size, valid


def over_orders(
    step: Step, sharding: Sharding | None, fori_loop: Callable | None, capacity: int
) -> Callable[..., tuple[PyTree, Row | EvaluationRow]]:
    """The function that takes a step on each of `count` batches, at most `capacity`, by a
    `fori_loop` that begins at the batch `start`, or on one batch if that is None. An order holds
    the indices of each batch, which is gathered on the device."""

    def one(
        const: PyTree,
        carry: PyTree,
        data: PyTree,
        order: Int[Array, "batches batch"],
        valid: Int[Array, " batches"],
        i: Int[Array, ""],
    ) -> tuple[PyTree, Row | EvaluationRow]:
        batch = jax.tree.map(lambda a: a[order[i]], data)
        if sharding:
            batch = jax.lax.with_sharding_constraint(batch, sharding)
        return step(const, carry, batch, valid[i])

    def loop(
        const: PyTree,
        carry: PyTree,
        data: PyTree,
        order: Int[Array, "batches batch"],
        valid: Int[Array, " batches"],
        start: Int[Array, ""],
        count: Int[Array, ""],
    ) -> tuple[PyTree, Row | EvaluationRow]:
        _, like = jax.eval_shape(one, const, carry, data, order, valid, start)
        rows = jax.tree.map(lambda a: jnp.zeros((capacity, *a.shape), a.dtype), like)

        def take(
            i: Int[Array, ""], both: tuple[PyTree, Row | EvaluationRow]
        ) -> tuple[PyTree, Row | EvaluationRow]:
            carry, row = one(const, both[0], data, order, valid, i)
            put = lambda rows, new: rows.at[i - start].set(new)  # noqa: E731
            return carry, jax.tree.map(put, both[1], row)

        assert fori_loop
        return fori_loop(start, start + count, take, (carry, rows))

    def single(
        const: PyTree,
        carry: PyTree,
        data: PyTree,
        order: Int[Array, "batches batch"],
        valid: Int[Array, " batches"],
        start: Int[Array, ""],
        _count: Int[Array, ""],
    ) -> tuple[PyTree, Row | EvaluationRow]:
        return as_rows(*one(const, carry, data, order, valid, start))

    return loop if fori_loop else single


def over_batch(step: Step) -> Callable[..., tuple[PyTree, Row | EvaluationRow]]:
    """The function that takes a step on one batch from the host."""
    return lambda const, carry, batch, valid: as_rows(*step(const, carry, batch, valid))


def as_rows(carry: PyTree, row: Row | EvaluationRow) -> tuple[PyTree, Row | EvaluationRow]:
    """The result of a program that takes one step: its row has a first axis of length 1."""
    return carry, jax.tree.map(lambda a: a[None], row)
