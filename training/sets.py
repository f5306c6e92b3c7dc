"""The datasets of a run by name: train, validation sets, test."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from data_loader.base import Arrays, Data, has_items, length, read_example
from data_loader.loader import first_batches, split
from data_loader.nest import check_integers, check_readable, check_type, map_nest, named_nest
from training.base import Sets
from training.objective import cutmix, mixup, supervised
from training.options import LoaderOptions, TrainingOptions
from utils import UserError


def datasets(train: Any, val: Any, test: Any, loader: LoaderOptions, overfit: int = 0) -> Sets:
    """The sets of a run by name, with a validation set split off if `loader.val_size` is set."""
    held_out = val if isinstance(val, dict) else {"val": val}
    if taken := [name for name in ("train", "test") if name in held_out]:
        raise UserError(f"data: a validation set cannot be called {taken[0]!r}")
    given = {"train": train, **held_out, "test": test}
    sets = {name: as_dataset(name, data) for name, data in given.items() if data is not None}
    check_sizes({name: length(data) for name, data in sets.items()}, loader.val_size)
    for name, dataset in sets.items():
        check_items(name, dataset, loader.of(name))
    if loader.val_size:
        if not has_items(sets["train"]):
            raise UserError(
                "loader.val_size: an iterable of batches cannot be split; leave val_size at 0"
            )
        sets["train"], sets["val"] = split(sets["train"], loader.val_size, loader.split_seed)
    if overfit:
        sets["train"] = first_batches(sets["train"], overfit, loader.batch_size)
    return sets


def check_sizes(sizes: Mapping[str, int | None], val_size: float) -> None:
    """Refuse sets without examples, a `val_size` of data with a validation set, and the names of
    sets that metrics, which are called <set>_<metric>, cannot have. `sizes` are {set: how many
    examples or batches, None if unknown}."""
    for name, size in sizes.items():
        if not re.fullmatch(r"[a-z0-9-]+", name):
            raise UserError(
                f"data: a validation set cannot be called {name!r}; "
                "use small letters, digits and '-'"
            )
        if size == 0:
            raise UserError(f"data: the {name} set is empty")
    if val_size and "val" in sizes:
        raise UserError(
            "loader.val_size: the data brings its own validation set; leave val_size at 0"
        )


def split_sets(sets: Sets, loader: LoaderOptions, overfit: int = 0) -> Sets:
    """The sets of a run from the sets that a Data loads."""
    validation = {name: sets[name] for name in sets if name not in ("train", "test")}
    return datasets(sets["train"], validation, sets.get("test"), loader, overfit)


def check_iterators(sets: Sets, training: TrainingOptions) -> None:
    """Refuse an iterator, such as a generator, as a set that is read more than once. A class of the
    user's own may begin again although its __iter__ returns itself."""
    ends_early = training.max_steps or training.max_seconds or training.limit_batches
    for name, data in sets.items():
        data = getattr(data, "iterable", data)
        if not isinstance(data, Iterator) or isinstance(type(data).__iter__, FunctionType):
            continue
        why = "a held-out set is read several times"
        if name == "train":
            if training.epochs == 1 or ends_early:
                continue
            why = f"epochs is {training.epochs}"
        fix = "pass an object whose __iter__ begins again, as a DataLoader's does"
        raise UserError(f"{name}: is an iterator, which can be read only once, and {why}; {fix}")


def check_items(name: str, data: Any, options: LoaderOptions) -> None:
    """Refuse examples that cannot be read, and a list of batches, since a list is read as a list of
    examples."""
    if data is not None and has_items(data) and type(data) is not Arrays and length(data):
        check_readable(read_example(data, 0), f"{name}: an example")
    if not isinstance(data, list | tuple) or options.collate_fn:
        return
    rows = set()
    for item in data:
        leaves = [leaf for _, leaf in named_nest(item)]
        sizes = {tuple(getattr(leaf, "shape", ()))[:1] for leaf in leaves}
        if len(leaves) < 2 or len(sizes) != 1 or sizes == {()}:
            return  # an example, such as an image with its label
        rows |= sizes
    if len(rows) > 1 or (rows == {(options.batch_size,)} and options.batch_size > 1):
        fix = "pass an object whose __iter__ yields them, or whole arrays (np.concatenate)"
        fix += "" if len(rows) > 1 else "; if each is one example, stack them (np.stack)"
        what = f"a list of {len(data)} batches, and a list is read as examples"
        raise UserError(f"{name}: looks like {what}; {fix}")


