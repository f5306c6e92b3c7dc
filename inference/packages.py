"""The packages that exporting needs and training does not."""

import os
import sys
import tempfile
from contextlib import contextmanager
from importlib.util import find_spec

from utils import UserError

INSTALL = "pip install -r inference/requirements.txt"
DISTRIBUTIONS = {"ai_edge_litert": "ai-edge-litert"}  # where the name to install is not the one to import


def needed(*modules):
    """Refuse where one of these modules is not installed; nothing is imported."""
    missing = [DISTRIBUTIONS.get(name, name) for name in modules if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"{', '.join(missing)} {verb} needed here and not installed: {INSTALL}")


@contextmanager
def quiet():
    """Nothing is written to the terminal meanwhile, from C++ either, which knows nothing of Python's streams."""
    sys.stdout.flush(), sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as told:
        try:
            os.dup2(told.fileno(), 1), os.dup2(told.fileno(), 2)
            yield
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
