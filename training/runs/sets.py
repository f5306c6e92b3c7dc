"""The datasets of a run by name: train, validation sets, test."""

import re
from collections.abc import Iterator
from types import FunctionType

import numpy as np

from data_loader.base import Arrays, has_items, length, read_example
from data_loader.loader import first_batches, split
from data_loader.nest import check_readable, map_nest, named_nest
from training.runs.argument_checks import check_data, check_side
from utils import UserError


def datasets(train, val, test, loader, overfit=0):
    """The sets of a run by name, with a validation set split off if `loader.val_size` is set."""
    held_out = val if isinstance(val, dict) else {"val": val}
    check_names(held_out)
    sets = {"train": as_dataset("train", train)}
    sets |= {name: as_dataset(name, data) for name, data in {**held_out, "test": test}.items()}
    for name, dataset in sets.items():
        check_items(name, dataset, loader.of(name))
    if loader.val_size:
        if "val" in held_out and held_out["val"] is not None:
            raise UserError(
                "loader.val_size: the data brings its own validation set; leave val_size at 0"
            )
        if not has_items(sets["train"]):
            raise UserError(
                "loader.val_size: an iterable of batches cannot be split; leave val_size at 0"
            )
        sets["train"], sets["val"] = split(sets["train"], loader.val_size, loader.split_seed)
    if overfit:
        sets["train"] = first_batches(sets["train"], overfit, loader.batch_size)
    sets = {name: dataset for name, dataset in sets.items() if dataset is not None}
    for name, dataset in sets.items():
        if length(dataset) == 0:
            raise UserError(f"data: the {name} set is empty")
    return sets


def split_sets(sets, loader, overfit=0):
    """The sets of a run from the sets that a Data loads."""
    validation = {name: sets[name] for name in sets if name not in ("train", "test")}
    return datasets(sets["train"], validation, sets.get("test"), loader, overfit)


def check_iterators(sets, training):
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


def check_items(name, data, options):
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


def check_names(sets):
    """Metrics are called <set>_<metric>, so the names of validation sets have no underscore."""
    for name in sets:
        if not re.fullmatch(r"[a-z0-9-]+", name) or name in ("train", "test"):
            raise UserError(
                f"data: a validation set cannot be called {name!r}; "
                "use small letters, digits and '-'"
            )


def as_dataset(name, data):
    """A pair (x, y) of arrays, or of nests of them, as a dataset; anything else unchanged."""
    check_data(name, data)
    if not isinstance(data, tuple | list) or len(data) != 2:
        return data
    for side, values in zip("xy", data, strict=True):
        check_side(name, side, values, data)
    return Arrays(*map_nest(np.asanyarray, data))
