"""python tests/kill_at.py N arguments...: run train.py, and kill it with SIGKILL at its N-th change
of the disk.

If that is a write to a file of a run, only the first half is written before the kill, and the
file's name is added to torn.txt in the working directory.
"""

import builtins
import io
import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import train

changes_left = int(sys.argv.pop(1))


def is_last_change():
    global changes_left
    changes_left -= 1
    return changes_left == 0


def counted(function):
    def wrapped(*arguments, **keywords):
        if is_last_change():
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **keywords)

    return wrapped


class CountedFile:
    """A file whose writes are counted."""

    def __init__(self, file):
        self.file = file

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def write(self, data):
        if is_last_change():
            is_text = isinstance(data, str)
            half = data if is_text else memoryview(data).cast("B")
            self.file.write(half[: len(half) // 2])
            self.file.flush()
            with plain_open("torn.txt", "a", encoding="utf-8") as torn:
                torn.write(f"{self.file.name}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return self.file.write(data)


plain_open, runs = builtins.open, os.path.abspath("saved")


def counted_open(file, mode="r", *arguments, **keywords):
    opened = plain_open(file, mode, *arguments, **keywords)
    is_of_a_run = isinstance(file, str | os.PathLike) and os.path.abspath(file).startswith(runs)
    return CountedFile(opened) if is_of_a_run and set(mode) & set("wax+") else opened


# Both names of one function: pathlib opens files by that of io.
builtins.open = io.open = counted_open
for name in ("fsync", "replace", "truncate", "unlink"):
    setattr(os, name, counted(getattr(os, name)))

sys.exit(train.main())
