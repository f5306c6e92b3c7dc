"""The protocols of data: what a dataset is, and what a dataset factory returns."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NamedTuple,
    NewType,
    Protocol,
    TypeAlias,
    TypeGuard,
    runtime_checkable,
)

import numpy as np
from numpy.typing import ArrayLike

from data_loader.nest import Nest, check_type, map_nest, named_nest
from utils import RunError, UserError, where_and_why
from utils.forms import check_takes


@runtime_checkable
class Dataset(Protocol):
    """Anything with a length and items, each one example: a tuple (x, y) or any nest of arrays.

    It may also have `read_batches(order, collate_fn)`, which yields one batch for each row of
    indices in `order`; and `in_epoch(seed, epoch)`, the dataset of the same length that a shuffled
    epoch reads instead. That may depend on nothing else, so that a resumed run reads the same. The
    attribute `advice` is logged if a run waits for the data. With `tokens_per_example`, the number
    of tokens that an example predicts, log lines have tokens per second. With `ignore_label`,
    losses and metrics do not count the elements that have this label.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Nest: ...


# The return annotations of a collate_fn, `def fn(examples) -> Batch`, and of a function that reads
# one example, `def fn(record: bytes) -> Parsed`. Both return any nest.
if TYPE_CHECKING:
    Batch: TypeAlias = Nest
    Parsed: TypeAlias = Nest
else:
    Batch = NewType("Batch", object)
    Parsed = NewType("Parsed", object)

CollateFn: TypeAlias = Callable[[Sequence[Nest]], Batch]
AnyDataset: TypeAlias = Dataset | Iterable[Batch]  # by index, or the user's own batches


@runtime_checkable
class BatchOptions(Protocol):
    """What this folder reads of the LoaderOptions (training/options.py)."""

    @property
    def batch_size(self) -> int: ...

    @property
    def shuffle(self) -> bool: ...

    @property
    def collate_fn(self) -> CollateFn | None: ...

    @property
    def eval_collate_fn(self) -> CollateFn | None: ...

    def of(self, set_name: str) -> "BatchOptions": ...


def length(data: Any) -> int | None:
    """The number of items, or None if unknown, as for a DataLoader over an IterableDataset."""
    try:
        return len(data)
    except TypeError:
        return None


def has_items(data: object) -> TypeGuard[Dataset]:
    """Whether single examples can be read by index.

    That needs a length, too: torch's IterableDataset inherits a __getitem__ but has no length.
    """
    return hasattr(data, "__getitem__") and length(data) is not None


class ExampleFailed(UserError):
    """A dataset of the user's own raised an error when an example was read."""


def read_example(dataset: Dataset, index: int) -> Nest:
    """The example at an index. An error that is not a message for the user names the example."""
    try:
        return dataset[index]
    except (UserError, RunError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        name = f"data: example {index} of {type(dataset).__name__}"
        raise ExampleFailed(f"{name} failed: {where_and_why(error)}") from error


class Arrays:
    """A dataset held in NumPy arrays (or nests of them), so that it can live on the device."""

    def __init__(self, x: Nest, y: Nest, source: str = "arrays") -> None:
        leaves = dict(named_nest({"x": x, "y": y}))
        for name, leaf in leaves.items():
            check_type(f"{source}: {name}", np.asarray(leaf).dtype)
        lengths = {name: len(leaf) for name, leaf in leaves.items()}
        if len(set(lengths.values())) != 1:
            raise UserError(
                f"{source}: every array needs one row per example, found the lengths {lengths}"
            )
        self.arrays = (x, y)
        self.source = source  # where the data came from, for the records of the run
        self.length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int | slice | np.ndarray) -> Nest:
        return map_nest(lambda a: a[index], self.arrays)


def fingerprint(dataset: Dataset) -> str:
    """A short hash of a dataset: of all its arrays, or else of its length, first and last example.
    A dataset may have its own `fingerprint()`."""
    own: Callable[[], str] | None = getattr(dataset, "fingerprint", None)
    if callable(own):
        return own()
    if type(dataset) is Arrays:
        content = dataset.arrays
    else:
        content = tuple(read_example(dataset, i) for i in (0, len(dataset) - 1))
    digest = hashlib.sha256(str(len(dataset)).encode())
    for name, leaf in named_nest(content):
        leaf = np.asarray(leaf, order="C")
        digest.update(f"{name} {leaf.shape} {leaf.dtype.str}".encode())
        digest.update(leaf)  # pyright: ignore[reportArgumentType]  # NumPy hides its buffers
    return digest.hexdigest()[:16]


