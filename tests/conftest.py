"""One cache of compiled programs for a whole run of the tests: most of their time is compilation, much of it of the same ones.

JAX keeps the programs in a folder, which both workers and the processes that tests start find in their environment; it is empty
at the start and gone at the end. That this changes no bit is proved in test_compilation_cache.py.
"""

import os
import shutil
import tempfile

CACHE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
OURS = (
    "PYTEST_XDIST_WORKER" not in os.environ
)  # a worker takes the folder of the process that started it

if OURS:  # before anything imports jax
    os.environ |= CACHE | {
        "JAX_COMPILATION_CACHE_DIR": tempfile.mkdtemp(prefix="rawtree-programs-")
    }


def pytest_unconfigure():
    if OURS:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
