"""Tables: CSV and Parquet files with one row per example, of numbers and of categories.

An example is one row of float32: the value of a number, or NaN if it is missing; the place of a
category in the list of the categories, from 1, or 0 if it is missing or unknown. The preprocessing
`tabular` turns it into a model's inputs.
"""

import csv as csv_file
import io
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_loader.base import Arrays, Data, DataOfHelper, named_sets
from utils import UserError, check_memory, cut
from utils.files import open_file
from utils.forms import LocalPath, checked

MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")
MOST_BYTES = 2**32  # of a file
LONGEST_LINE = 2**22  # characters
TIMES_LARGER = 6  # the cells, as Python's texts, take at least this many times the file's size
BYTES_OF_CELL = 16  # the least that a cell takes: two places in lists
FEW = 100  # different texts that any column may have


class Table(NamedTuple):
    """The cells of a file by column, as texts; None is a missing cell."""

    path: str
    columns: dict[str, list[str | None]]
    lines: list[int]  # where each row is in the file
    texts: frozenset[str] = frozenset()  # columns of texts or truth values, also if all are digits

    def at(self, row: int, name: str) -> str:
        """Where a cell is, for an error message."""
        return f"{self.path}, line {self.lines[row]}, column {name!r}"


@checked
def csv(
    train: LocalPath,
    target: str,
    test: LocalPath | None = None,
    val: LocalPath | None = None,
    leave_out: tuple[str, ...] = (),
    categories: tuple[str, ...] = (),
    missing: tuple[str, ...] = MISSING,
    separator: str = ",",
) -> Data:
    """Tables in CSV files, whose first line names the columns. A column of numbers holds categories
    if `categories` names it; `target` is a class if it is a text or a category."""
    if len(separator) != 1:
        raise ValueError(f"separator: must be one character, got {separator!r}")
    read = partial(read_csv, missing=frozenset(missing), separator=separator)
    tables = {name: read(path) for name, path in named_sets(train, val, test).items()}
    return data_of(tables, target, leave_out, categories)


@checked
def parquet(
    train: LocalPath,
    target: str,
    test: LocalPath | None = None,
    val: LocalPath | None = None,
    leave_out: tuple[str, ...] = (),
    categories: tuple[str, ...] = (),
) -> Data:
    """Tables in Parquet files, read with pyarrow. A column of numbers is one of categories if
    `categories` names it; `target` is a class if it is a text, a truth value or a category."""
    tables = {name: read_parquet(path) for name, path in named_sets(train, val, test).items()}
    return data_of(tables, target, leave_out, categories)


def read_csv(path: str | Path, missing: Collection[str], separator: str) -> Table:
    """The Table in a CSV file. Spaces around a cell are not part of it."""
    try:
        with (
            open_file(path, MOST_BYTES) as raw,
            io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text,
        ):
            check_memory(path, os.fstat(raw.fileno()).st_size * TIMES_LARGER)
            reader = csv_file.reader(
                lines_in(path, text),
                delimiter=separator,
                skipinitialspace=separator != " ",
                strict=True,
            )
            rows, lines = [], []
            try:
                names = [cell.strip() for cell in next(reader, [])]
                check_header(path, names)
                for row in reader:
                    if len(row) != len(names) and row:
                        raise UserError(
                            f"{path}, line {reader.line_num}: has {len(row)} cells, and the first "
                            f"line names {len(names)} columns"
                        )
                    if row:
                        rows.append(row)
                        lines.append(reader.line_num)
            except csv_file.Error as error:
                raise UserError(
                    f"{path}, line {reader.line_num}: {error}; check the quotation marks"
                ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 ({error}); save it as UTF-8") from error
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not rows:
        below = "has no rows below the line with the names of the columns"
        raise UserError(f"{path}: {below if names else 'is empty'}")
    cells = ([cell.strip() for cell in column] for column in zip(*rows, strict=True))
    values = ([None if cell in missing else cell for cell in column] for column in cells)
    return Table(str(path), dict(zip(names, values, strict=True)), lines)


def lines_in(path: str | Path, text: io.TextIOWrapper) -> Iterator[str]:
    """The lines of a file that is open as text."""
    for number, line in enumerate(iter(partial(text.readline, LONGEST_LINE), ""), 1):
        if len(line) == LONGEST_LINE:
            raise UserError(f"{path}, line {number}: has {LONGEST_LINE} characters or more")
        yield line


def check_header(path: str | Path, names: list[str]) -> None:
    if not all(names):
        column = names.index("") + 1 if names else 1
        raise UserError(f"{path}, line 1: column {column} has no name; the first line names them")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path}, line 1: there are two columns {twice[0]!r}; rename one")