def fingerprints_of(sets: Mapping[str, AnyDataset]) -> dict[str, str]:
    """{set: its fingerprint} of the sets that can be read by index."""
    return {name: fingerprint(dataset) for name, dataset in sets.items() if has_items(dataset)}


@runtime_checkable
class Tokenizer(Protocol):
    """Turns text into tokens, 0 to vocab_size-1, and back. `from_json` of
    data_loader/tokenizers/saved.py reads what `to_json` writes. An object that must be trained on
    the text is an UntrainedTokenizer instead.
    """

    vocab_size: int
    end_of_text: int | None  # the token that ends a document

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, tokens: ArrayLike) -> str: ...

    def to_json(self) -> str: ...


@runtime_checkable
class UntrainedTokenizer(Protocol):
    """A tokenizer that must be trained on the text before it can be used."""

    def train(self, documents: Iterable[str]) -> Tokenizer: ...


class Data(NamedTuple):
    """What a dataset factory returns quickly, from headers or constants; load() reads the examples.

    The keys of `sizes` are train and test, and the names of validation sets, such as val.
    """

    example: Nest  # one raw example of zeros: shapes and types only
    sizes: dict[str, int]  # {"train": 60000, "test": 10000}
    load: Callable[
        [], Mapping[str, AnyDataset]
    ]  # () -> {"train": Dataset, "test": Dataset}, the same keys as sizes
    num_classes: int | None = None
    vocab_size: int | None = None
    classes: tuple[str, ...] | None = None  # the name of each class, in the order of the labels
    tokenizer: Tokenizer | None = None  # the tokenizer that made the tokens
    bytes_per_token: float | None = None  # the average in the text
    ignore_label: int | None = None  # the label of positions that do not count
    columns: dict[str, tuple[str, ...]] | None = (
        None  # {column of a table: its categories, or () for numbers}
    )


# What helpers return: a public function that is annotated `-> Data` is a part.
DataOfHelper: TypeAlias = Annotated[Data, "returned by a helper"]


def named_sets(train: str, val: str | None, test: str | None) -> dict[str, str]:
    """{set: its path}, without those that are None."""
    sets = {"train": train, "val": val, "test": test}
    return {name: value for name, value in sets.items() if value is not None}


def tokenizer_json(data: object) -> str | None:
    """The tokenizer of a Data, or of a dataset that has a `tokenizer`, as text; None if there is
    none, or if it belongs to another library and cannot be stored."""
    to_json = getattr(getattr(data, "tokenizer", None), "to_json", None)
    return to_json() if to_json else None


def class_names(data: object) -> list[str] | None:
    """The names of the classes of a Data or a dataset that has `classes`, else None."""
    classes = getattr(data, "classes", None)
    return None if classes is None else [str(name) for name in classes]


def check_labels(source: object, labels: ArrayLike, num_classes: int) -> None:
    """Raise an error that names the first label outside 0..num_classes-1."""
    labels = np.asarray(labels)
    bad = np.argwhere((labels < 0) | (labels >= num_classes))
    if bad.size:
        example, label = bad[0][0], labels[tuple(bad[0])]
        raise UserError(
            f"{source}: label {label} of example {example} is outside the {num_classes} classes "
            f"0..{num_classes - 1}"
        )


