"""How long starting takes: checking a config against importing jax alone, and a run until its first
step, in a first and a second start. Whole processes, taking turns.

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
NO_CACHE = "first start, no cache"
NO_CACHE_VARIABLES = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
STARTS = {"second start": {}, "first start": {}, NO_CACHE: NO_CACHE_VARIABLES}
FIRST_STEP = "Epoch 1 [1/"  # the beginning of the line that logs the first step's loss


def main(rounds=15):
    check_against_import(rounds)
    second_against_first(max(3, rounds // 3))


def check_against_import(rounds):
    """The time to find a mistake in a config."""
    seconds = {name: [] for name in CHECKS}
    for i in range(rounds + 1):
        for name, command in CHECKS.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if i > 0:  # the first round reads the files from disk
                seconds[name].append(time.perf_counter() - start)
    record("Startup", "python -m benchmarks.startup", "\n".join(table("process", seconds)))


def second_against_first(rounds):
    """The sample from the start of its process to its first step, before and after its compiled
    programs are in the user's cache."""
    seconds = {name: [] for name in STARTS}
    for i in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            link_digits(Path(folder) / "rawtree")
            for name in reversed(STARTS):
                duration = to_first_step(folder, STARTS[name])
                if i > 0:  # the first round may draw the digits
                    seconds[name].append(duration)
    rows = [f"| {NO_CACHE} | {spread(seconds.pop(NO_CACHE))} |"]
    lines = table("to the first step", seconds) + rows
    record("Second start", "python -m benchmarks.startup", "\n".join(lines))


def to_first_step(folder, variables):
    """Seconds from the start of a process, with `folder` as its cache folder, until it logs its
    first step."""
    caches = ("JAX_COMPILATION", "JAX_PERSISTENT")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(caches)}
    environment |= {"XDG_CACHE_HOME": folder, "PYTHONUNBUFFERED": "1"} | variables
    command = [sys.executable, "train.py", "-c", "config.json"]
    command += [f"checkpoint.dir={folder}/saved", "logging.every_steps=1"]
    command += [f"data.args.dir={os.environ['MNIST_DIR']}"] if "MNIST_DIR" in os.environ else []
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout:
            if FIRST_STEP in line:
                return time.perf_counter() - start
        raise RuntimeError(f"train.py logged no first step; exit code {process.wait()}")
    finally:
        process.kill()
        process.wait()


def link_digits(folder):
    """Link the user's cached digits, which stand in for MNIST, into a new cache folder without
    compiled programs."""
    folder.mkdir()
    for path in user_cache().glob("digits-*.npz"):
        (folder / path.name).symlink_to(path)


def table(title, seconds):
    """The lines of a table of two measurements and the ratio of the first to the second."""
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    rows = [f"| {name} | {spread(values)} |" for name, values in seconds.items()]
    head = [f"| {title} | seconds, median (range) |", "|---|---|"]
    return [*head, *rows, f"| ratio, pair by pair | {spread(ratios)} |"]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
