"""Seconds from the start of a process until an accuracy on MNIST's test set is reached.

Rawtree runs as a user starts it, the other frameworks by the recipe of the same config, evaluated
after every epoch; each runs in a process of its own, one at a time, all with huge pages.

python -m benchmarks.time_to_accuracy --data DIR [--peers flax,equinox,...] [--rounds 3]
needs training/requirements.txt and benchmarks/requirements.txt; DIR holds mnist/
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np

from benchmarks.recipes import NO_MUON, RECIPES, recipe_of
from benchmarks.results import markdown, record, spread
from benchmarks.serving import HUGE_PAGES, PeerError
from benchmarks.targets import OURS, result_cells
from benchmarks.training import NAMES, print_progress, versions
from benchmarks.workloads import Workload, data_for
from utils import UserError, first_line

ROOT = Path(__file__).parents[1]
LEVELS = (0.97, 0.98, 0.99)
FIRST, LATER = f"{OURS}, first start", f"{OURS}, later start"
MOST_SECONDS, MOST_RATIO = 20, 0.4  # to the last level, and relative to the fastest peer
LIMIT = 60  # seconds, after which a framework is stopped and takes no further turn
VARIANTS = ("", "eager", "compile", "compile channels_last")  # not "channels_last" alone
PAUSE = 0.01  # seconds between two readings of metrics.jsonl
NOTES = f"""\
The recipes are `configs/mnist_fast.json`, which trains with Muon, and \
`benchmarks/mnist_adamw.json`, the fastest recipe found without Muon; both were chosen by the \
accuracy that Rawtree reaches on this test set. Keras runs only the recipe without Muon; PyTorch's \
Muon accepts only matrices, so AdamW updates its convolution kernels. Median \
(smallest - largest) over the rounds, each with a different order of the images; a framework that \
has not reached the last level after {LIMIT} s is stopped and takes no further turn. A first start \
finds no compiled programs of an earlier run, a later start does. `train.py` enables huge pages \
by itself, and the time of restarting itself for this is included; the others get them from \
`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`. Ratios are computed round by round."""


def main():
    args, turns = arguments(), {}
    peers = [
        (peer, variant) for peer in args.peers for variant in VARIANTS if variant in NAMES[peer]
    ]
    for suffix, file in RECIPES.items():
        try:
            recipe = recipe_of(file)
        except UserError as error:
            sys.exit(str(error))
        turns[OURS + suffix] = partial(time_ours, suffix, file, args.data)
        for peer, variant in peers:
            name = NAMES[peer][variant] + suffix
            if recipe["workload"]["optimizer"] != "muon" or peer not in NO_MUON:
                turns[name] = partial(time_peer, name, (peer, variant), recipe, args.data)
    results = compare(turns, args.rounds)
    record("Time to accuracy", "python -m benchmarks.time_to_accuracy", section(*results))


def arguments():
    peers = [name for name in NAMES if name != "ours"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=lambda text: text.split(","), default=peers)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", required=True, help="the folder that holds mnist/")
    args = parser.parse_args()
    if unknown := [peer for peer in args.peers if peer not in peers]:
        parser.error(f"--peers: no {', '.join(unknown)}; there are {', '.join(peers)}")
    args.data = str(Path(args.data).resolve())
    return args


def compare(turns, rounds):
    """({name: {level: seconds in each round}}, {name: why it was not measured}), taking turns."""
    results, missing = {}, {}
    for i in range(rounds):
        for name in list(turns)[:: -1 if i % 2 else 1]:
            print_progress(f"round {i + 1} of {rounds}: {name}")
            start = time.perf_counter()
            try:
                reached = turns[name](i)
            except PeerError as error:
                if name.startswith(OURS):  # there is nothing left to compare with
                    raise SystemExit(f"{name}: {error}") from error
                missing[name] = str(error)
                del turns[name]
                results.pop(name, None)
                continue
            for label, levels in reached.items():
                for level, seconds in levels.items():
                    results.setdefault(label, {}).setdefault(level, []).append(seconds)
            if not name.startswith(OURS) and time.perf_counter() - start >= LIMIT:
                del turns[name]
    return results, missing


def time_ours(suffix, config, data, seed):
    """{label: {level: seconds}} of a first and a later `train.py` with one new program cache."""
    results = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = without_huge_pages() | {"XDG_CACHE_HOME": cache}
        for start in (FIRST, LATER):
            with tempfile.TemporaryDirectory() as saved:
                overrides = [f"data.args.dir={data}", f"checkpoint.dir={saved}", f"seed={seed}"]
                command = [sys.executable, str(ROOT / "train.py"), "-c", str(config), *overrides]
                results[start + suffix] = timed(command, environment, partial(from_log, saved))
    return results


def time_peer(name, form, recipe, data, seed):
    """{name: {level: seconds}} of another framework."""
    command = [sys.executable, "-m", "benchmarks.time_to_accuracy", "--serve"]
    command += [*form, json.dumps(recipe), data, str(seed)]
    return {name: timed(command, without_huge_pages() | HUGE_PAGES, from_pipe)}


