"""Write the values as a table for a spreadsheet: one row per line, one column per value."""

import io
from collections.abc import Iterable, Sequence
from csv import reader, writer

from training.base import Tracker
from training.watching.publish import About
from training.watching.trackers.common import check_file_name, existing_text
from utils.files import append, atomic_write
from utils.forms import LocalPath


def csv(file: LocalPath = "metrics.csv") -> Tracker:
    """Write each line as a row of a table in the run's folder; missing values are empty."""
    check_file_name(file)
    return Csv(file)


class Csv:
    """Appends rows; writes the whole table again when a column is added or rows are void."""

    def __init__(self, file: str) -> None:
        self.file = file

    def start(self, about: About) -> None:
        self.path = about.folder / self.file
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.columns = ["step"]
        if about.step and self.path.exists():
            self.columns = self.rows()[0]
            self.back_to(about.step)
        else:
            self.write([])

    def scalars(self, step: int, values: dict[str, float]) -> None:
        if new := [name for name in values if name not in self.columns]:
            rows = self.rows()[1:]
            self.columns += new
            self.write(rows)
        row = {**values, "step": step}
        append(self.path, as_text([[row.get(name, "") for name in self.columns]]))

    def back_to(self, step: int) -> None:
        self.write([row for row in self.rows()[1:] if int(row[0]) <= step])

    def rows(self) -> list[list[str]]:
        """The header and the rows so far, without an incomplete one at the end."""
        lines = existing_text(self.path).splitlines(keepends=True)
        return list(reader(line for line in lines if line.endswith("\n"))) or [self.columns]

    def write(self, rows: list[list[str]]) -> None:
        """Write the whole table; rows that lack columns are filled up with empty values."""
        filled = [row + [""] * (len(self.columns) - len(row)) for row in rows]
        atomic_write(self.path, as_text([self.columns, *filled]).encode())


def as_text(rows: Iterable[Sequence[object]]) -> str:
    file = io.StringIO()
    writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()
