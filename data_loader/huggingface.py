"""Datasets that the library `datasets` of HuggingFace reads: from its Hub, a folder, or files."""

import glob
import importlib.util
import os
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np

from data_loader import grain, table
from data_loader.base import Data
from data_loader.grain import MEMORY_MB
from data_loader.images import Color, ImageSize, image_in, need_pillow, pixels
from data_loader.paths import files_below, reading
from data_loader.table import LONGEST_LINE, TIMES_LARGER
from utils import UserError, check_memory, cut
from utils.files import check_kind, open_file
from utils.forms import CountOrZero, NeedsTrust, at_most, checked

if TYPE_CHECKING:
    from datasets import Dataset as Rows

Feature: TypeAlias = Any  # the type of a column: a class of the package, such as datasets.Value

OLDEST = 4  # the first version of `datasets` that does not run a dataset's code
FILE_TYPES = ("parquet", "csv", "json", "arrow")
MOST_FILES = 10**6  # that are looked at in a folder


def is_elsewhere(value: str | dict[str, str] | None) -> bool:
    """Whether a path, or one of {split: path}, names a server."""
    return any(
        "://" in str(path) for path in (value.values() if isinstance(value, dict) else [value])
    )


@checked
def huggingface(
    path: Annotated[str, NeedsTrust("is read from a server", is_elsewhere)],
    train: str = "train",
    test: str | None = None,
    val: str | None = None,
    x: tuple[str, ...] = (),
    y: str = "label",
    name: str | None = None,
    data_files: Annotated[
        dict[str, str] | None, NeedsTrust("is read from a server", is_elsewhere)
    ] = None,
    revision: str | None = None,
    image_size: tuple[int, int] | None = None,
    color: Literal["rgb", "gray"] = "rgb",
    workers: Annotated[CountOrZero, at_most(1024)] = 0,
    memory_mb: CountOrZero = MEMORY_MB,
) -> Data:
    """A dataset of the HuggingFace Hub, a folder, or `data_files` of the type `path` (parquet, csv,
    json, arrow). `train`, `test` and `val` are splits; `x` and `y` are columns. By default `x` is
    the only column of images, or all but `y`: then an example is a row of a table."""
    found = opened(path, name, data_files, revision)
    wanted = {"train": train, "val": val, "test": test}
    sets = {key: split_of(found, path, split) for key, split in wanted.items() if split}
    features = sets["train"].features
    columns = list(x or images(features) or [column for column in features if column != y])
    for key, rows in sets.items():
        for column in [*columns, y]:
            if column not in rows.features:
                known = ", ".join(rows.features)
                raise UserError(f"{path}, {wanted[key]}: has no column {column!r} ({known})")
    titles = {key: f"{path}, {wanted[key]}" for key in sets}
    if len(columns) > 1 or is_scalar(features[columns[0]]):
        tables = {key: table_of(rows, titles[key], [*columns, y]) for key, rows in sets.items()}
        category = () if is_float(features[y]) else (y,)
        return table.data_of(tables, y, (), category, getattr(features[y], "names", ()))
    (column,) = columns
    if kind(features[column]) == "Image":
        need_pillow("huggingface")
    classes = classes_of(features[y], sets["train"], y)
    for key, rows in sets.items():
        own = tuple(getattr(rows.features[y], "names", None) or classes)
        if own != classes:
            raise UserError(
                f"{titles[key]}: column {y!r} numbers its classes as {cut(str(own), 200)}, not as "
                f"{cut(str(classes), 200)} of the training set; cast both splits to one "
                "datasets.ClassLabel"
            )
    num_classes = len(classes) or largest(sets, y)
    parse = partial(example, x=column, y=y, classes=classes, image_size=image_size, color=color)
    records = {key: RowRecords(rows, [column, y], titles[key]) for key, rows in sets.items()}
    return grain.data_of(
        records, parse, workers, memory_mb, num_classes=num_classes, classes=classes or None
    )


def opened(
    path: str, name: str | None, data_files: dict[str, str] | None, revision: str | None
) -> "dict[str, Rows]":
    """{split: its datasets.Dataset}"""
    if getattr(importlib.util.find_spec("datasets"), "origin", None) is None:  # not a mere folder
        raise UserError("huggingface: needs the package datasets: pip install datasets pillow")
    import datasets

    if not hasattr(datasets, "load_dataset"):
        raise UserError(f"{datasets.__file__}: hides the package datasets; rename it")
    if int(datasets.__version__.split(".")[0]) < OLDEST:
        raise UserError(
            f"huggingface: needs datasets {OLDEST} or newer: pip install --upgrade datasets"
        )
    if path in FILE_TYPES and not data_files:  # it would search the working folder for files
        raise UserError(f'data_files: name the files of type {path}, as {{"train": "my.{path}"}}')
    for each in (path, *(data_files or {}).values()):
        check_local(each)
    try:
        saved = ("dataset_dict.json", "state.json")
        found: Any
        if any(os.path.exists(os.path.join(path, file)) for file in saved):
            found = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(path, name, data_files=data_files, revision=revision)
    except Exception as error:  # of any package that it uses
        raise UserError(
            f"huggingface: {path} cannot be loaded: {type(error).__name__}: {cut(str(error), 500)}"
        ) from error
    return found if isinstance(found, dict) else {"train": found}


