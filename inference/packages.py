"""The packages that exporting needs and training does not."""

import faulthandler
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from utils import UserError

Flat = Any  # an object of a TFLite file; TensorFlow declares that every field may be None
INSTALL = "pip install -r inference/requirements.txt"
DISTRIBUTIONS = {"ai_edge_litert": "ai-edge-litert"}  # {module: package}, where the names differ
MAX_OUTPUT = 4000  # bytes of a package's output that are kept when it fails


def needed(*modules: str) -> None:
    """Raise if one of these modules is not installed, without importing any."""
    missing = [DISTRIBUTIONS.get(name, name) for name in modules if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"{', '.join(missing)} {verb} needed and not installed: {INSTALL}")


def import_tensorflow() -> None:
    """Import TensorFlow without what it loads at its start and no export needs: a quarter of the
    time. Keras and JAX can be imported afterwards."""
    if "tensorflow" in sys.modules:
        return
    absent = [name for name in ("keras", "jax") if name not in sys.modules]
    for name in absent:  # None makes their import fail, which it allows for
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]  # Python allows it
    try:
        importlib.import_module("tensorflow")
    finally:
        for name in absent:
            del sys.modules[name]


def import_onnxruntime() -> None:
    importlib.import_module("onnxruntime")


def first_import(formats: Collection[str]) -> Callable[[], None]:
    """The function that imports, as soon as a child process starts, what these formats need."""
    return import_tensorflow if "tflite" in formats else import_onnxruntime


def read_tflite(data: bytes) -> Flat:
    """The model in the bytes of a TFLite file."""
    from tensorflow.lite.tools import flatbuffer_utils

    return flatbuffer_utils.convert_bytearray_to_object(bytearray(data))


def tflite_bytes(model: Flat) -> bytes:
    """The TFLite file of a model."""
    from tensorflow.lite.tools import flatbuffer_utils

    return bytes(flatbuffer_utils.convert_object_to_bytearray(model))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the terminal silent, including output of C++ code, which bypasses Python's streams.

    If an exception is raised, the output becomes a note of it, which the traceback shows. If C++
    code ends the process, faulthandler prints to the terminal where that happened.
    """
    with tempfile.TemporaryFile() as output:
        try:
            with redirected(output.fileno()):
                yield
        except Exception as error:
            output.seek(0)
            if text := output.read()[-MAX_OUTPUT:].decode(errors="replace").strip():
                error.add_note(text)
            raise


@contextmanager
def redirected(file: int) -> Iterator[None]:
    """Redirect both output streams to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    originals, enable = [os.dup(1), os.dup(2)], not faulthandler.is_enabled()
    if enable:
        faulthandler.enable(originals[1])
    try:
        os.dup2(file, 1)
        os.dup2(file, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if enable:
            faulthandler.disable()
        for number, original in zip((1, 2), originals, strict=True):
            os.dup2(original, number)
            os.close(original)
