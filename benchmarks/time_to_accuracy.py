"""Seconds from the start of a process to an accuracy on MNIST's test set: ours as a user runs it, other frameworks by the recipe
of the same config, looked at after every epoch; each in a process of its own, one at a time, all with huge pages.

python -m benchmarks.time_to_accuracy --data DIR [--peers flax,equinox,haiku,keras,torch] [--rounds 3]
needs requirements.txt and benchmarks/requirements.txt; DIR holds mnist/
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

from benchmarks.marks import OURS, verdicts
from benchmarks.recipes import NO_MUON, RECIPES, recipe_of
from benchmarks.results import markdown, record, spread
from benchmarks.serving import HUGE_PAGES, Failed
from benchmarks.training import NAMES, say, versions
from benchmarks.workloads import Workload, data_for
from utils import UserError, first_line

ROOT = Path(__file__).parents[1]
LEVELS = (0.97, 0.98, 0.99)
FIRST, LATER = f"{OURS}, first start", f"{OURS}, later start"
MOST_SECONDS, MOST_SHARE = 20, 0.4  # to the last level; of what the best peer takes
LIMIT = 60  # seconds: a framework that has not come to the last level by then is stopped, and takes no further turn
VARIANTS = (
    "",
    "eager",
    "compile",
    "compile channels_last",
)  # all but PyTorch's plain form in another layout
PAUSE = 0.01  # seconds between two looks at metrics.jsonl
NOTES = (
    "By `configs/mnist_fast.json`, which trains by Muon, and by `benchmarks/mnist_adamw.json`, the fastest recipe found "
    "without it; both were chosen by their accuracy on this test set, by ours. Keras takes part in the latter alone; "
    "PyTorch's Muon takes nothing but matrices, so there kernels of convolutions are AdamW's. Median (smallest - largest) "
    f"over the rounds, each in another order of the images; a framework that has not come to the last level after {LIMIT} s "
    "is stopped, and takes no further turn. A first start finds no compiled programs of an earlier run, a later start does."
    " `train.py` takes huge pages by itself, its second start included; the others are given them by "
    "`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`. Ratios are taken round by round."
)


def main():
    args, turns = arguments(), {}
    forms = [
        (peer, variant) for peer in args.peers for variant in VARIANTS if variant in NAMES[peer]
    ]
    for suffix, file in RECIPES.items():
        try:
            recipe = recipe_of(file)
        except UserError as error:
            sys.exit(str(error))
        turns[OURS + suffix] = partial(ours, suffix, file, args.data)
        for peer, variant in forms:
            name = NAMES[peer][variant] + suffix
            if recipe["workload"]["optimizer"] != "muon" or peer not in NO_MUON:
                turns[name] = partial(another, name, (peer, variant), recipe, args.data)
    record(
        "Time to accuracy",
        "python -m benchmarks.time_to_accuracy",
        section(*compare(turns, args.rounds)),
    )


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peers",
        type=lambda text: text.split(","),
        default=[name for name in NAMES if name != "ours"],
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", required=True, help="the folder that holds mnist/")
    args = parser.parse_args()
    if unknown := [peer for peer in args.peers if peer not in NAMES or peer == "ours"]:
        parser.error(
            f"--peers: no {', '.join(unknown)}; there are {', '.join(name for name in NAMES if name != 'ours')}"
        )
    args.data = str(Path(args.data).resolve())
    return args


def compare(turns, rounds):
    """({name: {level: seconds in each round}}, {name: why there are none}), all taking turns."""
    found, missing = {}, {}
    for i in range(rounds):
        for name in list(turns)[:: -1 if i % 2 else 1]:
            say(f"round {i + 1} of {rounds}: {name}")
            began = time.perf_counter()
            try:
                reached = turns[name](i)
            except Failed as error:
                if name.startswith(OURS):
                    raise SystemExit(
                        f"{name}: {error}"
                    ) from error  # there is nothing to compare with
                missing[name] = str(error)
                del turns[name]
                found.pop(name, None)
                continue
            for form, levels in reached.items():
                for level, seconds in levels.items():
                    found.setdefault(form, {}).setdefault(level, []).append(seconds)
            if not name.startswith(OURS) and time.perf_counter() - began >= LIMIT:
                del turns[name]
    return found, missing


def ours(suffix, config, data, seed):
    """{form: {level: seconds}} of `train.py`, twice, with a cache folder of its own for compiled programs."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for form in (FIRST, LATER):
            with tempfile.TemporaryDirectory() as saved:
                overrides = [f"data.args.dir={data}", f"checkpoint.dir={saved}", f"seed={seed}"]
                command = [sys.executable, str(ROOT / "train.py"), "-c", str(config), *overrides]
                found[form + suffix] = timed(
                    command,
                    without_huge_pages() | {"XDG_CACHE_HOME": cache},
                    partial(from_log, saved),
                )
    return found


