"""Keeps compiled programs for the next run, in JAX's own cache, in the user's cache folder.

JAX's environment variables take precedence: JAX_COMPILATION_CACHE_DIR names another folder,
JAX_ENABLE_COMPILATION_CACHE=false disables the cache.
"""

import hashlib
import logging
import os
import platform
import sys
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import IO

import jax
import jaxlib

from utils import RunError, user_cache
from utils.files import atomic_write

ROOM = 512 * 2**20  # bytes for all programs; the programs of the sample take 0.6 MiB
ZSTANDARD = b"\x28\xb5\x2f\xfd"  # the first bytes of a file compressed with zstandard
VERDICT = "usable"  # the name of the file that says whether programs can be loaded on this machine

logger = logging.getLogger("main")


def keep_programs() -> None:
    """Let JAX load and store compiled programs in the user's cache folder, if that can be used."""
    options = jax.config.values
    if options["jax_compilation_cache_dir"] or not options["jax_enable_compilation_cache"]:
        return
    try:
        folder = user_cache() / "programs" / kind_of_machine()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK) or not can_be_read_again(folder):
            return
        tidy(folder)
    except (OSError, RunError, RuntimeError) as error:  # RuntimeError: no home folder is known
        logger.debug("Compiled programs are not cached: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # Small programs take half a second together.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    # A full disk or a damaged file only costs a compilation; do not warn for every program.
    warnings.filterwarnings("ignore", "Error (read|writ)ing persistent compilation cache entry")


def kind_of_machine() -> str:
    """The name of the folder for programs of this jaxlib on machines like this one. A program is
    compiled for the instructions and the cores of a CPU. The backend is part of the name too, since
    programs of an accelerator may be loadable where programs of the CPU are not."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = [os.environ.get(name, "") for name in ("NPROC", "PJRT_NPROC")]
    facts = [jax.default_backend(), platform.machine(), sys.platform]
    text = "\n".join([*facts, *processor(), str(cores), *threads])
    return f"jaxlib-{jaxlib.version.__version__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def processor() -> list[str]:
    """Lines that identify the model and the features of the first CPU."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = list(islice(takewhile(str.strip, file), 100))  # up to the second CPU
    except OSError:
        return [platform.processor()]
    keys = ("vendor_id", "cpu family", "model", "stepping", "flags", "features")
    keys += ("cpu implementer", "cpu part")
    return [line for line in lines if line.split(":")[0].strip().lower().startswith(keys)]


def can_be_read_again(folder: Path) -> bool:
    """Whether XLA can load its own programs here, tested once with a small program. On some CPUs it
    prints a complaint for each program, or refuses it (JAX issue 38445)."""
    verdict = folder / VERDICT
    if not verdict.exists():
        atomic_write(verdict, str(reads_back()).encode())
    return verdict.read_text(encoding="utf-8") == str(True)


def reads_back() -> bool:
    """Whether a small program can be saved and loaded with nothing printed to stderr."""
    from jax.experimental.serialize_executable import deserialize_and_load, serialize

    if jax.default_backend() != "cpu":  # accelerators do not have this problem
        return True
    compiled = jax.jit(lambda x: x + 1).lower(0.0).compile()
    with stderr_into_file() as printed:
        try:
            deserialize_and_load(*serialize(compiled))
        except Exception:  # of any kind: programs cannot be loaded, so there is no use in a cache
            return False
        return printed.seek(0, os.SEEK_END) == 0


@contextmanager
def stderr_into_file() -> Iterator[IO[bytes]]:
    """Redirect stderr, also that of C++ code, into a temporary file."""
    if sys.stderr:
        sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(before, 2)
            os.close(before)


def tidy(folder: Path) -> None:
    """Remove damaged files, which a process that ends while writing leaves behind. If all programs
    together take too much room, also remove the ones that were not used for the longest time."""
    verdict = folder / VERDICT
    last = verdict.stat().st_mtime
    os.utime(verdict)
    entries = []
    for path in folder.parent.glob("*/*-cache"):
        with suppress(FileNotFoundError):  # another process may have removed it
            stat = path.stat()
            if path.parent == folder and stat.st_mtime >= last and is_damaged(path):
                path.unlink()
            else:
                entries.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    size = sum(entry[1] for entry in entries)
    room = size if size <= ROOM else ROOM // 2  # so that this is not needed at each start
    for _, bytes_, path in sorted(entries):
        if size <= room:
            break
        path.unlink(missing_ok=True)
        size -= bytes_


def is_damaged(path: Path) -> bool:
    """Whether a program cannot be unpacked; JAX would compile it each time and never replace it."""
    data = path.read_bytes()
    try:
        if data.startswith(ZSTANDARD):
            import zstandard  # JAX uses it if it is installed

            zstandard.ZstdDecompressor().decompress(data)
        else:
            zlib.decompress(data)
    except Exception:  # damaged, or zstandard is no longer installed
        return True
    return False