def check_local(path: str) -> None:
    """Refuse local files that the package would read without end, or as a whole although they are
    larger than the memory; `path` may be a file, a folder, a pattern, or a name on the Hub."""
    named = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
    for file in islice(chain.from_iterable(map(files_at, named)), MOST_FILES):
        with reading(file):
            size = check_kind(file).st_size
            # Lines are read one by one, but each as a whole.
            if size > LONGEST_LINE and file.endswith((".csv", ".tsv", ".txt", ".json", ".jsonl")):
                with open_file(file) as opened:
                    is_one_line = not opened.readline(LONGEST_LINE).endswith(b"\n")
                if is_one_line:
                    check_memory(file, size * TIMES_LARGER)


def files_at(path: str) -> Iterable[str]:
    """A file, or those in a folder with all folders in it."""
    if not os.path.isdir(path):
        return [path]
    return filter(os.path.exists, files_below(path))  # not a link to nothing


def split_of(found: "dict[str, Rows]", path: str, split: str) -> "Rows":
    if split not in found:
        raise UserError(f"{path}: has no split {split!r} ({', '.join(map(str, found))})")
    if not len(found[split]):
        raise UserError(f"{path}: its split {split!r} is empty")
    return found[split]


def kind(feature: Feature) -> str:
    """The name of a feature's class, such as Image; that of a single value is its type."""
    return getattr(feature, "dtype", "") if is_scalar(feature) else type(feature).__name__


def is_scalar(feature: Feature) -> bool:
    return type(feature).__name__ in ("Value", "ClassLabel")


def is_float(feature: Feature) -> bool:
    return kind(feature).startswith(("float", "double", "decimal"))


def images(features: Mapping[str, Feature]) -> list[str]:
    """The names of the columns of images."""
    return [name for name, feature in features.items() if kind(feature) == "Image"]


class RowRecords:
    """The rows of a Dataset, as records: {column: value}."""

    def __init__(self, rows: "Rows", columns: list[str], title: str) -> None:
        from datasets import Image

        self.source = self.title = title
        self.rows = rows.select_columns(columns)
        for name in images(self.rows.features):  # `decoded` refuses what is too large
            self.rows = self.rows.cast_column(name, Image(decode=False))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[int(index)]

    def name(self, index: int) -> str:
        return f"{self.title}: row {index}"


def example(
    row: dict[str, Any],
    *,
    x: str,
    y: str,
    classes: tuple[str, ...],
    image_size: ImageSize,
    color: Color,
) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of a row: an image or an array of numbers; a label, a number or an array."""
    value, target = row[x], row[y]
    for name, cell in row.items():
        if cell is None:
            raise UserError(f"column {name!r}: is missing")
    if isinstance(value, dict) and {"bytes", "path"} <= value.keys():
        if value["bytes"] is None:
            image = pixels(value["path"], image_size, color)
        else:
            image = image_in(value["bytes"], f"column {x!r}:", image_size, color)
    else:
        image = as_numbers(x, value)
    if classes and isinstance(target, str):
        if target not in classes:
            known = cut(", ".join(classes), 200)
            raise UserError(f"column {y!r}: no class {cut(repr(target), 40)} in training ({known})")
        target = classes.index(target)
    return image, as_numbers(y, target)


def as_numbers(name: str, value: Any) -> np.ndarray:
    """A cell as float32, or as int32 if it holds integers or truth values."""
    try:
        array = np.asarray(value)
        if array.dtype.kind == "f":
            return array.astype(np.float32)
        if array.dtype.kind in "iub" and (array == array.astype(np.int32)).all():
            return array.astype(np.int32)
    except ValueError:  # rows of different lengths
        pass
    raise UserError(
        f"column {name!r}: {cut(repr(value), 40)} is not numbers of 32 bits; name columns of "
        "images or numbers as `x`"
    )


def classes_of(feature: Feature, rows: "Rows", name: str) -> tuple[str, ...]:
    """The names of the classes, from a ClassLabel or from the sorted texts of training."""
    if names := getattr(feature, "names", None):
        return tuple(names)
    if kind(feature) in ("string", "large_string"):
        return tuple(sorted(text for text in rows.unique(name) if text is not None))
    return ()


def largest(sets: "dict[str, Rows]", name: str) -> int | None:
    """The number of classes if the targets are integers without names: the largest label plus 1."""
    feature = kind(sets["train"].features[name])
    if not feature.startswith(("int", "uint", "bool")):
        return None
    labels = (label for rows in sets.values() for label in rows.unique(name) if label is not None)
    return max(2, 1 + int(max(labels, default=0)))


def table_of(rows: "Rows", title: str, columns: Iterable[str]) -> table.Table:
    """The Table of some columns of numbers, texts and classes."""
    cells: dict[str, list[str | None]] = {}
    texts: set[str] = set()
    for name in dict.fromkeys(columns):
        feature = rows.features[name]
        if not is_scalar(feature):
            raise UserError(
                f"{title}: column {name!r} is not one number or text per row; name it alone as "
                "`x`, or leave it out of `x`"
            )
        names = getattr(feature, "names", None)
        values = list(rows[name])
        if names:
            values = [names[v] if v is not None and v >= 0 else None for v in values]
        cells[name] = list(map(table.as_text, values))
        if names or kind(feature) in ("string", "large_string", "bool"):
            texts.add(name)
    return table.Table(title, cells, list(range(1, 1 + len(rows))), frozenset(texts))
