"""python tests/kill_at.py N arguments...: run train.py, and kill it with SIGKILL at its N-th change
of the disk.

If that is a write to a file, only the first half is written before the kill.
"""

import builtins
import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import train
import utils

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
            self.file.write(memoryview(data).cast("B")[: len(data) // 2])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.file.write(data)


def counted_open(*arguments, **keywords):
    return CountedFile(builtins.open(*arguments, **keywords))


utils.open = counted_open
for name in ("fsync", "replace", "truncate", "unlink"):
    setattr(os, name, counted(getattr(os, name)))

sys.exit(train.main())
