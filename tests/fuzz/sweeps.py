"""Mutants of sweep.json, which may be a stranger's."""

import json
import random

import sweep
from search.spec import parse_spec
from search.sweep_folder import Sweep, name_of
from tests.fuzz.bench import Command
from tests.fuzz.checkpoints import CONFIG
from tests.fuzz.mutants import as_text, mutated, mutated_text
from tests.training.report.saved_run import rows, save

# {base: (the spec, how many trials have finished)}; a trial that has not finished is trained.
BASES = {
    "finished": ({"keys": {"optimizer.args.lr": [0.001, 0.01], "seed": [3]}}, 2),
    "halving": ({"keys": {"model.args.dims": [[4], [6]]}, "halving": {}}, 2),
    "begun": ({"keys": {"optimizer.args.lr": {"uniform": [0.001, 0.01]}}, "trials": 2}, 1),
}
SMALL = CONFIG | {"callbacks": [], "checkpoint": {"monitor": "test_loss"}}


def prepare(folder, work):
    """Nothing is needed besides the sweep."""


def put_sweep(base, folder):
    """Write a sweep whose trials may have finished."""
    spec, finished = BASES[base]
    about = "base.json", "test_loss", 1, 2
    stored = Sweep(folder, parse_spec(spec, "grid.json", "grid"), SMALL, *about)
    for number in range(finished):
        save(folder / name_of(number), list(rows()), SMALL)
    folder.mkdir(parents=True, exist_ok=True)
    stored.save()


def commands(base, seed, work):
    """Change the file of a sweep, and yield every command that reads it."""
    rng, folder = random.Random(f"{base} {seed}"), work / "Fuzzed" / "grid"
    put_sweep(base, folder)
    text = (folder / "sweep.json").read_text()
    if rng.random() < 0.15:
        (folder / "sweep.json").write_bytes(mutated_text(text, rng))
    else:
        (folder / "sweep.json").write_text(as_text(mutated(json.loads(text), rng)))
    changed = (folder / "sweep.json").read_bytes()[:3000]
    for option in ("--report", "--best", "--resume"):
        words = [option, str(folder.relative_to(work))]
        quick = option != "--resume" or base == "finished"
        yield Command(f"{option} {changed}", lambda words=words: sweep.main(words), quick=quick)
