"""Seconds from the start of a process until an accuracy on MNIST's test set is reached.

Rawtree runs as a user starts it, the other frameworks by the recipe of the same config, evaluated
after every epoch; each runs in a process of its own, one at a time, all with huge pages.

python -m benchmarks.time_to_accuracy --data DIR [--peers flax,equinox,...] [--rounds 3]
needs training/requirements.txt and benchmarks/requirements.txt; DIR holds mnist/
"""

import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.harness import ROOT, Worker, WorkerError, environment, print_progress
from benchmarks.results import arguments, markdown, ratios, record, spread, target_cells, versions
from benchmarks.training import NAMES, OURS, PACKAGES
from benchmarks.workloads import IMAGE, Workload

RECIPES = {"": "configs/mnist_fast.json", ", AdamW": "benchmarks/mnist_adamw.json"}
# Keras' Muon scales the learning rate differently, and excludes other layers than the recipe does.
NO_MUON = ("keras",)
LEVELS = (0.97, 0.98, 0.99)
FIRST, LATER = f"{OURS}, first start", f"{OURS}, later start"
MOST_SECONDS, MOST_RATIO = 20, 0.4  # to the last level, and relative to the fastest peer
LIMIT = 60  # seconds, after which a framework is stopped and takes no further turn
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
# The keys of a recipe's config; the values of some must be these.
KEYS = {"$schema", "title", "model", "data", "loader", "preprocess", "loss", "metrics"}
KEYS |= {"optimizer", "schedule", "training", "checkpoint"}
FIXED = {"loss": "cross_entropy", "schedule": "warmup_linear"}
BY_ADAMW = "head/classes/.*"  # as the peers' Muon


def recipe_of(file):
    """The Workload of a config; one that the peers cannot follow is an error."""
    config = json.loads((ROOT / file).read_text(encoding="utf-8"))
    names = {key: config[key]["name"] for key in (*FIXED, "optimizer")}
    args = {key: dict(config[key]["args"]) for key in ("loss", "schedule", "optimizer")}
    to_unit, normalize = config["preprocess"]
    epochs = config["training"]["epochs"]
    follows = args["optimizer"].pop("by_adamw", BY_ADAMW) == BY_ADAMW and to_unit == "to_unit"
    follows = follows and config.keys() <= KEYS and names | FIXED == names
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
        optimizer=names["optimizer"],
        **args["optimizer"],
        **args["loss"],
    )


def main():
    args = arguments("time_to_accuracy", __doc__, peers=list(NAMES), rounds=3, data=None)
    if not args.data:
        sys.exit("--data DIR: the folder that holds mnist/")
    folder, turns = str(Path(args.data).resolve()), {}
    forms = [(name, peer, variant) for peer in args.peers for variant, name in NAMES[peer].items()]
    for suffix, file in RECIPES.items():
        recipe = recipe_of(file)
        turns[OURS + suffix] = lambda i, suffix=suffix, file=file: ours(suffix, file, folder, i)
        for name, peer, variant in forms:
            if variant != "channels_last" and (recipe.optimizer == "adamw" or peer not in NO_MUON):
                form = name + suffix, peer, variant, recipe, folder
                turns[name + suffix] = lambda i, form=form: theirs(*form, i)
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


def reached_by(start, accuracies):
    """{level: seconds from the start until an accuracy reaches it, or inf}."""
    reached = dict.fromkeys(LEVELS, math.inf)
    for accuracy in accuracies:
        seconds = time.perf_counter() - start
        reached |= {each: min(reached[each], seconds) for each in LEVELS if accuracy >= each}
        if reached[LEVELS[-1]] < math.inf:
            break
    return reached


def ours(suffix, config, data, seed):
    """{label: {level: seconds}} of a first and a later `train.py` with one new program cache."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for label in (FIRST, LATER):
            overrides = [f"data.args.dir={data}", f"checkpoint.dir={folder}", f"seed={seed}"]
            command = [sys.executable, "train.py", "-c", config, *overrides]
            variables = environment() | {"XDG_CACHE_HOME": folder, "PYTHONUNBUFFERED": "1"}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
            start = time.perf_counter()
            with subprocess.Popen(command, **pipes, env=variables, cwd=ROOT) as process:
                alarm = threading.Timer(LIMIT, process.terminate)
                alarm.start()
                results[label + suffix] = reached_by(start, logged_accuracies(process.stdout))
                alarm.cancel()
                process.terminate()
    return results


def logged_accuracies(lines):
    for line in lines:
        if found := re.search(r"\[test\].* accuracy @ ([\d.]+)", line):
            yield float(found[1])


def theirs(name, peer, variant, recipe, data, seed):
    """{name: {level: seconds}} of another framework."""
    start, words = time.perf_counter(), (peer, variant, recipe._asdict(), data)

    def accuracies():
        worker = None
        try:
            worker = Worker("benchmarks.training:Training", *words, huge_pages=True, timeout=LIMIT)
            for epoch in range(recipe.epochs):
                worker.timeout = max(1, start + LIMIT - time.perf_counter())
                yield worker.call("accuracy_after_epoch", seed * recipe.epochs + epoch)
        except WorkerError:
            if time.perf_counter() - start < LIMIT:
                raise
        finally:
            if worker:
                worker.process.kill()

    return {name: reached_by(start, accuracies())}


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
