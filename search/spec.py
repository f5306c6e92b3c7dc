"""The spec of a sweep: which keys of a config vary, over which values, and how trials are drawn."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import numpy as np

from utils import UserError, did_you_mean
from utils.files import read_value
from utils.forms import Count, CountOrZero, at_least, check_options, no_such_key, show
from wiring.config import no_folder_name, without_repeats

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

# Keys of the place of a trial and of the metric that compares it, the same for all trials.
OF_THE_SWEEP = ("title", "run_name", "resume", "distributed", "checkpoint", "logging", "$schema")
VARIANT = "variant"  # under this key, the values of a trial name its variant
MOST = 10_000  # trials
RANGES = ("uniform", "log_uniform", "integer")


class Halving(TypedDict):
    """Successive halving: all trials pause after `first` epochs, and of those that paused together
    the best 1/factor continue, `factor` times as far."""

    first: Count
    factor: Annotated[Count, at_least(2)]


@dataclass(frozen=True)
class Spec:
    """The content of a spec file."""

    name: str  # of the sweep's folder; the stem of the file by default
    keys: dict = field(default_factory=dict)  # {path.to.key: a list of values, or a range}
    variants: dict[str, dict] = field(default_factory=dict)  # {name: {path.to.key: value}}
    sampler: Literal["auto", "grid", "random", "optuna"] = "auto"  # random if `trials` is given
    trials: Count | None = None  # how many are drawn; a grid has one for every combination
    seed: CountOrZero = 0  # of the drawn values
    form: Literal["auto", "processes", "program"] = "auto"  # how the trials run
    workers: Count = 1  # processes at once
    engine: Literal["local", "slurm", "ray"] = "local"  # what starts the processes
    halving: Halving | None = None

    @property
    def how(self) -> str:
        by_trials = "random" if self.trials else "grid"
        return by_trials if self.sampler == "auto" else self.sampler

    @property
    def domains(self) -> dict[str, Any]:
        """{key: a list of values, or a range} of all in which trials differ."""
        return ({VARIANT: list(self.variants)} if self.variants else {}) | self.keys

    def overrides(self, values: dict[str, Any]) -> dict[str, Any]:
        """{path.to.key: value} of a trial: those of its variant, then those of the keys."""
        return self.variants.get(values.get(VARIANT, ""), {}) | {
            key: values[key] for key in self.keys
        }

    def label(self, values: dict[str, Any]) -> str:
        """What distinguishes a trial from the others, such as `sam, lr=0.01`."""
        named = {name: text_of(value) for name, value in values.items()}
        variant = named.pop(VARIANT, None)
        texts = [f"{shortest_end(key, self.keys)}={text}" for key, text in named.items()]
        return ", ".join([variant, *texts] if variant else texts)

    def pauses(self, epochs: int | None) -> Iterator[int]:
        """The numbers of epochs after which the trials of successive halving pause."""
        if self.halving and epochs:
            at = self.halving["first"]
            while at < epochs:
                yield at
                at *= self.halving["factor"]


def text_of(value: object) -> str:
    return value if isinstance(value, str) else show(value)


def shortest_end(key: str, keys: Iterable[str]) -> str:
    """The last words of a key, as many as distinguish it from the other keys."""
    words = key.split(".")
    ends = [".".join(words[-count:]) for count in range(1, len(words))]
    alone = (end for end in ends if sum(f".{other}".endswith(f".{end}") for other in keys) == 1)
    return next(alone, key)


def read_spec(path: Path) -> Spec:
    """The Spec in a file; raises its problems together."""
    absent = "name the spec of a sweep"
    given = read_value(path, absent, object_pairs_hook=without_repeats)
    return parse_spec(given, path.name, path.stem)


def parse_spec(given: object, source: str, name: str) -> Spec:
    """The Spec of a JSON value; `name` is that of a sweep without one."""
    if not isinstance(given, dict):
        raise UserError(f'{source}: must be an object {{"keys": ...}}, found {show(given)}')
    problems, known = [], Spec.__dataclass_fields__
    for key in given.keys() - known:
        moved = f'; did you mean "keys": {{{show(key)}: ...}}?' if "." in key else ""
        problems.append(f"{key}: {no_such_key(key, known)}{moved}")
    values: dict[str, Any] = {"name": name} | {
        key: value for key, value in given.items() if key in known
    }
    if isinstance(values.get("halving"), dict):
        values["halving"] = {"first": 1, "factor": 3} | values["halving"]
    spec = Spec(**values)
    try:
        check_options(spec)
        problems += [*problems_of_keys(spec)] or [*problems_of_count(spec)]
    except ValueError as error:
        problems += str(error).splitlines()
    if problems:
        raise UserError("\n".join(f"{source}: {problem}" for problem in problems))
    return spec


def problems_of_keys(spec: Spec) -> Iterator[str]:
    """What is wrong with the name, the variants, the keys that vary, and their values."""
    if why := no_folder_name(spec.name):
        yield f"name: must be usable as a folder name, {why}"
    if not spec.domains:
        example = '{"optimizer.args.lr": {"log_uniform": [1e-4, 1e-1]}}'
        yield f"keys: must name the keys of the config that vary, as in {example}"
    places = {f"keys.{key}": key for key in spec.keys}
    for name, overrides in spec.variants.items():
        places |= {f"variants.{name}.{key}": key for key in overrides}
    for place, key in places.items():
        top = key.split(".")[0]
        if top in (*OF_THE_SWEEP, VARIANT):
            yield f"{place}: {top} is the same for all trials; set it in the config"
        if key == "training.epochs" and spec.halving:
            fix = "all trials of successive halving have the same number; set it in the config"
            yield f"{place}: {fix}"
        for outer in spec.keys:  # which is set after the variants
            if f"{key}.".startswith(f"{outer}.") and place != f"keys.{outer}":
                why = f"it replaces the node that {place} changes"
                yield f"keys.{outer}: {why}; name {outer}.name, or leave one of them out"
    for key, values in spec.keys.items():
        if why := fault(values):
            yield f"keys.{key}: {why}"
        elif spec.how == "grid" and not isinstance(values, list):
            fix = 'name its values in a list, or draw from it with "trials": 20'
            yield f"keys.{key}: a grid has no ranges, found {show(values)}; {fix}"


def problems_of_count(spec: Spec) -> Iterator[str]:
    """What is wrong with the number of trials."""
    if spec.how == "grid":
        if spec.trials:
            yield "trials: a grid has one trial for every combination; leave it out"
        count = math.prod(map(len, spec.domains.values()))
    elif spec.trials is None:
        yield f'trials: is missing; say how many {spec.how} draws, as in "trials": 20'
        return
    else:
        count = spec.trials * (len(spec.variants) or 1)
    if count > MOST:
        yield f"trials: at most {MOST:,} are possible, found {count:,}"


def fault(values: object) -> str:
    """What is wrong with a list of values, or with a range; "" if nothing."""
    if isinstance(values, list):
        texts = [json.dumps(item) for item in values]
        twice = [text for text in texts if texts.count(text) > 1]
        if twice:
            return f"{twice[0]} is in the list twice"
        return "" if values else "the list is empty; name at least one value"
    if not isinstance(values, dict) or len(values) != 1:
        form = 'a list of values, or a range such as {"log_uniform": [1e-4, 1e-1]}'
        return f"must be {form}, found {show(values)}"
    [(kind, bounds)] = values.items()
    if kind not in RANGES:
        return f"no range {kind!r}{did_you_mean(kind, RANGES)} ({', '.join(RANGES)})"
    numbers = isinstance(bounds, list) and len(bounds) == 2 and all(map(is_number, bounds))
    if not numbers:
        return f"{kind}: must be [low, high], two finite numbers, found {show(bounds)}"
    if kind == "integer" and not all(isinstance(bound, int) for bound in bounds):
        return f"integer: must be two whole numbers, found {show(bounds)}"
    if bounds[0] >= bounds[1]:
        return f"{kind}: the range {show(bounds)} is empty; low must be below high"
    if kind == "log_uniform" and bounds[0] <= 0:
        return f"log_uniform: must begin above 0, found {show(bounds)}; try 1e-6, say"
    return ""


def is_number(value: object) -> bool:
    """Whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


