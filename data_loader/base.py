"""The protocols of data: what a dataset is, and what a dataset factory answers."""

from collections.abc import Callable
from typing import Any, NamedTuple, NewType, Protocol

import numpy as np

from data_loader.nest import map_nest, named_nest
from utils import UserError


class Dataset(Protocol):
    """Anything with a length and items; an item is one example, a tuple (x, y) or any nest of arrays."""

    def __len__(self): ...

    def __getitem__(self, index): ...


Batch = NewType("Batch", object)  # def fn(examples) -> Batch, the return annotation of a collate_fn


class Arrays:
    """A dataset held whole in NumPy arrays (or nests of them), so that it can live on the device."""

    def __init__(self, x, y, source="arrays"):
        lengths = {name: len(a) for name, a in named_nest({"x": x, "y": y})}
        if len(set(lengths.values())) != 1:
            raise UserError(f"{source}: needs one row for each example in every array, found {lengths}")
        self.arrays = (x, y)
        self.source = source  # where it came from, for the run's records
        self.length = next(iter(lengths.values()))

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return map_nest(lambda a: a[index], self.arrays)


class Data(NamedTuple):
    """What a dataset factory answers at once, from headers or constants; the pixels come with load()."""

    example: Any  # one raw example of zeros: shapes and types only
    sizes: dict[str, int]  # {"train": 60000, "test": 10000}, and "val" where the data brings its own
    load: Callable  # () -> {"train": Dataset, "test": Dataset}, the same keys as sizes
    num_classes: int | None = None
    vocab_size: int | None = None


def check_labels(source, labels, num_classes):
    """Refuse labels outside 0..num_classes-1, naming the first."""
    labels = np.asarray(labels)
    bad = np.argwhere((labels < 0) | (labels >= num_classes))
    if bad.size:
        example, label = bad[0][0], labels[tuple(bad[0])]
        raise UserError(f"{source}: label {label} of example {example} is outside the {num_classes} classes 0..{num_classes - 1}")