def read_parquet(path: str | Path) -> Table:
    """The Table in a Parquet file; a row is counted as the line after it, as in a CSV file."""
    try:
        from pyarrow import ArrowException
        from pyarrow import parquet as parquet_file
    except ImportError as error:
        raise UserError(
            f"{path}: reading Parquet files needs the package pyarrow: pip install pyarrow, or "
            "save the table as CSV"
        ) from error
    try:
        open_file(path, MOST_BYTES).close()
        with parquet_file.ParquetFile(path) as file:  # a few bytes may unpack to gigabytes
            about = file.metadata
            groups = [about.row_group(i).total_byte_size for i in range(about.num_row_groups)]
            cells = about.num_rows * about.num_columns
            check_memory(path, max(sum(groups), cells * BYTES_OF_CELL))
            table = file.read()
    except (OSError, ArrowException) as error:
        raise UserError(f"{path}: cannot be read: {cut(str(error), 1000)}") from error
    check_header(path, table.column_names)
    if not table.num_rows:
        raise UserError(f"{path}: has no rows")
    columns = {name: list(map(as_text, table[name].to_pylist())) for name in table.column_names}
    words = ("string", "large_string", "bool", "dictionary")
    texts = frozenset(each.name for each in table.schema if str(each.type).startswith(words))
    return Table(str(path), columns, list(range(2, 2 + table.num_rows)), texts)


def as_text(value: Any) -> str | None:
    """A cell as a CSV file would hold it. Whole numbers of all types are equal: a column
    of integers with a gap is often stored as floats."""
    if value is None or value != value:
        return None
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def rows_of(
    path: str | Path,
    columns: Mapping[str, Sequence[str]],
    missing: Collection[str] = MISSING,
    separator: str = ",",
) -> np.ndarray:
    """The rows of another file, as `encoded` returns them. It is a CSV file unless its name ends in
    .parquet, and may have more columns than these, or lack the target."""
    if str(path).lower().endswith(".parquet"):
        table = read_parquet(path)
    else:  # a category of another file may be written as what is missing in this one
        categories = {value for values in columns.values() for value in values}
        table = read_csv(path, frozenset(missing) - categories, separator)
    if lacking := [name for name in columns if name not in table.columns]:
        known = cut(", ".join(table.columns), 200)
        raise UserError(
            f"{path}, line 1: has no column {lacking[0]!r}, which the model needs; the columns are "
            f"{known}"
        )
    return encoded(table, columns)


