"""Examples in record files, more than fit into memory, read by worker processes with Grain.

The loader decides the order of an epoch, and a batch depends only on its row of that order. So the
batches are the same for any number of workers, and a checkpoint needs no position of this reader:
the epoch and the batch, which it holds anyway, are enough.
"""

import importlib.util
from copy import copy
from functools import cached_property, partial
from typing import Annotated

import numpy as np

from data_loader.base import Data, Parsed, check_labels
from data_loader.grain_workers import Workers
from data_loader.loader import collated
from data_loader.nest import map_nest, named_nest
from data_loader.record_files import NEEDS, RecordFiles
from data_loader.records import numpy_example
from ranges import Count, CountOrZero, at_most, checked
from utils import UserError, where_and_why


@checked
def grain(
    train: str,
    test: str | None = None,
    val: str | None = None,
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
    if workers and importlib.util.find_spec("grain") is None:
        raise UserError(f"grain: {NEEDS.format('grain')}")
    sets = {
        name: Records(pattern, parse or numpy_example, workers, num_classes)
        for name, pattern in {"train": train, "val": val, "test": test}.items()
        if pattern is not None
    }
    example = map_nest(
        lambda leaf: np.zeros(np.shape(leaf), np.asarray(leaf).dtype), sets["train"][0]
    )
    sizes = {name: len(dataset) for name, dataset in sets.items()}
    named = {"num_classes": num_classes, "vocab_size": vocab_size, "classes": classes}
    return Data(example, sizes, lambda: sets, **named, resident=False)


class Records:
    """The examples of record files; worker processes read batches of them."""

    def __init__(self, pattern, parse, workers, num_classes=None):
        self.files = RecordFiles(pattern)
        self.parse = parse
        self.workers = workers
        self.num_classes = num_classes
        self.idle = []  # [((collate_fn, batch size, number of workers), Workers)]
        self.source = f"{pattern} ({len(self.files.files)} files)"
        self.advice = f"use more data.args.workers (now {workers}), if there are more cores"

    def __len__(self):
        return len(self.files)

    @cached_property
    def types(self):
        """{leaf: its type} in the first record. All records must have the same kinds of numbers: a
        batch of bytes with one example of floats would be a batch of floats."""
        return types_of(self.parsed(0))

    def __getitem__(self, index):
        example = self.parsed(index)
        for name, dtype in types_of(example).items():
            first = self.types.get(name, dtype)
            if dtype.kind != first.kind:
                where = f"{self.files.name(index)}: {name or 'its example'} is {dtype}"
                raise UserError(f"{where}, but {first} in {self.files.name(0)}; write one type")
        return example

    def parsed(self, index):
        """The example of a record, before it is compared with the others."""
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
        They are kept for the next pass, until this dataset is deleted."""
        if not (self.workers and len(order)):
            yield from map(partial(self.batch, collate_fn), order)
            return
        form = collate_fn, order.shape[1], min(self.workers, len(order))
        workers = self.idle_workers(form)
        if workers is None:  # they have a copy of this dataset, so that it does not keep itself
            workers = Workers(partial(copy(self).batch, collate_fn), *form[1:])
        try:
            yield from workers.batches(order)
        except GeneratorExit:  # left early
            self.idle.append((form, workers))
            raise
        except BaseException:
            workers.close()
            raise
        self.idle.append((form, workers))

    def idle_workers(self, form):
        """Those of an earlier pass of this form, or None."""
        place = next((i for i, (other, _) in enumerate(self.idle) if other == form), None)
        workers = None if place is None else self.idle.pop(place)[1]
        return workers if workers and workers.ready() else None

    def __getstate__(self):
        return vars(self) | {"idle": []}


def types_of(example):
    return {name: np.asarray(leaf).dtype for name, leaf in named_nest(example)}
