"""A command that hangs, one that dies, and one that works, to test the bench itself."""

import os
import time

from tests.fuzz.bench import Command


def prepare(folder, work):
    """Nothing is needed."""


def commands(base, seed, work):
    calls = {"hangs": lambda: time.sleep(1000), "dies": os.abort, "works": lambda: 0}
    yield Command(base, calls[base])
