"""How long starting takes: a check against importing jax alone, and a run to its first step, first and second time. Whole
processes, taking turns.

python -m benchmarks.startup [rounds]
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.results import record, spread
from utils import user_cache

CHECKS = {
    "train.py -c config.json --check": [sys.executable, "train.py", "-c", "config.json", "--check"],
    "import jax": [sys.executable, "-c", "import jax"],
}
WITHOUT = "first start, nothing kept"
STARTS = {"second start": {}, "first start": {}, WITHOUT: {"JAX_ENABLE_COMPILATION_CACHE": "false"}}
FIRST_STEP = "Epoch 1 [1/"  # the line that tells its loss


def main(rounds=15):
    check_against_import(rounds)
    second_against_first(max(3, rounds // 3))


def check_against_import(rounds):
    """What finding a mistake in a config takes."""
    seconds = {name: [] for name in CHECKS}
    for i in range(rounds + 1):
        for name, command in CHECKS.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if i > 0:  # the first reads the files from disk
                seconds[name].append(time.perf_counter() - start)
    record("Startup", "python -m benchmarks.startup", "\n".join(table("process", seconds)))


def second_against_first(rounds):
    """The sample from the start of its process to its first step, before and after its programs lie in the user's cache."""
    seconds = {name: [] for name in STARTS}
    for i in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            lend_digits(Path(folder) / "rawtree")
            for name in reversed(STARTS):
                taken = to_first_step(folder, STARTS[name])
                if i > 0:  # the first may draw the digits
                    seconds[name].append(taken)
    rows = [f"| {WITHOUT} | {spread(seconds.pop(WITHOUT))} |"]
    record(
        "Second start",
        "python -m benchmarks.startup",
        "\n".join(table("to the first step", seconds) + rows),
    )


def to_first_step(folder, settings):
    """Seconds from the start of a process, whose cache folder this is, until the line of its first step."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))
    }
    environment = kept | {"XDG_CACHE_HOME": folder, "PYTHONUNBUFFERED": "1"} | settings
    command = [
        sys.executable,
        "train.py",
        "-c",
        "config.json",
        f"checkpoint.dir={folder}/saved",
        "logging.every_steps=1",
    ]
    command += [f"data.args.dir={os.environ['MNIST_DIR']}"] if "MNIST_DIR" in os.environ else []
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout:
            if FIRST_STEP in line:
                return time.perf_counter() - start
        raise RuntimeError(f"there was no first step; exit code {process.wait()}")
    finally:
        process.kill()
        process.wait()


def lend_digits(folder):
    """Let a cache folder have the user's own digits, which stand in for MNIST, but none of the programs."""
    folder.mkdir()
    for path in user_cache().glob("digits-*.npz"):
        (folder / path.name).symlink_to(path)


def table(title, seconds):
    """The rows of what took turns, and the ratio of the first to the second."""
    one, other = seconds.values()
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    rows = [f"| {name} | {spread(values)} |" for name, values in seconds.items()]
    return [
        f"| {title} | seconds, median (range) |",
        "|---|---|",
        *rows,
        f"| ratio, pair by pair | {spread(ratios)} |",
    ]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
