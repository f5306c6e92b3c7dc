"""How long a check takes, against importing jax alone: whole processes, taking turns.

python -m benchmarks.startup [rounds]
"""

import statistics
import subprocess
import sys
import time

from benchmarks.results import record, spread

COMMANDS = {
    "train.py -c config.json --check": [sys.executable, "train.py", "-c", "config.json", "--check"],
    "import jax": [sys.executable, "-c", "import jax"],
}


def main(rounds=15):
    seconds = {name: [] for name in COMMANDS}
    for i in range(rounds + 1):
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if i > 0:  # the first reads the files from disk
                seconds[name].append(time.perf_counter() - start)
    check, bare = seconds.values()
    ratios = [a / b for a, b in zip(check, bare, strict=True)]
    rows = [f"| {name} | {spread(values)} |" for name, values in seconds.items()]
    table = ["| process | seconds, median (range) |", "|---|---|", *rows, f"| ratio, pair by pair | {spread(ratios)} |"]
    record("Startup", "python -m benchmarks.startup", "\n".join(table))
    return statistics.median(ratios)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
