"""From datasets to batches: the order of an epoch, stacking, prefetching, users' own batches."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

from data_loader.base import (
    AnyDataset,
    Arrays,
    Batch,
    BatchOptions,
    CollateFn,
    Dataset,
    has_items,
    read_example,
)
from data_loader.nest import Nest, check_readable, check_type, map_nest, named_nest
from utils import UserError, where_and_why
from utils.forms import at_least

SPLIT = 2**64 - 1  # the number of the random stream for the split; an epoch's is the epoch itself
SHIFT = 2**63  # the first random stream of in_epoch
# Attributes that a dataset may have (data_loader/base.py).
ABOUT_DATASETS = ("classes", "tokenizer", "tokens_per_example", "advice")

Item = TypeVar("Item")
# {leaf: (shape of a row, dtype)}
BatchForm: TypeAlias = dict[str, tuple[tuple[int, ...], np.dtype]]


def epoch_order(
    n: int, batch_size: int, *, seed: int, epoch: int, shuffle: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(indices (steps, batch_size), number of valid ones per row (steps,)).

    A short last row is filled up with the first examples of the epoch.
    """
    if n == 0:
        raise UserError("the dataset is empty: it has no example to train or evaluate on")
    at_least(1, batch_size=batch_size)
    order = random_stream(seed, epoch).permutation(n) if shuffle else np.arange(n)
    steps = -(-n // batch_size)
    valid = np.full(steps, batch_size, np.int32)
    valid[-1] = n - (steps - 1) * batch_size
    return np.resize(order.astype(np.int32), (steps, batch_size)), valid


def random_stream(seed: int, stream: int) -> np.random.Generator:
    """A random generator that depends only on (seed, stream)."""
    return np.random.Generator(np.random.Philox(key=(stream << 64) | seed % 2**64))


class Subset:
    """Some examples of a dataset, read when they are used. It has no `in_epoch`, since the same
    indices may be other examples in another epoch, even examples that are held out."""

    def __init__(self, dataset: Dataset, indices: np.ndarray) -> None:
        self.dataset = dataset
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getattr__(self, name: str) -> Any:
        """What the whole dataset says of itself; None if it does not."""
        if name not in ABOUT_DATASETS:
            raise AttributeError(name)
        return getattr(self.dataset, name, None)

    @property
    def source(self) -> str:
        return getattr(self.dataset, "source", type(self.dataset).__name__)

    def __getitem__(self, index: int | np.ndarray) -> Nest:
        chosen = self.indices[index]
        if type(self.dataset) is Arrays:
            return self.dataset[chosen]
        return read_example(self.dataset, int(chosen))


def in_epoch(dataset: Dataset, seed: int, epoch: int) -> Dataset:
    """The dataset that a shuffled epoch reads instead of this one (data_loader/base.py)."""
    own = getattr(dataset, "in_epoch", None)
    return own(seed, epoch) if own else dataset


def held_out(n: int, val_size: int | float) -> int:
    """How many of n examples a val_size holds out; it is a count (int) or a fraction (float)."""
    count = round(n * val_size) if isinstance(val_size, float) else val_size
    if val_size and not 0 < count < n:
        raise UserError(
            f"val_size: {val_size} takes {count} of {n} examples; "
            f"allowed: 1 to {n - 1}, or a fraction in (0, 1)"
        )
    return count


def split(dataset: Dataset, val_size: int | float, seed: int) -> tuple[Dataset, Dataset]:
    """(train, val): two disjoint subsets, chosen by the seed, both in the dataset's order."""
    n = len(dataset)
    count = held_out(n, val_size)
    order = random_stream(seed, SPLIT).permutation(n)
    return _subset(dataset, np.sort(order[count:])), _subset(dataset, np.sort(order[:count]))


def _subset(dataset: Dataset, indices: np.ndarray) -> Arrays | Subset:
    if type(dataset) is Arrays:
        on_disk = any(isinstance(a, np.memmap) for _, a in named_nest(dataset.arrays))
        if not on_disk:
            return Arrays(*dataset[indices], dataset.source)
    return Subset(dataset, indices)


class FirstBatches:
    """The first batches of an iterable of batches, in every epoch."""

    def __init__(self, iterable: Iterable[Batch], count: int) -> None:
        self.iterable: Any = iterable
        self.count = count
        if hasattr(iterable, "start_at"):
            self.start_at = self.later_batches

    def __len__(self) -> int:
        return min(len(self.iterable), self.count)

    def __iter__(self) -> Iterator[Batch]:
        return islice(self.iterable, self.count)

    def later_batches(self, epoch: int, start: int) -> Iterator[Batch]:
        return islice(self.iterable.start_at(epoch, start), max(0, self.count - start))


def first_batches(dataset: AnyDataset, count: int, batch_size: int) -> AnyDataset:
    """The first `count` batches of a dataset, or of an iterable of batches, as the same kind."""
    if has_items(dataset):
        return _subset(dataset, np.arange(min(len(dataset), count * batch_size)))
    return FirstBatches(cast(Iterable[Batch], dataset), count)


def collate(examples: Sequence[Nest]) -> Batch:
    """One batch from a list of examples: every leaf is stacked along a new first axis."""
    try:
        return map_nest(lambda *leaves: np.stack(leaves), *examples)
    except (ValueError, TypeError, AttributeError) as error:
        shapes = [*map(_shapes, examples)] or [{}]
        first = shapes[0]
        other = next((each for each in shapes if each != first), first)
        different = [
            f"{name or 'they'}: {shape} and {other[name]}"
            for name, shape in first.items()
            if other.get(name, shape) != shape
        ]
        raise UserError(
            f"loader.collate_fn: the examples of a batch do not stack "
            f"({'; '.join(different) or error}); write a collate_fn that pads them to one shape"
        ) from error


def _shapes(example: Nest) -> dict[str, tuple[int, ...]]:
    return {name: np.shape(leaf) for name, leaf in named_nest(example)}


def collated(
    examples: Sequence[Nest], collate_fn: CollateFn, option: str = "loader.collate_fn"
) -> Nest:
    """The batch that a collate_fn makes from a list of examples: one row per example. Errors name
    the option that holds the function."""
    try:
        batch = collate_fn(examples)
        rows = {name: np.shape(leaf)[:1] for name, leaf in named_nest(batch)}
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        raise UserError(f"{option} fails: {where_and_why(error)}") from error
    if not rows or set(rows.values()) != {(len(examples),)}:
        found = ", ".join(
            f"{name or 'batch'}: {row[0] if row else 'none'}" for name, row in rows.items()
        )
        raise UserError(
            f"{option}: every array of a batch needs one row per example; from "
            f"{len(examples)} examples it made arrays with these numbers of rows: {found}"
        )
    return batch


def batch_of_copies(example: Nest, size: int, collate_fn: CollateFn | None = None) -> Nest:
    """The batch of `size` copies of a data's `example`, which has the shapes of its batches."""
    if collate_fn is None or collate_fn is collate:
        return map_nest(lambda a: np.broadcast_to(a, (size, *np.shape(a))), example)
    return map_nest(np.asarray, collated([example] * size, collate_fn))


def batches(
    dataset: Dataset,
    order: np.ndarray | list[list[int]],
    collate_fn: CollateFn = collate,
    start: int = 0,
) -> Iterator[Nest]:
    """One batch for each row of `order`, from row `start` on."""
    order = order[start:]
    while type(dataset) is Subset:
        dataset, order = dataset.dataset, dataset.indices[order]
    if read_batches := getattr(dataset, "read_batches", None):
        yield from read_batches(order, collate_fn)
    elif type(dataset) is Arrays and collate_fn is collate:
        yield from (dataset[row] for row in order)
    else:
        yield from (one_by_one(dataset, row, collate_fn) for row in order)


def one_by_one(dataset: Dataset, row: np.ndarray | list[int], collate_fn: CollateFn) -> Nest:
    """The batch of a row of indices."""
    examples = [read_example(dataset, int(i)) for i in row]
    try:
        return collated(examples, collate_fn)
    except UserError as error:
        shapes = [*map(_shapes, examples)]
        other = next((i for i, each in enumerate(shapes) if each != shapes[0]), None)
        if other is None or collate_fn is not collate:
            raise
        raise UserError(f"{error}; compare the examples {row[0]} and {row[other]}") from error


def first_inputs(
    dataset: AnyDataset, options: BatchOptions, limit: int | None = None
) -> Iterator[Nest]:
    """The inputs of a training set of pairs (x, y), batch by batch and each once; with a `limit`,
    only the inputs of the first batches of a shuffled epoch."""
    if not has_items(dataset):
        batches_of_user = islice(cast(Iterable[Batch], dataset), limit)
        yield from (map_nest(np.asarray, batch[0]) for batch in batches_of_user)
        return
    size = options.batch_size
    if not limit:  # a batch is converted to float64
        first = map_nest(np.size, read_example(dataset, 0)[0])
        numbers = sum(count for _, count in named_nest(first))
        size = max(1, min(1024, 2**24 // max(1, numbers)))
    shuffle = bool(limit) and options.shuffle
    rows, valid = epoch_order(len(dataset), size, seed=0, epoch=1, shuffle=shuffle)
    read = batches(dataset, rows[:limit], options.collate_fn or collate)
    for batch, count in zip(read, valid, strict=False):
        yield map_nest(lambda a, count=count: np.asarray(a)[:count], batch[0])


def prefetch(iterable: Iterable[Item], depth: int = 2) -> Generator[Item, None, None]:
    """The items of an iterable; a thread makes the next `depth` of them ahead of time."""
    iterator: Iterator[Any] = iter(iterable)
    end: Any = object()
    pool = ThreadPoolExecutor(1, "prefetch")
    try:
        ahead = deque(pool.submit(next, iterator, end) for _ in range(depth))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(pool.submit(next, iterator, end))
            yield item
    finally:  # also when the consumer leaves early
        pool.shutdown(cancel_futures=True)


def padded(
    iterable: Iterable[Batch], rows: int | None = None, start: int = 0
) -> Iterator[tuple[Nest, int]]:
    """(batch, number of valid examples) for every batch of the user's own iterable.

    A batch with fewer than `rows` examples (by default the size of the first batch) is filled up
    with its own examples, so that nothing recompiles. `start` is the index of the first batch in
    its epoch.
    """
    form = None
    for i, batch in enumerate(iterable, start):
        check_readable(batch, f"batch {i}")
        # A copy, since a loader may overwrite its buffer while batches are read ahead.
        batch = map_nest(np.array, batch)
        size, batch_form = _form(f"batch {i}", batch)
        for name, (_, dtype) in batch_form.items():
            check_type(f"batch {i}: {name}", dtype)
            if dtype.kind in "OUSMm":
                raise UserError(f"batch {i}: {name} holds {dtype}, not numbers; yield numbers")
        if form is None or rows is None:
            rows, form = rows or size, batch_form
        if batch_form != form:
            raise UserError(
                f"batch {i}: found {_show(batch_form)}; the first had {_show(form)}; all must agree"
            )
        if not 0 < size <= rows:
            raise UserError(
                f"batch {i}: found {size} examples; allowed: 1 to {rows}, the size of the first"
            )
        if size < rows:
            indices = np.arange(rows) % size
            batch = map_nest(lambda leaf, indices=indices: leaf[indices], batch)
        yield batch, size
    if form is None and start == 0:
        raise UserError(
            "the iterable has no batch: it is empty, or an iterator that an earlier epoch exhausted"
        )


def _form(name: str, batch: Nest) -> tuple[int, BatchForm]:
    """The size of the first axis of a batch, and its form."""
    leaves = dict(named_nest(batch))
    sizes = {leaf: a.shape[0] if a.ndim else None for leaf, a in leaves.items()}
    first, *others = set(sizes.values()) or {None}
    if first is None or others:
        raise UserError(f"{name}: every array needs the same first axis; found {sizes}")
    return first, {leaf: (a.shape[1:], a.dtype) for leaf, a in leaves.items()}


def _show(form: BatchForm) -> str:
    return ", ".join(f"{leaf} {dtype}{list(shape)}" for leaf, (shape, dtype) in form.items())
