"""The packages that exporting needs and training does not."""

import faulthandler
import os
import sys
import tempfile
from contextlib import contextmanager
from importlib.util import find_spec

from utils import UserError

INSTALL = "pip install -r inference/requirements.txt"
DISTRIBUTIONS = {
    "ai_edge_litert": "ai-edge-litert"
}  # where the name to install is not the one to import
SHOWN = 4000  # bytes, of what a package wrote before it failed


def needed(*modules):
    """Refuse where one of these modules is not installed; nothing is imported."""
    missing = [DISTRIBUTIONS.get(name, name) for name in modules if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"{', '.join(missing)} {verb} needed here and not installed: {INSTALL}")


@contextmanager
def quiet():
    """Nothing is written to the terminal meanwhile, from C++ either, which knows nothing of Python's streams.

    What was written becomes a note of an exception, which its traceback shows. Should C++ end the process, the terminal says
    where that was.
    """
    with tempfile.TemporaryFile() as told:
        try:
            with redirected(told.fileno()):
                yield
        except Exception as error:
            told.seek(0)
            if written := told.read()[-SHOWN:].decode(errors="replace").strip():
                error.add_note(written)
            raise


@contextmanager
def redirected(file):
    """Both streams go into a file."""
    sys.stdout.flush(), sys.stderr.flush()
    kept, watched = [os.dup(1), os.dup(2)], not faulthandler.is_enabled()
    if watched:
        faulthandler.enable(kept[1])
    try:
        os.dup2(file, 1), os.dup2(file, 2)
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        if watched:
            faulthandler.disable()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