# The values of the trials. Those of a grid and those that are drawn at random are known from the
# beginning; Optuna proposes one trial after the other.


def planned(spec: Spec) -> list[dict[str, Any]]:
    """The values of all trials that are known before the first one starts: of a grid every
    combination, and what is drawn at random, which depends only on the seed and on the number of
    the draw; every variant gets the same draws."""
    if spec.how == "optuna":
        return []
    if spec.how == "grid":
        combinations = product(*spec.domains.values())
        return [dict(zip(spec.domains, values, strict=True)) for values in combinations]
    variants = [{VARIANT: name} for name in spec.variants] or [{}]
    trials = []
    for draw in range(spec.trials or 0):
        rng = np.random.default_rng([spec.seed, draw])
        drawn = {key: one_of(values, rng) for key, values in spec.keys.items()}
        trials += [variant | drawn for variant in variants]
    return trials


def one_of(values: list[Any] | dict[str, Any], rng: np.random.Generator) -> Any:
    """One value of a list or a range. Numbers with a fraction are rounded to six digits."""
    if isinstance(values, list):
        return values[rng.integers(len(values))]
    [(kind, (low, high))] = values.items()
    if kind == "integer":
        return int(rng.integers(low, high, endpoint=True))
    if kind == "log_uniform":
        value = math.exp(rng.uniform(math.log(low), math.log(high)))
    else:
        value = rng.uniform(low, high)
    return min(max(float(f"{value:.6g}"), low), high)