def another(name, form, recipe, data, seed):
    """{name: {level: seconds}} of another framework."""
    peer, variant = form
    command = [
        sys.executable,
        "-m",
        "benchmarks.time_to_accuracy",
        "--serve",
        peer,
        variant,
        json.dumps(recipe),
        data,
        str(seed),
    ]
    return {name: timed(command, without_huge_pages() | HUGE_PAGES, from_pipe)}


def without_huge_pages():
    return {
        name: value
        for name, value in os.environ.items()
        if name not in (*HUGE_PAGES, "RAWTREE_HUGE_PAGES")
    }


def timed(command, environment, accuracies):
    """{level: seconds from the start of the process until it is reached, or inf}."""
    found = dict.fromkeys(LEVELS, math.inf)
    began = time.perf_counter()
    pipes = {
        "stdout": subprocess.PIPE if accuracies is from_pipe else subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
    }
    with subprocess.Popen(command, **pipes, text=True, env=environment, cwd=ROOT) as process:
        alarm = threading.Timer(LIMIT, process.terminate)
        alarm.start()
        try:
            for accuracy in accuracies(process):
                seconds = time.perf_counter() - began
                found |= {
                    level: min(found[level], seconds) for level in LEVELS if accuracy >= level
                }
                if found[LEVELS[-1]] < math.inf:
                    break
        except Failed:
            if time.perf_counter() - began < LIMIT:
                raise
        finally:
            alarm.cancel()
            process.terminate()
    return found


def from_pipe(process):
    """The accuracies that a served framework tells; a string is an error."""
    for line in process.stdout:
        answer = json.loads(line)
        if isinstance(answer, str):
            raise Failed(answer)
        yield answer
    if process.wait():
        raise Failed(f"it ended with exit code {process.returncode}")


def from_log(saved, process):
    """The accuracies as metrics.jsonl shows them."""
    told = 0
    while True:
        ended = process.poll() is not None  # looked at first: what it wrote before is seen then
        rows = [
            json.loads(line)
            for file in Path(saved).glob("*/*/metrics.jsonl")
            for line in whole_lines(file)
        ]
        shown = [row["test_accuracy"] for row in rows if "test_accuracy" in row]
        yield from shown[told:]
        told = len(shown)
        if ended:
            break
        time.sleep(PAUSE)
    if process.returncode:
        raise Failed(f"train.py ended with exit code {process.returncode}")


def whole_lines(file):
    """The lines of a file that are written to their end."""
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def serve(peer, variant, recipe, dir, seed):
    """Train by the recipe, and tell the accuracy after each epoch, as a line of JSON; a string is an error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a framework prints is no answer
    try:
        recipe = json.loads(recipe)
        workload = Workload(**recipe["workload"])
        mean, std = np.float32(recipe["mean"]), np.float32(recipe["std"])
        data = {name: ((x - mean) / std, y) for name, (x, y) in data_for(workload, dir).items()}
        trainer = import_module(f"benchmarks.peers.{peer}").trainer(workload, data, variant)
        for epoch in range(workload.epochs):
            trainer.epoch(int(seed) * workload.epochs + epoch)
            answers.write(f"{trainer.accuracy()}\n")
    except Exception as error:  # the frameworks' own, of many kinds
        answers.write(f"{json.dumps(f'{type(error).__name__}: {first_line(error)}')}\n")
        raise


def section(found, missing):
    """What RESULTS.md tells."""
    return "\n\n".join(
        [seconds_table(found, missing), marks_table(found), f"{NOTES} {versions()}."]
    )


def seconds_table(found, missing):
    rows = [[name, *map(seconds, levels.values())] for name, levels in found.items()]
    rows += [[name, f"none: {why}", *[""] * (len(LEVELS) - 1)] for name, why in missing.items()]
    return markdown(["", *(f"{100 * level:g} %, s" for level in LEVELS)], rows)


def seconds(values):
    """As `spread`, where most runs reached the level."""
    return spread(values) if statistics.median(values) < math.inf else "not reached"


def marks_table(found):
    """What must be reached at the last level."""
    rows = []
    for form in (FIRST, LATER):
        taken, share = statistics.median(found[form][LEVELS[-1]]), share_of_best(found, form)
        for what, value, most in (
            ("s to", taken, MOST_SECONDS),
            ("s / the best other's to", share, MOST_SHARE),
        ):
            held = value is not None and value <= most
            rows.append(
                [
                    f"{form}: {what} {100 * LEVELS[-1]:g} %",
                    f"at most {most}",
                    *verdicts([value], [held]),
                ]
            )
    return markdown(["what it must reach", "", "found", "reached"], rows)


def share_of_best(found, form):
    """Our seconds over those of the fastest other framework; None where no other reaches the last level."""
    others = [levels[LEVELS[-1]] for name, levels in found.items() if not name.startswith(OURS)]
    best = min(others, key=statistics.median, default=[math.inf])
    if statistics.median(best) == math.inf:
        return None
    return statistics.median(a / b for a, b in zip(found[form][LEVELS[-1]], best, strict=False))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        main()
