"""One cache of compiled programs for a whole test run: most of its time is compilation, and many of
the programs are the same.

JAX keeps the programs in a folder, which pytest's workers and the processes started by tests find
in their environment; it is empty at the start and deleted at the end. test_compilation_cache.py
proves that the cache does not change any bit.
"""

import os
import shutil
import sys
import tempfile

import pytest

from tests.shapes import check_shapes_in_all_tests, set_checks

CACHE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
# A worker uses the folder of the process that started it.
IS_OWNER = "PYTEST_XDIST_WORKER" not in os.environ

# Python keeps what it compiles, also that of the processes that tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if IS_OWNER:  # before anything imports jax
    folder = tempfile.mkdtemp(prefix="rawtree-programs-")
    os.environ |= CACHE | {"JAX_COMPILATION_CACHE_DIR": folder}


check_shapes_in_all_tests()


def pytest_unconfigure():
    if IS_OWNER:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture
def without_shape_checks():
    """For a test of a message about shapes, which the check of our own shapes would replace."""
    set_checks(False)
    yield
    set_checks(True)


@pytest.fixture
def clean_imports(monkeypatch):
    """The modules of a user, `my_...` and `vast_...`, that a test imports, and where it looks for
    them, are forgotten after it."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("my_", "vast_")):
            del sys.modules[name]


@pytest.fixture
def cudnn_attention(monkeypatch):
    """Attention is traced as on a GPU with cuDNN's kernel, by JAX's own checks of the shapes."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)
    monkeypatch.setattr("model.layers.forms.has_flash_attention", lambda: True)
