"""Arrays that take long to make, kept in the user's cache folder for the next run."""

import io
import logging
import time
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from utils import RunError, user_cache
from utils.files import atomic_write


def cached(name: str, make: Callable[[], dict[str, Any]], slow: float = 0.0) -> dict[str, Any]:
    """The arrays that make() returns, read from the cached file of this name if there is one. A new
    result is cached if making it took more than `slow` seconds."""
    file = f"{name}.npz"
    try:
        with np.load(user_cache() / file, allow_pickle=False) as kept:
            return dict(kept)
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile):
        begin = time.perf_counter()
        made = make()  # the file is missing or damaged
    if time.perf_counter() - begin > slow:
        buffer = io.BytesIO()
        np.savez(buffer, **made)
        try:
            user_cache().mkdir(parents=True, exist_ok=True)
            atomic_write(user_cache() / file, buffer.getvalue())
        except (OSError, RunError, RuntimeError) as error:  # RuntimeError: no home folder
            logger = logging.getLogger("main")
            logger.warning("%s: cannot be cached for the next run: %s", file.split("-")[0], error)
    return made