def data_of(
    tables: Mapping[str, Table],
    target: str,
    leave_out: Collection[str],
    categories: Collection[str],
    classes: Sequence[str] = (),
) -> DataOfHelper:
    """The Data of tables. The training set decides whether a column holds numbers or categories,
    and which `classes` there are unless they are given."""
    train = tables["train"]
    check_names(train, "target", [target])
    check_names(train, "leave_out", leave_out)
    check_names(train, "categories", categories)
    if target in leave_out:
        raise ValueError(f"leave_out: names the target {target!r}")
    used = [name for name in train.columns if name not in {target, *leave_out}]
    if not used:
        raise UserError(f"{train.path}: has no column besides the target {target!r}")
    of_categories = {*categories, *train.texts}
    columns = {name: values_of(train, name, name in of_categories) for name in used}
    for name, values in columns.items():
        if len(values) > max(FEW, len(train.lines) // 2):
            raise UserError(
                f"{train.path}: column {name!r} has {len(values)} different texts in "
                f"{len(train.lines)} rows; name it in leave_out"
            )
    classes = tuple(classes) or values_of(train, target, target in of_categories)
    sets = {
        name: Arrays(encoded(table, columns), targets(table, target, classes), table.path)
        for name, table in tables.items()
    }
    y = np.zeros((), np.int32 if classes else np.float32)
    return Data(
        (np.zeros(len(columns), np.float32), y),
        {name: len(dataset) for name, dataset in sets.items()},
        lambda: sets,
        num_classes=len(classes) or None,
        classes=classes or None,
        columns=columns,
    )


def check_names(table: Table, argument: str, names: Collection[str]) -> None:
    for name in names:
        if name not in table.columns:
            known = ", ".join(table.columns)
            fix = "; set `separator`" if re.search(r"[;|\t]", known) else ""
            raise UserError(f"{argument}: {table.path} has no column {name!r} ({known}){fix}")


def values_of(table: Table, name: str, is_category: bool) -> tuple[str, ...]:
    """The sorted categories of a column; none if it holds numbers."""
    cells = [cell for cell in table.columns[name] if cell is not None]
    if not cells:
        raise UserError(f"{table.path}: column {name!r} has no values at all; name it in leave_out")
    wrong = [row for row, cell in enumerate(table.columns[name]) if not is_number(cell)]
    if not wrong and not is_category:
        return ()
    if not is_category and len(wrong) < len(cells) / 2:
        cell = table.columns[name][wrong[0]]
        raise UserError(
            f"{table.at(wrong[0], name)}: {cut(repr(cell), 40)} is not a number, as most of this "
            "column are; correct it, list it in `missing`, or name the column in `categories`"
        )
    return tuple(sorted(set(cells), key=lambda cell: (float(cell), cell) if not wrong else cell))


def is_number(cell: str | None) -> bool:
    """Whether a cell is a finite number, or missing."""
    try:
        return cell is None or ("_" not in cell and math.isfinite(float(cell)))  # 1_1 is a code
    except ValueError:
        return False


def encoded(table: Table, columns: Mapping[str, Sequence[str]]) -> np.ndarray:
    """The rows of a table as numbers, float32 (rows, columns); `columns` is {name: its categories,
    or () for numbers}, as in the facts of a checkpoint."""
    x = np.empty((len(table.lines), len(columns)), np.float32)
    for i, (name, values) in enumerate(columns.items()):
        check_names(table, "columns", [name])
        x[:, i] = places_of(table.columns[name], values) if values else numbers(table, name)
    return x


def places_of(cells: list[str | None], values: Sequence[str]) -> list[int]:
    """The place of each cell among the categories, 0 if it is missing or unknown. A whole number is
    found whether it is written as 7 or as 7.0, unless both are categories."""
    exact = {value: place for place, value in enumerate(values, 1)}
    whole: dict[str, int] = {}
    for value, place in exact.items():
        whole[plain(value)] = 0 if plain(value) in whole else place
    return [0 if c is None else exact.get(c) or whole.get(plain(c), 0) for c in cells]


def plain(cell: str) -> str:
    """A cell without the .0 of a whole number."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", cell)


def numbers(table: Table, name: str) -> np.ndarray:
    """A column of numbers as float32, with NaN where they are missing."""
    for row, cell in enumerate(table.columns[name]):
        if not is_number(cell) or (cell is not None and abs(float(cell)) > 3e38):
            raise UserError(
                f"{table.at(row, name)}: must be a finite number, as in the training set, found "
                f"{cut(repr(cell), 40)}"
            )
    cells = [math.nan if cell is None else float(cell) for cell in table.columns[name]]
    return np.array(cells, np.float32)


def targets(table: Table, name: str, classes: Sequence[str]) -> np.ndarray:
    """The labels of a table, or its numbers."""
    check_names(table, "target", [name])
    cells = table.columns[name]
    if None in cells:
        raise UserError(
            f"{table.at(cells.index(None), name)}: the target is missing; delete the row"
        )
    places = places_of(cells, classes) if classes else ()
    if 0 in places:
        row = places.index(0)
        raise UserError(
            f"{table.at(row, name)}: the training set has no class {cut(repr(cells[row]), 40)} "
            f"({cut(', '.join(classes), 200)})"
        )
    return np.array(places, np.int32) - 1 if classes else numbers(table, name)
