"""The protocols of data: what a dataset is, and what a dataset factory answers."""

from collections.abc import Callable
from typing import Any, NamedTuple, NewType, Protocol

import numpy as np

from data_loader.nest import map_nest, named_nest
from utils import UserError


class Dataset(Protocol):
    """Anything with a length and items; an item is one example, a tuple (x, y) or any nest of arrays.

    It may also have `read_batches(order, collate_fn)`, which yields the batch of each row of indices in a way of its own.
    """

    def __len__(self): ...

    def __getitem__(self, index): ...


Batch = NewType("Batch", object)  # def fn(examples) -> Batch, the return annotation of a collate_fn
Parsed = NewType("Parsed", object)  # def fn(record: bytes) -> Parsed, one example


def length(data):
    """How many items, or None where nobody knows: a __len__ may raise, as a DataLoader's over an IterableDataset."""
    try:
        return len(data)
    except TypeError:
        return None


def has_items(data):
    """Whether single examples can be asked for; torch's IterableDataset inherits a __getitem__, but has no length."""
    return hasattr(data, "__getitem__") and length(data) is not None


class Arrays:
    """A dataset held whole in NumPy arrays (or nests of them), so that it can live on the device."""

    def __init__(self, x, y, source="arrays"):
        lengths = {name: len(a) for name, a in named_nest({"x": x, "y": y})}
        if len(set(lengths.values())) != 1:
            raise UserError(
                f"{source}: needs one row for each example in every array, found {lengths}"
            )
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
    sizes: dict[
        str, int
    ]  # {"train": 60000, "test": 10000}, and "val" where the data brings its own
    load: Callable  # () -> {"train": Dataset, "test": Dataset}, the same keys as sizes
    num_classes: int | None = None
    vocab_size: int | None = None


def check_labels(source, labels, num_classes):
    """Refuse labels outside 0..num_classes-1, naming the first."""
    labels = np.asarray(labels)
    bad = np.argwhere((labels < 0) | (labels >= num_classes))
    if bad.size:
        example, label = bad[0][0], labels[tuple(bad[0])]
        raise UserError(
            f"{source}: label {label} of example {example} is outside the {num_classes} classes 0..{num_classes - 1}"
        )


def loaded(data):
    """The datasets of a Data, once they are known to be what it said: the same sets, sizes, shapes, and labels."""
    sets = data.load()
    if not isinstance(sets, dict):
        raise UserError(f"data: load() must give {{set: dataset}}, gave {type(sets).__name__}")
    if sets.keys() != data.sizes.keys():
        raise UserError(
            f"data: load() gave the sets {sorted(sets)}, sizes names {sorted(data.sizes)}; they must be the same"
        )
    for name, dataset in sets.items():
        if not has_items(dataset):
            raise UserError(
                f"data: the {name} set gives no single examples; it needs __len__ and __getitem__"
            )
        if len(dataset) != data.sizes[name]:
            raise UserError(
                f"data: the {name} set has {len(dataset)} examples, sizes says {data.sizes[name]}"
            )
        found, promised = _form(dataset[0]), _form(data.example)
        if found != promised:
            raise UserError(
                f"data: an example of the {name} set is {found}, the data's `example` says {promised}"
            )
        if type(dataset) is Arrays and data.num_classes is not None:
            labels = dataset.arrays[1]
            if isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu":
                check_labels(f"data: the {name} set", labels, data.num_classes)
    return sets


def _form(example):
    """Shape and kind of number of every leaf; the number of bits is the device's affair."""
    return {
        name: f"{np.asarray(leaf).dtype.kind}{list(np.shape(leaf))}"
        for name, leaf in named_nest(example)
    }
