"""Examples in record files, more than fit into memory, which worker processes may read.

The loader decides the order of an epoch, and a batch depends only on its row of that order. So the
batches are the same for any number of workers, and a checkpoint needs no position of this reader:
the epoch and the batch, which it holds anyway, are enough.
"""

import pickle
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cached_property
from typing import Annotated

import numpy as np

from data_loader.base import Arrays, Data, Parsed, check_labels, named_sets
from data_loader.loader import collated
from data_loader.nest import map_nest, named_nest
from data_loader.record_files import RecordFiles
from data_loader.records import numpy_example
from data_loader.workers import Workers
from utils import RunError, UserError, where_and_why
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
    files = {name: RecordFiles(each) for name, each in named_sets(train, val, test).items()}
    facts = {"num_classes": num_classes, "vocab_size": vocab_size, "classes": classes}
    return data_of(files, parse or numpy_example, workers, **facts)


def data_of(files, parse, workers, memory_mb=0, *, num_classes=None, classes=None, **facts):
    """The Data of {set: its files}, or other sources of Records. If all examples take at most
    `memory_mb`, they are read into the memory."""
    if classes and num_classes is None:
        num_classes = len(classes)
    sets = {name: Records(each, parse, workers, num_classes) for name, each in files.items()}
    example = map_nest(np.zeros_like, sets["train"][0])
    sizes = {name: len(dataset) for name, dataset in sets.items()}
    fits = sum(sizes.values()) * sum(a.nbytes for _, a in named_nest(example)) <= memory_mb * 2**20

    def load():
        return {name: in_memory(records) if fits else records for name, records in sets.items()}

    return Data(example, sizes, load, num_classes, classes=classes, **facts)


def in_memory(records):
    """The examples (x, y) of Records as Arrays; the Records themselves if they differ in shape."""
    first, rows = records[0], np.arange(len(records))
    shapes = [np.shape(leaf) for leaf in first]
    x, y = (np.empty((len(rows), *np.shape(leaf)), np.asarray(leaf).dtype) for leaf in first)

    def read(some):
        for i in some:
            example = records[i]
            if [np.shape(leaf) for leaf in example] != shapes:
                raise ValueError("another shape")
            x[i], y[i] = example

    try:
        with ThreadPoolExecutor() as pool:  # Pillow decodes in parallel
            list(pool.map(read, np.split(rows, range(64, len(rows), 64))))
    except ValueError:
        return records
    return Arrays(x, y, records.source)


class Records:
    """The examples of record files, or of another object with a length, items, a method `name` for
    messages, and a `source`; worker processes read batches of them."""

    def __init__(self, files, parse, workers, num_classes=None):
        self.files, self.source = files, files.source
        self.parse = parse
        self.workers = workers
        self.num_classes = num_classes
        self.advice = f"use more data.args.workers (now {workers}), if there are more cores"

    def __len__(self):
        return len(self.files)

    @cached_property
    def types(self):
        """{leaf: its type} in the first record."""
        return types_of(self.parse(self.files[0]))

    def __getitem__(self, index):
        record = self.files[index]
        try:
            example = self.parse(record)
            self.check(example)
            return example
        except UserError as error:
            raise UserError(f"{self.files.name(index)}: {error}") from error
        except Exception as error:  # a user's function may raise anything
            raise UserError(
                f"{self.files.name(index)}: parse fails: {where_and_why(error)}"
            ) from error

    def check(self, example):
        """Refuse a label outside the classes, and numbers of another kind than in the first record:
        one example of floats would turn a batch of bytes into a batch of floats."""
        if self.num_classes is not None and isinstance(example, tuple):
            label = example[1]
            if np.ndim(label) == 0 and not 0 <= label < self.num_classes:
                check_labels("its target", [label], self.num_classes)
        for name, dtype in types_of(example).items():
            first = self.types.get(name, dtype)
            is_wider = dtype.kind in "iu" and not np.can_cast(dtype, first)
            if dtype.kind != first.kind or is_wider:
                what = f"{name or 'its example'} is {dtype}, but {first} in {self.files.name(0)}"
                raise UserError(f"{what}; write one type")

    def batch(self, task):
        """One batch of a (collate_fn, row of indices)."""
        collate_fn, row = task
        return collated([self[int(i)] for i in row], collate_fn)

    def read_batches(self, order, collate_fn):
        """One batch for each row of `order`."""
        tasks = [(collate_fn, row) for row in order]
        if not self.workers:
            yield from map(self.batch, tasks)
            return
        try:
            pickle.dumps((self.parse, collate_fn))
        except Exception as error:
            raise UserError(
                f"workers: {error}; worker processes need functions that a module has under a "
                "name; or set workers to 0"
            ) from error
        try:
            yield from self.processes.mapped(tasks)
        except RunError:  # a process has died; the next pass starts others
            vars(self).pop("processes", None)
            raise

    @cached_property
    def processes(self):
        """The Workers, which are kept until this dataset is deleted. They get a copy of it, so that
        it holds no reference to itself."""
        return Workers(copy(self).batch, self.workers)

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "processes"}


def types_of(example):
    return {name: np.asarray(leaf).dtype for name, leaf in named_nest(example)}
