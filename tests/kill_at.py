"""python tests/kill_at.py N arguments...: train.py, killed with SIGKILL at the N-th thing that its process does to the disk.

A write to a checkpoint is cut in half first, so that some of it is there and some is not.
"""

import builtins
import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import train
import utils

left = int(sys.argv.pop(1))


def count():
    global left
    left -= 1
    return left == 0


def killed_in(function):
    def wrapped(*arguments, **keywords):
        if count():
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **keywords)

    return wrapped


class Torn:
    """A file whose writes count."""

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
        if count():
            self.file.write(memoryview(data).cast("B")[: len(data) // 2])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.file.write(data)


def torn_open(*arguments, **keywords):
    return Torn(builtins.open(*arguments, **keywords))


utils.open = torn_open
for name in ("fsync", "replace", "truncate", "unlink"):
    setattr(os, name, killed_in(getattr(os, name)))

sys.exit(train.main())
