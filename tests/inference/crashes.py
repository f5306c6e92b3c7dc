"""Functions that fail or end their process; a child process imports them from here."""

import ctypes
import os


def refuse(kind):
    print("what a package prints", flush=True)  # it must not be taken for a reply
    raise kind("the reason")


def read_address_0():
    ctypes.string_at(0)


def say_why_and_abort():
    os.write(2, b"F0000 00:00:17.5 12 shape.cc:7] Check failed: rank == 2 (3 vs. 2)\n")
    os.abort()


def open_unless_tflite(path):
    """As a runtime that crashes on a TFLite file while it is verified."""
    from inference.runtimes import open_model

    return AbortsWhenCalled() if path.suffix == ".tflite" else open_model(path)


class AbortsWhenCalled:
    inputs, outputs = {}, {}

    def __call__(self, arrays):
        say_why_and_abort()
