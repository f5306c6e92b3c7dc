"""training.vary: numbers of a config in which the replicas of a run differ.

Each number is an input of the compiled programs, which are traced with parts that are built from a
tree with these inputs in place of the numbers (`rebuilt` in wiring/build.py).
"""

import json
from inspect import Parameter
from typing import Any

from utils import UserError
from utils.files import DEEPEST
from utils.forms import Misfit, show
from wiring.config import override
from wiring.parts import form_of
from wiring.tree import Bad, Part, calls_in

# The parts of which compiled programs consist.
COMPILED = ("model", "loss", "objective", "update", "optimizer", "schedule", "augment", "metrics")
ONLY = f"only numbers of {', '.join(COMPILED)} and the seed can differ between replicas"


def numbers(tree: Part, training: Any, problems: list[Bad]) -> dict[str, list[float]]:
    """{path: the number of each replica} of training.vary, without the seed. `training` are its
    options, or None if they cannot be used."""
    accepted = {"seed": tree.accepted["seed"]} | {
        f"{part.args_path}.{key}": parameter
        for part in calls_in(tree)
        for key, parameter in part.accepted.items()
    }
    found = {}
    for path, values in ((training and training.vary) or {}).items():
        where = f"training.vary.{path}"
        if len(values) != training.replicas:
            message = (
                f"has {len(values)} values for {training.replicas} replicas; give one for each"
            )
            problems.append(Bad(where, message))
        elif path.split(".")[0] not in (*COMPILED, "seed"):
            problems.append(Bad(where, ONLY))
        elif path not in accepted:
            message = "no part of this config takes such a number"
            problems.append(Bad(where, message, may_follow=True))
        else:
            try:
                found[path] = converted(values, accepted[path], where)
            except Misfit as misfit:
                problems.append(Bad(misfit.path, misfit.message))
    found.pop("seed", None)
    return found


def converted(values: list, parameter: Parameter, where: str) -> list[float]:
    """The numbers for an argument, as the code gets them."""
    form = form_of(parameter.annotation)
    read = [form.read(value, f"{where}.{i}") for i, value in enumerate(values)]
    if not all(type(value) in (int, float) for value in read):
        raise Misfit(where, f"must be a list of numbers, found {show(values)}")
    return list(map(float, read)) if float in map(type, read) else read  # one type for a program


def of_replica(config: dict[str, Any], replica: int) -> dict[str, Any]:
    """The config of one replica by itself, with its numbers in place of training.vary. A config
    without valid lists of numbers is returned unchanged, so that `build` names what is wrong."""
    training = config.get("training")
    training = training if isinstance(training, dict) else {}
    vary = training.get("vary")
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


def are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) for value in values)