class Batches:
    """The user's own iterable of batches as a set of a config, checked against its Data when its
    first batch is read."""

    def __init__(self, name: str, iterable: Iterable[Batch], data: Data, batch_size: int) -> None:
        self.name, self.iterable, self.size = name, iterable, batch_size
        self.form = _form(data.example)
        self.source = getattr(iterable, "source", type(iterable).__name__)
        self.rows = min(batch_size, data.sizes[name])
        steps, known = -(-data.sizes[name] // batch_size), length(iterable)
        if known not in (None, steps):
            raise UserError(
                f"data: the {name} set has {known} batches, but `sizes` and loader.batch_size make "
                f"{steps}; `sizes` counts the examples that an epoch yields"
            )
        if start_at := getattr(iterable, "start_at", None):
            self.start_at = lambda epoch, batch: self.checked(start_at(epoch, batch), batch)

    def __len__(self) -> int:
        return len(self.iterable)  # pyright: ignore[reportArgumentType]  # a TypeError: unknown

    def __iter__(self) -> Iterator[Batch]:
        iterator = iter(self.iterable)
        if iterator is self.iterable:
            raise UserError(
                f"data: the {self.name} set is an iterator, which can be read only once; load() "
                "must return an object whose __iter__ begins again"
            )
        return self.checked(iterator)

    def checked(self, batches: Iterable[Batch], start: int = 0) -> Iterator[Batch]:
        """The batches, after checking that the first has the rows and shapes of the Data."""
        for i, batch in enumerate(batches, start):
            if i == start:
                rows, form = len(next(named_nest(batch))[1]), _form(batch, of_batch=True)
                if i == 0 and rows != self.rows:
                    raise UserError(
                        f"data: the {self.name} set has batches of {rows} examples, "
                        f"loader.batch_size says {self.rows}; set both to the same number"
                    )
                if form != self.form:
                    raise UserError(
                        f"data: the examples in a batch of the {self.name} set are {form}, "
                        f"`example` says {self.form}"
                    )
            yield batch


def loaded(data: Data, options: BatchOptions | None = None) -> dict[str, AnyDataset]:
    """The datasets of a Data, checked against its sets, sizes, example and number of classes.
    `options` are the LoaderOptions, whose collate_fn may give all examples one shape."""
    if not callable(data.load):
        found = type(data.load).__name__
        raise UserError(f"data: load must be a function that returns {{set: dataset}}, got {found}")
    check_takes("data: load", data.load, ())
    found = data.load()
    if not isinstance(found, dict):
        raise UserError(f"data: load() must return {{set: dataset}}, got {type(found).__name__}")
    sets = dict(found)
    if sets.keys() != data.sizes.keys():
        raise UserError(
            f"data: load() returned the sets {sorted(sets)}, but `sizes` names "
            f"{sorted(data.sizes)}; they must be the same"
        )
    for name, dataset in sets.items():
        own = options.of(name) if options else None
        if not has_items(dataset):
            if own and isinstance(dataset, Iterable):
                sets[name] = Batches(name, dataset, data, own.batch_size)
                continue
            raise UserError(
                f"data: examples of the {name} set cannot be read by index; "
                "it needs __len__ and __getitem__, or __iter__ that yields batches"
            )
        if len(dataset) != data.sizes[name]:
            is_pair = isinstance(dataset, tuple | list) and len(dataset) == 2
            hint = "; for a pair of arrays, write Arrays(x, y)" if is_pair else ""
            raise UserError(
                f"data: the {name} set has {len(dataset)} examples, "
                f"`sizes` says {data.sizes[name]}{hint}"
            )
        collate_fn = own.collate_fn if own else None
        actual, expected = (
            _form_of(one, collate_fn) for one in (read_example(dataset, 0), data.example)
        )
        if actual != expected:
            of_held_out = name != "train" and options and options.eval_collate_fn
            option = "eval_collate_fn" if of_held_out else "collate_fn"
            fix = f"; loader.{option} must give all batches one form" if collate_fn else ""
            raise UserError(
                f"data: an example of the {name} set is {actual}, `example` says {expected}{fix}"
            )
        if type(dataset) is Arrays and data.num_classes is not None:
            labels = dataset.arrays[1]
            if isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu":
                check_labels(f"data: the {name} set", labels, data.num_classes)
    return sets


def _form_of(example: Nest, collate_fn: CollateFn | None) -> dict[str, str]:
    """The _form of an example, or of the row that a collate_fn makes from it."""
    from data_loader.loader import collated  # which imports this module

    if collate_fn is None:
        return _form(example)
    return _form(collated([example], collate_fn), of_batch=True)


def _form(example: Nest, of_batch: bool = False) -> dict[str, str]:
    """Shape and kind of number of every leaf; not the number of bits, which the device decides."""
    return {
        name: f"{np.asarray(leaf).dtype.kind}{list(np.shape(leaf)[of_batch:])}"
        for name, leaf in named_nest(example)
    }