class Optuna:
    """Values that Optuna's TPESampler proposes: `tell` passes it the results of the trials so far,
    then `ask` returns the values of the next one."""

    def __init__(self, spec: Spec) -> None:
        try:
            import optuna
        except ImportError:
            fix = 'install it (pip install optuna), or use "sampler": "random"'
            raise UserError(f"sampler: optuna is not installed; {fix}") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna, self.spec = optuna, spec
        self.study = optuna.create_study()
        self.distributions = {key: self.distribution(d) for key, d in spec.domains.items()}

    def distribution(self, values: list[Any] | dict[str, Any]) -> "BaseDistribution":
        kinds = self.optuna.distributions
        if isinstance(values, list):  # by index, since a value may be a list
            return kinds.CategoricalDistribution(range(len(values)))
        [(kind, bounds)] = values.items()
        if kind == "integer":
            return kinds.IntDistribution(*bounds)
        return kinds.FloatDistribution(*bounds, log=kind == "log_uniform")

    def tell(self, values: dict[str, Any], score: float | None, failed: bool) -> None:
        """Add a trial, whose score should be low; it is None while the trial runs."""
        states, domains = self.optuna.trial.TrialState, self.spec.domains
        known = states.RUNNING if score is None else states.COMPLETE
        params = {
            key: domains[key].index(value) if isinstance(domains[key], list) else value
            for key, value in values.items()
        }
        trial = self.optuna.trial.create_trial(
            state=states.FAIL if failed else known,
            value=None if failed else score,
            params=params,
            distributions=self.distributions,
        )
        self.study.add_trial(trial)

    def ask(self, number: int) -> dict[str, Any]:
        seed = self.spec.seed + number
        self.study.sampler = self.optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        params, domains = self.study.ask(self.distributions).params, self.spec.domains
        return {
            key: domains[key][value] if isinstance(domains[key], list) else value
            for key, value in params.items()
        }


def to_check(spec: Spec) -> list[dict[str, Any]]:
    """The values with which the config is checked before the first trial starts: those of all
    trials, or for Optuna the ends of each range and each value of a list."""
    if spec.how != "optuna":
        return planned(spec)
    ends = {
        key: values if isinstance(values, list) else next(iter(values.values()))
        for key, values in spec.domains.items()
    }
    first = {key: values[0] for key, values in ends.items()}
    return [first, *(first | {key: end} for key, values in ends.items() for end in values[1:])]
