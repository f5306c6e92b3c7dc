"""How long starting takes: checking a config against importing jax alone, and a run until its first
step, in a first and a second start. Whole processes, taking turns.

python -m benchmarks.startup [--rounds 15]
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, Run, seconds, take_turns
from benchmarks.results import arguments, markdown, ratios, record, spread
from utils import user_cache

CHECKS = {
    "train.py -c config.json --check": ["train.py", "-c", "config.json", "--check"],
    "import jax": ["-c", "import jax"],
}
FIRST, SECOND, NO_CACHE = "first start", "second start", "first start, no cache"
FIRST_STEP = "Epoch 1 [1/"  # the beginning of the line that logs the first step's loss


def main():
    args = arguments("startup", __doc__, rounds=15)
    run = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    calls = {
        name: partial(seconds, run, [sys.executable, *words]) for name, words in CHECKS.items()
    }
    record(args, "Startup", table("process", take_turns(calls, args.rounds)))
    record(args, "Second start", table("to the first step", starts(-(-args.rounds // 3))))


def starts(rounds):
    """{start: seconds of the sample until its first step}: without a cache of compiled programs,
    with an empty one, and with the one that the start before has filled."""
    results = {SECOND: [], FIRST: [], NO_CACHE: []}
    options = [*of_mnist(), "logging.every_steps=1"]
    for i in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            link_digits(Path(folder) / "rawtree")
            for name in reversed(results):
                variables = {"JAX_ENABLE_COMPILATION_CACHE": "false"} if name == NO_CACHE else {}
                run = Run(folder, "config.json", *options, cache=folder, variables=variables)
                duration = run.seconds_to(FIRST_STEP)
                if i > 0:  # the first round may draw the digits
                    results[name].append(duration)
    return results


def of_mnist():
    """The override for the folder of MNIST, if the environment names one."""
    return [f"data.args.dir={os.environ['MNIST_DIR']}"] if "MNIST_DIR" in os.environ else []


def link_digits(folder):
    """Link the user's cached digits, which stand in for MNIST, into a new cache folder without
    compiled programs."""
    folder.mkdir()
    for path in user_cache().glob("digits-*.npz"):
        (folder / path.name).symlink_to(path)


def table(title, results):
    """A table of measurements, and the ratio of the first to the second."""
    rows = [[name, spread(values)] for name, values in results.items()]
    first, second, *_ = results.values()
    rows.insert(2, ["ratio, pair by pair", spread(ratios(first, second))])
    return markdown([title, "seconds, median (range)"], rows)


if __name__ == "__main__":
    main()
