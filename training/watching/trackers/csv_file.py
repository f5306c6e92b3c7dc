"""The values as a table, for a spreadsheet: a row a line, a column a value."""

import io
from csv import reader, writer

from training.base import Tracker
from training.watching.metric_log import append
from training.watching.trackers.common import check_file_name
from utils import atomic_write


def csv(file: str = "metrics.csv") -> Tracker:
    """Write every line as a row of a table in the run's folder; what a line has no value for is empty."""
    check_file_name(file)
    return Csv(file)


class Csv:
    """A row is appended; the table is written anew where a column is added, or rows are void."""

    def __init__(self, file):
        self.file = file

    def start(self, about):
        self.path = about.folder / self.file
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.columns = ["step"]
        if about.step and self.path.exists():
            self.columns = self.rows()[0]
            self.back_to(about.step)
        else:
            self.replace([])

    def scalars(self, step, values):
        if new := [name for name in values if name not in self.columns]:
            rows = self.rows()[1:]
            self.columns += new
            self.replace(rows)
        row = {**values, "step": step}
        append(self.path, as_text([[row.get(name, "") for name in self.columns]]))

    def back_to(self, step):
        self.replace([row for row in self.rows()[1:] if int(row[0]) <= step])

    def rows(self):
        """The table so far, without a row that was interrupted."""
        lines = self.path.read_text().splitlines(keepends=True)
        return list(reader(line for line in lines if line.endswith("\n"))) or [self.columns]

    def replace(self, rows):
        """Write the table anew, older rows filled up with nothing."""
        width = len(self.columns)
        atomic_write(
            self.path,
            as_text([self.columns, *(row + [""] * (width - len(row)) for row in rows)]).encode(),
        )


def as_text(rows):
    """Rows as a file has them."""
    file = io.StringIO()
    writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()
