"""Seconds from the start of a process until an accuracy on MNIST's test set is reached.

Rawtree runs as a user starts it, by its fastest config and by one without Muon; the other
frameworks run the recipe of the latter and are evaluated after every epoch. Each runs in a process
of its own, one at a time, all with huge pages.

python -m benchmarks.time_to_accuracy --data DIR [--peers flax,equinox,...] [--rounds 3]
needs training/requirements.txt and benchmarks/requirements.txt; DIR holds mnist/
"""

import json
import math
import re
import statistics
import sys
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, Run, Worker, WorkerError, print_progress
from benchmarks.results import arguments, markdown, ratios, record, spread, target_cells, versions
from benchmarks.training import NAMES, OURS, PACKAGES
from benchmarks.workloads import IMAGE, Workload

RECIPE = "benchmarks/mnist_adamw.json"
CONFIGS = {"": "configs/mnist_fast.json", ", AdamW": RECIPE}
LEVELS = (0.97, 0.98, 0.99)
FIRST, LATER = f"{OURS}, first start", f"{OURS}, later start"
MOST_SECONDS, MOST_RATIO = 20, 0.4  # to the last level, and relative to the fastest peer
LIMIT = 60  # seconds, after which a framework is stopped and takes no further turn
NOTES = f"""\
The recipes are `configs/mnist_fast.json`, which trains with Muon, and \
`benchmarks/mnist_adamw.json`, the fastest recipe found without Muon; both were chosen by the \
accuracy that Rawtree reaches on this test set. The other frameworks run the recipe without Muon. \
When both were measured, PyTorch, the fastest of them, reached 99 % later with Muon (14.2 s \
instead of 12.8 s); Equinox and Haiku reached it earlier with Muon (after 40.5 s and 38.8 s). \
Median (smallest - largest) over the rounds, each with a different order of the images; a \
framework that has not reached the last level after {LIMIT} s is stopped and takes no further \
turn. A first start finds no compiled programs of an earlier run, a later start does. `train.py` \
enables huge pages by itself, and the time of restarting itself for this is included; the others \
get them from `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`. Ratios are computed round by round."""
# The keys of a recipe's config; the values of some must be these.
KEYS = {"$schema", "title", "model", "data", "loader", "preprocess", "loss", "metrics"}
KEYS |= {"optimizer", "schedule", "training", "checkpoint"}
FIXED = {"loss": "cross_entropy", "schedule": "warmup_linear", "optimizer": "adamw"}


def recipe_of(file):
    """The Workload of a config; one that the peers cannot follow is an error."""
    config = json.loads((ROOT / file).read_text(encoding="utf-8"))
    names = {key: config[key]["name"] for key in FIXED}
    args = {key: config[key]["args"] for key in FIXED}
    to_unit, normalize = config["preprocess"]
    epochs = config["training"]["epochs"]
    follows = config.keys() <= KEYS and names == FIXED and to_unit == "to_unit"
    if not follows or config["training"] != {"epochs": epochs}:
        raise ValueError(
            f"{file}: has a setting that the other frameworks' recipe does not express"
        )
    return Workload(
        model=config["model"]["name"],
        args=config["model"]["args"],
        shape=IMAGE,
        batch_size=config["loader"]["batch_size"],
        epochs=epochs,
        schedule="one_cycle",
        warmup=args["schedule"]["warmup_epochs"] / epochs,
        mean=normalize["args"]["mean"][0],
        std=normalize["args"]["std"][0],
        **args["optimizer"],
        **args["loss"],
    )


def main():
    args = arguments("time_to_accuracy", __doc__, peers=list(NAMES), rounds=3, data=None)
    if not args.data:
        sys.exit("--data DIR: the folder that holds mnist/")
    folder, recipe = str(Path(args.data).resolve()), recipe_of(RECIPE)
    turns = {
        OURS + suffix: partial(ours, suffix, config, folder) for suffix, config in CONFIGS.items()
    }
    for peer in args.peers:
        for variant, name in NAMES[peer].items():
            if variant != "channels_last":
                turns[name] = partial(theirs, name, peer, variant, recipe, folder)
    results, missing = compare(turns, args.rounds)
    tables = seconds_table(results, missing), targets_table(results)
    record(args, "Time to accuracy", *tables, f"{NOTES} {versions(*PACKAGES)}.")