def without_huge_pages():
    unwanted = (*HUGE_PAGES, "RAWTREE_HUGE_PAGES")
    return {name: value for name, value in os.environ.items() if name not in unwanted}


def timed(command, environment, accuracies):
    """{level: seconds from the start of the process until it is reached, or inf}."""
    reached = dict.fromkeys(LEVELS, math.inf)
    start = time.perf_counter()
    stdout = subprocess.PIPE if accuracies is from_pipe else subprocess.DEVNULL
    pipes = {"stdout": stdout, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes, text=True, env=environment, cwd=ROOT) as process:
        alarm = threading.Timer(LIMIT, process.terminate)
        alarm.start()
        try:
            for accuracy in accuracies(process):
                seconds = time.perf_counter() - start
                reached |= {
                    level: min(reached[level], seconds) for level in LEVELS if accuracy >= level
                }
                if reached[LEVELS[-1]] < math.inf:
                    break
        except PeerError:
            if time.perf_counter() - start < LIMIT:
                raise
        finally:
            alarm.cancel()
            process.terminate()
    return reached


def from_pipe(process):
    """The accuracies that a served framework writes; a string is an error."""
    for line in process.stdout:
        response = json.loads(line)
        if isinstance(response, str):
            raise PeerError(response)
        yield response
    if process.wait():
        raise PeerError(f"it ended with exit code {process.returncode}")


def from_log(saved, process):
    """The accuracies that appear in metrics.jsonl."""
    yielded = 0
    while True:
        # Checked before reading, so that everything written before the end is read.
        ended = process.poll() is not None
        rows = [
            json.loads(line)
            for file in Path(saved).glob("*/*/metrics.jsonl")
            for line in complete_lines(file)
        ]
        logged = [row["test_accuracy"] for row in rows if "test_accuracy" in row]
        yield from logged[yielded:]
        yielded = len(logged)
        if ended:
            break
        time.sleep(PAUSE)
    if process.returncode:
        raise PeerError(f"train.py ended with exit code {process.returncode}")


def complete_lines(file):
    """The lines of a file that are already written to their end."""
    return [
        line
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n")
    ]


def serve(peer, variant, recipe, dir, seed):
    """Train by the recipe and write the accuracy after each epoch as a line of JSON; a string is
    an error."""
    responses = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a framework prints must not mix with the responses
    try:
        recipe = json.loads(recipe)
        workload = Workload(**recipe["workload"])
        mean, std = np.float32(recipe["mean"]), np.float32(recipe["std"])
        data = {name: ((x - mean) / std, y) for name, (x, y) in data_for(workload, dir).items()}
        trainer = import_module(f"benchmarks.peers.{peer}").trainer(workload, data, variant)
        for epoch in range(workload.epochs):
            trainer.epoch(int(seed) * workload.epochs + epoch)
            responses.write(f"{trainer.accuracy()}\n")
    except Exception as error:  # each framework raises errors of its own
        responses.write(f"{json.dumps(f'{type(error).__name__}: {first_line(error)}')}\n")
        raise


def section(results, missing):
    """The section of RESULTS.md."""
    tables = seconds_table(results, missing), targets_table(results)
    return "\n\n".join([*tables, f"{NOTES} {versions()}."])


def seconds_table(results, missing):
    rows = [[name, *map(seconds_cell, levels.values())] for name, levels in results.items()]
    rows += [[name, f"none: {why}", *[""] * (len(LEVELS) - 1)] for name, why in missing.items()]
    return markdown(["", *(f"{100 * level:g} %, s" for level in LEVELS)], rows)


def seconds_cell(values):
    """Their spread, if most runs reached the level."""
    return spread(values) if statistics.median(values) < math.inf else "not reached"


def targets_table(results):
    """The targets at the last level, and whether they are reached."""
    rows = []
    for label in (FIRST, LATER):
        median, ratio = statistics.median(results[label][LEVELS[-1]]), best_ratio(results, label)
        for quantity, value, at_most in (
            ("s to", median, MOST_SECONDS),
            ("s / the best other's to", ratio, MOST_RATIO),
        ):
            cells = result_cells([value], [value is not None and value <= at_most])
            target = f"{label}: {quantity} {100 * LEVELS[-1]:g} %"
            rows.append([target, f"at most {at_most}", *cells])
    return markdown(["target", "", "measured", "reached"], rows)


def best_ratio(results, label):
    """Our seconds over those of the fastest peer; None if no peer reaches the last level."""
    peers = [levels[LEVELS[-1]] for name, levels in results.items() if not name.startswith(OURS)]
    best = min(peers, key=statistics.median, default=[math.inf])
    if statistics.median(best) == math.inf:
        return None
    return statistics.median(a / b for a, b in zip(results[label][LEVELS[-1]], best, strict=False))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        main()