def as_dataset(name: str, data: Any) -> Any:
    """A pair (x, y) of arrays, or of nests of them, as a dataset; anything else unchanged."""
    check_data(name, data)
    if not isinstance(data, tuple | list) or len(data) != 2:
        return data
    for side, values in zip("xy", data, strict=True):
        check_side(name, side, values, data)
    return Arrays(*map_nest(np.asanyarray, data))


SUPERVISED = (supervised, mixup, cutmix)  # the objectives that compare outputs with targets


def check_data(name: str, data: Any) -> None:
    """Refuse data that is not a pair, a dataset or an iterable of batches."""
    pair = f"pass a pair of arrays, (x, y), or a dataset (docs/data.md) as `{name}`"
    if isinstance(data, Data):
        sets = "sets = data.load(), then sets['train'] and sets['test']"
        raise UserError(f"{name}: is a Data, whose examples are not loaded yet; use {sets}")
    if isinstance(data, dict):
        raise UserError(f"{name}: is a dict of {', '.join(map(str, data))}; {pair}")
    if isinstance(data, tuple) and len(data) != 2:
        raise UserError(f"{name}: is a tuple of {len(data)}; {pair}")
    readable = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    if data is not None and (isinstance(data, str | bytes | type) or not readable):
        raise UserError(f"{name}: {data!r} holds no examples; {pair}")


def check_side(name: str, side: str, values: PyTree, pair: Sequence[PyTree]) -> None:
    """Refuse lists of numbers, lists of examples, and arrays that do not hold numbers."""
    check_readable({side: values}, name)
    for path, leaf in named_nest({side: values}):
        if isinstance(leaf, int | float | complex | bool | str | bytes | np.generic):
            raise UserError(f"{name}: {side} is a list; pass an array: np.asarray({side})")
        array = np.asanyarray(leaf)
        if array.dtype.kind in "OUSMm":
            found = f"holds {array.dtype}, not numbers"
            raise UserError(f"{name}: {path} {found}; {numbers_from(path, leaf, array)}")
        check_type(f"{name}: {path}", array.dtype)
        check_integers({path: array}, 8 * jnp.result_type(int).itemsize, name)
    other = pair[1] if side == "x" else pair[0]
    is_list = isinstance(values, list) and hasattr(other, "shape") and len(values) == len(other)
    if is_list and any(np.shape(leaf)[:1] != (len(other),) for leaf in values):
        fix = f"pass one array: np.stack({side})"
        raise UserError(f"{name}: {side} is a list of {len(values)} arrays; {fix}")


def numbers_from(path: str, leaf: Any, array: np.ndarray) -> str:
    """How numbers can be made of what is not numbers."""
    if hasattr(leaf, "toarray"):  # a sparse matrix of SciPy
        return f"pass {path}.toarray()"
    if array.dtype.kind in "Mm":
        return f'pass the days since the first: ({path} - {path}.min()) / np.timedelta64(1, "D")'
    if hasattr(leaf, "columns"):  # a table of pandas
        odd = [f"{name} ({kind})" for name, kind in leaf.dtypes.items() if kind.kind not in "biuf"]
        return f"drop or encode the columns {', '.join(odd)}; pd.get_dummies encodes names"
    first = next(iter(array.ravel()), "")
    if isinstance(first, np.ndarray):
        return f"pass one array: np.stack({path})"
    if array.dtype.kind == "O" and not isinstance(first, str):
        return f"pass {path}.astype({'int' if isinstance(first, int) else 'float'})"
    return "pass numbers; np.unique(names, return_inverse=True)[1] numbers the names"


def check_pairs(sets: Sets, objective: Callable) -> None:
    """Refuse a single array where the objective needs pairs, as from fit(model, x, y)."""
    if getattr(objective, "func", objective) not in SUPERVISED:
        return
    for name, data in sets.items():
        if hasattr(data, "dtype") and hasattr(data, "shape"):
            form = f"{data.dtype}{list(data.shape)}"
            fix = "pass the inputs with their targets: fit(model, (x, y), (x_test, y_test))"
            raise UserError(f"{name}: is one array, {form}, without targets; {fix}")
