"""training.vary: numbers of a config in which the replicas of a run differ.

Each number is an input of the compiled programs, which are traced with parts that `rebuild` makes
from these inputs.
"""

import json
from types import SimpleNamespace

from file_io import DEEPEST
from utils import UserError
from wiring.config import LARGEST_SEED, override, show

REBUILT = ("model", "loss", "objective", "update", "optimizer")
COMPILED = (*REBUILT, "schedule", "augment", "metrics")  # the parts of which programs consist
ONLY = f"only numbers of {', '.join(COMPILED)} and the seed can differ between replicas"


def numbers(nodes, training):
    """{path: the number of each replica} of training.vary, without the seed."""
    vary = (training and training.vary) or {}
    for path, values in vary.items():
        if len(values) != training.replicas:
            count = f"{len(values)} values for {training.replicas} replicas"
            nodes.problem(f"training.vary.{path}", f"has {count}; give one for each")
    return {path: values for path, values in vary.items() if path != "seed"}


def check(nodes, training):
    """Record a problem for each number that does not exist, or is not of a compiled part."""
    for path in [path for path in nodes.vary if path.split(".")[0] not in COMPILED]:
        nodes.problem(f"training.vary.{path}", ONLY)
    if not nodes.problems:
        for path in nodes.vary.keys() - nodes.varied.keys():
            nodes.problem(f"training.vary.{path}", "no part of this config takes such a number")
    seeds = ((training and training.vary) or {}).get("seed", ())
    if not all(type(seed) is int and 0 <= seed <= LARGEST_SEED for seed in seeds):
        why = f"must be integers from 0 to {LARGEST_SEED}, found {show(list(seeds))}"
        nodes.problem("training.vary.seed", why)


def of_replica(config, replica):
    """The config of one replica by itself, with its numbers in place of training.vary. A config
    without valid lists of numbers is returned unchanged, so that `build` names what is wrong."""
    training = config.get("training")
    vary = training.get("vary") if isinstance(training, dict) else None
    if not vary or not isinstance(vary, dict) or not all(map(are_numbers, vary.values())):
        return config
    own = config | {"training": training | {"replicas": 1, "vary": None}}
    for path, values in vary.items():
        where = f"training.vary.{path}"
        if path.split(".")[0] not in (*COMPILED, "seed") or path.count(".") > DEEPEST:
            raise UserError(f"{where}: {ONLY}")
        if len(values) <= replica:
            raise UserError(f"{where}: has {len(values)} values, so none for replica {replica}")
        own = override(own, f"{path}={json.dumps(values[replica])}")
    return own


def are_numbers(values):
    return isinstance(values, list) and all(type(value) in (int, float) for value in values)


def rebuild(builder, parts, inputs):
    """`parts` with `inputs`, {path: number}, in place of the numbers of training.vary: the numbers
    of one replica, or the inputs of a program that is being compiled."""
    old = builder.nodes
    known = {"facts": old.facts, "inputs": inputs}
    new = type(builder)(builder.config, builder.source, old.trusted, old.folders, **known)
    new.nodes.vary = old.vary
    made = {"augment": new.parts_of_list("augment"), "metrics": new.metrics()}
    made["schedule"] = new.nodes.schedule = new.part("schedule")
    made |= {kind: new.part(kind) for kind in REBUILT}
    new.raise_problems()
    made["rates"], made["optimizer_rates"] = new.rates(made["schedule"])
    return SimpleNamespace(**vars(parts) | made)
