"""Examples in record files, more than fit into memory, read by worker processes with Grain.

The loader decides the order of an epoch, and a batch depends only on its row of that order. So the
batches are the same for any number of workers, and a checkpoint needs no position of this reader:
the epoch and the batch, which it holds anyway, are enough.
"""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cached_property, partial
from typing import Annotated

import numpy as np

from data_loader.base import Arrays, Data, Parsed, check_labels
from data_loader.grain_workers import Workers
from data_loader.loader import collated
from data_loader.nest import map_nest, named_nest
from data_loader.record_files import NEEDS, RecordFiles
from data_loader.records import numpy_example
from utils import UserError, where_and_why
from utils.forms import Count, CountOrZero, LocalPath, at_most, checked

MEMORY_MB = 1024  # of decoded examples that are kept in memory


@checked
def grain(
    train: LocalPath,
    test: LocalPath | None = None,
    val: LocalPath | None = None,
    parse: Parsed | None = None,
    workers: Annotated[CountOrZero, at_most(1024)] = 2,
    num_classes: Count | None = None,
    vocab_size: Count | None = None,
    classes: tuple[str, ...] | None = None,
) -> Data:
    """ArrayRecord or TFRecord files, a path or a pattern per set; `parse` decodes a record.

    Without `parse`, numpy_example does.
    """
    num_classes = len(classes) if classes and num_classes is None else num_classes
    sets = {
        name: Records(RecordFiles(pattern), parse or numpy_example, workers, num_classes)
        for name, pattern in {"train": train, "val": val, "test": test}.items()
        if pattern is not None
    }
    return data_of(sets, num_classes=num_classes, vocab_size=vocab_size, classes=classes)


def data_of(sets, memory_mb=0, **named):
    """The Data of Records; if their examples take at most `memory_mb`, they are read into it."""
    example = map_nest(
        lambda leaf: np.zeros(np.shape(leaf), np.asarray(leaf).dtype), sets["train"][0]
    )
    sizes = {name: len(dataset) for name, dataset in sets.items()}
    fits = sum(sizes.values()) * sum(a.nbytes for _, a in named_nest(example)) <= memory_mb * 2**20

    def load():
        return {name: in_memory(records) if fits else records for name, records in sets.items()}

    return Data(example, sizes, load, **named)


def in_memory(records):
    """The examples (x, y) of Records as Arrays; the Records themselves if they differ in shape."""
    first, count = records[0], len(records)
    x, y = (np.empty((count, *np.shape(leaf)), np.asarray(leaf).dtype) for leaf in first)
    with ThreadPoolExecutor() as pool:  # Pillow decodes in parallel
        for start in range(0, count, 1024):
            rows = range(start, min(count, start + 1024))
            for i, one in zip(rows, pool.map(records.__getitem__, rows), strict=True):
                if [np.shape(leaf) for leaf in one] != [np.shape(leaf) for leaf in first]:
                    return records
                x[i], y[i] = one
    return Arrays(x, y, records.source)


class Records:
    """The examples of record files, or of another object with a length, items, a method `name` for
    messages, and a `source`; worker processes read batches of them."""

    def __init__(self, files, parse, workers, num_classes=None):
        if workers and importlib.util.find_spec("grain") is None:
            raise UserError(f"workers: {NEEDS.format('grain')}; or set it to 0")
        self.files, self.source = files, files.source
        self.parse = parse
        self.workers = workers
        self.num_classes = num_classes
        self.idle = []  # [((collate_fn, batch size, number of workers), Workers)]
        self.advice = f"use more data.args.workers (now {workers}), if there are more cores"

    def __len__(self):
        return len(self.files)

    @cached_property
    def types(self):
        """{leaf: its type} in the first record. All records must have the same kinds of numbers,
        since one example of floats would turn a batch of bytes into a batch of floats."""
        return types_of(self.parsed(0))

    def __getitem__(self, index):
        example = self.parsed(index)
        for name, dtype in types_of(example).items():
            first = self.types.get(name, dtype)
            is_wider = dtype.kind in "iu" and not np.can_cast(dtype, first)
            if dtype.kind != first.kind or is_wider:
                where = f"{self.files.name(index)}: {name or 'its example'} is {dtype}"
                raise UserError(f"{where}, but {first} in {self.files.name(0)}; write one type")
        return example

    def parsed(self, index):
        """The example of a record, before its types are compared with those of the first one."""
        record = self.files[index]
        try:
            example = self.parse(record)
            if self.num_classes is not None and isinstance(example, tuple):
                label = example[1]
                if np.ndim(label) == 0 and not 0 <= label < self.num_classes:
                    check_labels("its target", [label], self.num_classes)
            return example
        except UserError as error:
            raise UserError(f"{self.files.name(index)}: {error}") from error
        except Exception as error:  # a user's function may raise anything
            raise UserError(
                f"{self.files.name(index)}: parse fails: {where_and_why(error)}"
            ) from error

    def batch(self, collate_fn, row):
        """One batch; every error becomes a UserError, which can be pickled between processes."""
        return collated([self[int(i)] for i in row], collate_fn)

    def read_batches(self, order, collate_fn):
        """One batch for each row of `order`; each of n workers makes every n-th one in advance.
        The workers are kept for the next pass, until this dataset is deleted."""
        if not (self.workers and len(order)):
            yield from map(partial(self.batch, collate_fn), order)
            return
        form = collate_fn, order.shape[1], min(self.workers, len(order))
        workers = self.idle_workers(form)
        if workers is None:  # they get a copy, so that this dataset holds no reference to itself
            workers = Workers(partial(copy(self).batch, collate_fn), *form[1:])
        try:
            yield from workers.batches(order)
        except GeneratorExit:  # the pass ended early
            self.idle.append((form, workers))
            raise
        except BaseException:
            workers.close()
            raise
        self.idle.append((form, workers))

    def idle_workers(self, form):
        """The workers of an earlier pass with the same settings, or None."""
        place = next((i for i, (other, _) in enumerate(self.idle) if other == form), None)
        workers = None if place is None else self.idle.pop(place)[1]
        return workers if workers and workers.ready() else None

    def __getstate__(self):
        return vars(self) | {"idle": []}


def types_of(example):
    return {name: np.asarray(leaf).dtype for name, leaf in named_nest(example)}