def compare(turns, rounds):
    """({name: {level: seconds in each round}}, {name: why it was not measured}), taking turns."""
    results, missing = {}, {}
    for i in range(rounds):
        for name in list(turns)[:: -1 if i % 2 else 1]:
            print_progress(f"round {i + 1} of {rounds}: {name}")
            start = time.perf_counter()
            try:
                reached = turns[name](i)
            except WorkerError as error:
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


def reached_by(accuracies):
    """{level: seconds until an accuracy reaches it, or inf} of pairs (seconds, accuracy)."""
    reached = dict.fromkeys(LEVELS, math.inf)
    for seconds, accuracy in accuracies:
        reached |= {each: min(reached[each], seconds) for each in LEVELS if accuracy >= each}
        if reached[LEVELS[-1]] < math.inf:
            break
    return reached


def ours(suffix, config, data, seed):
    """{label: {level: seconds}} of a first and a later `train.py` with one new program cache."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for label in (FIRST, LATER):
            run = Run(folder, config, f"data.args.dir={data}", f"seed={seed}", cache=folder)
            with closing(run.lines()) as lines:
                results[label + suffix] = reached_by(logged_accuracies(lines))
    return results


def logged_accuracies(lines):
    for seconds, line in lines:
        if seconds > LIMIT:
            return
        if found := re.search(r"\[test\].* accuracy @ ([\d.]+)", line):
            yield seconds, float(found[1])


def theirs(name, peer, variant, recipe, data, seed):
    """{name: {level: seconds}} of another framework."""
    start, words = time.perf_counter(), (peer, variant, recipe._asdict(), data)

    def accuracies():
        worker = None
        try:
            worker = Worker("benchmarks.training:Training", *words, huge_pages=True, timeout=LIMIT)
            for epoch in range(recipe.epochs):
                worker.timeout = max(1, start + LIMIT - time.perf_counter())
                accuracy = worker.call("accuracy_after_epoch", seed * recipe.epochs + epoch)
                yield time.perf_counter() - start, accuracy
        except WorkerError:
            if time.perf_counter() - start < LIMIT:
                raise
        finally:
            if worker:
                worker.process.kill()

    return {name: reached_by(accuracies())}


def seconds_table(results, missing):
    rows = [[name, *map(seconds_cell, levels.values())] for name, levels in results.items()]
    rows += [[name, f"none: {why}", *[""] * (len(LEVELS) - 1)] for name, why in missing.items()]
    return markdown(["", *(f"{100 * level:g} %, s" for level in LEVELS)], rows)


def seconds_cell(values):
    """Their spread, if most runs reached the level."""
    return spread(values) if statistics.median(values) < math.inf else "not reached"


def targets_table(results):
    """The targets at the last level, and whether they are reached."""
    rows, last = [], LEVELS[-1]
    for label in (FIRST, LATER):
        median = statistics.median(results[label][last])
        for quantity, value, at_most in (
            ("s to", median, MOST_SECONDS),
            ("s / the best other's to", best_ratio(results, label), MOST_RATIO),
        ):
            target = f"{label}: {quantity} {100 * last:g} %"
            rows.append([target, *target_cells(value, at_most)])
    return markdown(["target", "", "measured", "reached"], rows)


def best_ratio(results, label):
    """Our seconds over those of the fastest peer; None if no peer reaches the last level."""
    last = LEVELS[-1]
    peers = [levels[last] for name, levels in results.items() if not name.startswith(OURS)]
    best = min(peers, key=statistics.median, default=[math.inf])
    if statistics.median(best) == math.inf:
        return None
    rounds = min(len(best), len(results[label][last]))
    return statistics.median(ratios(results[label][last][:rounds], best[:rounds]))


if __name__ == "__main__":
    main()
