"""Compiled programs, kept for the next run in the user's cache folder: JAX keeps them, this says where, and for how long.

JAX's own variables come first: JAX_COMPILATION_CACHE_DIR names another folder, JAX_ENABLE_COMPILATION_CACHE=false keeps nothing.
"""

import hashlib
import logging
import os
import platform
import sys
import tempfile
import warnings
import zlib
from contextlib import contextmanager, suppress
from itertools import islice, takewhile

import jax
import jaxlib

from utils import RunError, atomic_write, user_cache

ROOM = 512 * 2**20  # bytes for all programs; the sample's take 0.6 MiB
ZSTANDARD = b"\x28\xb5\x2f\xfd"  # how its files begin
VERDICT = "usable"  # the file that tells whether programs can be read again here

logger = logging.getLogger("main")


def keep_programs():
    """Take compiled programs from the user's cache folder and leave them there; where that cannot be, compile as ever."""
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return
    try:
        folder = user_cache() / "programs" / kind_of_machine()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK | os.X_OK) and can_be_read_again(folder)
        if usable:
            tidy(folder)
    except (
        OSError,
        RunError,
        RuntimeError,
    ) as error:  # the last where nobody knows the user's home
        logger.debug("Compiled programs are not kept: %s", error)
        return
    if usable:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update(
                "jax_persistent_cache_min_compile_time_secs", 0
            )  # the small ones are half a second together
        # A full disk or a damaged file costs a compilation, and is nothing to tell of for every program.
        warnings.filterwarnings("ignore", "Error (read|writ)ing persistent compilation cache entry")


def kind_of_machine():
    """The folder for programs of this jaxlib on machines like this one: a program is made for a CPU's instructions and cores, and
    whether those of an accelerator can be read again says nothing of the CPU's."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = [os.environ.get(name, "") for name in ("NPROC", "PJRT_NPROC")]
    told = "\n".join(
        [
            jax.default_backend(),
            platform.machine(),
            sys.platform,
            *processor(),
            str(cores),
            *threads,
        ]
    )
    return f"jaxlib-{jaxlib.__version__}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def processor():
    """What tells the first CPU from others: its model and its flags."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = list(islice(takewhile(str.strip, file), 100))  # up to the second CPU
    except OSError:
        return [platform.processor()]
    telling = (
        "vendor_id",
        "cpu family",
        "model",
        "stepping",
        "flags",
        "features",
        "cpu implementer",
        "cpu part",
    )
    return [line for line in lines if line.split(":")[0].strip().lower().startswith(telling)]


def can_be_read_again(folder):
    """Whether XLA takes back what it made; on some CPUs it complains of each program, or refuses it (jax issue 38445). This is
    tried once, with a small program."""
    verdict = folder / VERDICT
    if not verdict.exists():
        atomic_write(verdict, str(reads_back()).encode())
    return verdict.read_text() == str(True)


def reads_back():
    """Whether a small program can be written and read without a word on stderr; accelerators have no such trouble."""
    from jax.experimental.serialize_executable import deserialize_and_load, serialize

    if jax.default_backend() != "cpu":
        return True
    compiled = jax.jit(lambda x: x + 1).lower(0.0).compile()
    with stderr_into_file() as said:
        try:
            deserialize_and_load(*serialize(compiled))
        except Exception:  # of whatever kind: then there is no use in keeping any
            return False
        return said.seek(0, os.SEEK_END) == 0


@contextmanager
def stderr_into_file():
    """The file that takes what is written to stderr meanwhile, by C++ as well."""
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(before, 2)
            os.close(before)


def tidy(folder):
    """Remove what the end of a process left half written since the last time, and the programs that were not used for longest
    where all together need too much room."""
    verdict = folder / VERDICT
    last = verdict.stat().st_mtime
    os.utime(verdict)
    entries = []
    for path in folder.parent.glob("*/*-cache"):
        with suppress(FileNotFoundError):  # another process tidies as well
            stat = path.stat()
            if path.parent == folder and stat.st_mtime >= last and is_damaged(path):
                path.unlink()
            else:
                entries.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    size = sum(entry[1] for entry in entries)
    room = size if size <= ROOM else ROOM // 2  # not a little at each start
    for _, taken, path in sorted(entries):
        if size <= room:
            break
        path.unlink(missing_ok=True)
        size -= taken


def is_damaged(path):
    """Whether a program cannot be unpacked; JAX would compile it again at each start, and never write it anew."""
    data = path.read_bytes()
    try:
        if data.startswith(ZSTANDARD):
            import zstandard  # JAX takes it where it is installed

            zstandard.ZstdDecompressor().decompress(data)
        else:
            zlib.decompress(data)
    except Exception:  # of either, or there is no zstandard any more
        return True
    return False
