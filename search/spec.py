"""The spec of a sweep: which keys of a config vary, over which values, and how trials are drawn."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from utils import UserError, did_you_mean
from utils.files import read_value
from utils.forms import Count, CountOrZero, at_least, check_options
from wiring.config import no_folder_name, show, without_repeats

# Keys of the place of a trial and of the metric that compares it, the same for all trials.
OF_THE_SWEEP = ("title", "run_name", "resume", "distributed", "checkpoint", "logging", "$schema")
MOST = 10_000  # trials


@dataclass(frozen=True)
class Halving:
    """Successive halving: all trials pause after `first` epochs, and of those that paused together
    the best 1/factor continue, `factor` times as far."""

    first: Count = 1
    factor: Count = 3

    def __post_init__(self):
        check_options(self)
        at_least(2, factor=self.factor)

    def rungs(self, epochs):
        """The numbers of epochs after which trials pause, and `epochs`, where the last ones end."""
        pauses, at = [], self.first
        while at < epochs:
            pauses, at = [*pauses, at], at * self.factor
        return [*pauses, epochs]


@dataclass(frozen=True)
class Spec:
    """The content of a spec file."""

    keys: dict  # {path.to.key: a list of values, or a range}
    name: str  # of the sweep's folder; the stem of the file by default
    sampler: Literal["auto", "grid", "random", "optuna"] = "auto"  # random if `trials` is given
    trials: Count | None = None  # how many; a grid has one for every combination
    seed: CountOrZero = 0  # of the drawn values
    form: Literal["auto", "processes", "program"] = "auto"  # how the trials run
    workers: Count = 1  # processes at once
    halving: Halving | None = None

    @property
    def how(self):
        by_trials = "random" if self.trials else "grid"
        return by_trials if self.sampler == "auto" else self.sampler


class Uniform:
    """Numbers of a range, all equally likely."""

    log = whole = False

    def __init__(self, low, high):
        self.low, self.high = low, high

    def at(self, share):
        """The number below which this share of the drawn numbers lies, with six digits."""
        return self.inside(float(f"{self.low + share * (self.high - self.low):.6g}"))

    def inside(self, value):
        return min(max(value, self.low), self.high)

    def draw(self, rng):
        return self.at(rng.random())

    def ends(self):
        return [self.low, self.high]


class LogUniform(Uniform):
    """Numbers of a range whose logarithms are equally likely."""

    log = True

    def at(self, share):
        logs = math.log(self.low), math.log(self.high)
        return self.inside(float(f"{math.exp(logs[0] + share * (logs[1] - logs[0])):.6g}"))


class Integer(Uniform):
    """Whole numbers of a range, with both ends."""

    whole = True

    def at(self, share):
        return min(self.low + math.floor(share * (self.high - self.low + 1)), self.high)


class Choice:
    """One of several values."""

    def __init__(self, values):
        self.values = values

    def draw(self, rng):
        return self.values[rng.integers(len(self.values))]

    def ends(self):
        return self.values


RANGES = {"uniform": Uniform, "log_uniform": LogUniform, "integer": Integer}


def read_spec(path):
    """The Spec in a file; raises all of its problems at once."""
    absent = "name the spec of a sweep"
    given = read_value(path, absent, object_pairs_hook=without_repeats)
    return parse_spec(given, path.name, path.stem)


def parse_spec(given, source, name):
    """The Spec of a JSON value; `name` is that of a sweep without one."""
    if not isinstance(given, dict):
        raise UserError(f'{source}: must be an object {{"keys": ...}}, found {show(given)}')
    problems, known = [], list(Spec.__dataclass_fields__)
    for key in [key for key in given if key not in known]:
        moved = f'; did you mean "keys": {{{show(key)}: ...}}?' if "." in key else ""
        problems.append(f"{key}: no such key{did_you_mean(key, known)} ({', '.join(known)}){moved}")
    values = {key: value for key, value in given.items() if key in known}
    if values.get("halving") is not None:
        values["halving"] = section(values["halving"], problems)
    values = {"keys": {}, "name": name} | values
    spec, options = Spec(**values), []
    try:
        check_options(spec)
    except ValueError as error:
        options = str(error).splitlines()
    problems += options
    if why := no_folder_name(values["name"]):
        problems.append(f"name: must be usable as a folder name, {why}")
    if not isinstance(values["keys"], dict) or not values["keys"]:
        example = '{"optimizer.args.lr": {"log_uniform": [1e-4, 1e-1]}}'
        problems.append(f"keys: must name the keys of the config that vary, as in {example}")
    else:
        problems += problems_of_keys(spec) + ([] if options else problems_of_count(spec))
    if problems:
        raise UserError("\n".join(f"{source}: {problem}" for problem in problems))
    return spec


def section(given, problems):
    """The Halving of a JSON value; its problems are added to the list."""
    known = list(Halving.__dataclass_fields__)
    if not isinstance(given, dict):
        problems.append(
            f'halving: must be an object {{"first": 1, "factor": 3}}, found {show(given)}'
        )
        return None
    for key in [key for key in given if key not in known]:
        hint = f"{did_you_mean(key, known)} ({', '.join(known)})"
        problems.append(f"halving.{key}: no such key{hint}")
    try:
        return Halving(**{key: value for key, value in given.items() if key in known})
    except ValueError as error:
        problems += [f"halving.{line}" for line in str(error).splitlines()]


def problems_of_keys(spec):
    """What is wrong with the keys that vary, and with their values."""
    problems = []
    for key, value in spec.keys.items():
        top = key.split(".")[0]
        for inner in (other for other in spec.keys if other.startswith(f"{key}.")):
            why = f"it replaces the node that keys.{inner} changes"
            problems.append(f"keys.{key}: {why}; name {key}.name, or leave one of them out")
        if top in OF_THE_SWEEP:
            fix = f"{top} is the same for all trials; set it in the config"
            problems.append(f"keys.{key}: {fix}")
        if key == "training.epochs" and spec.halving:
            fix = "all trials of successive halving have the same number; set it in the config"
            problems.append(f"keys.{key}: {fix}")
        try:
            domain(value)
        except ValueError as error:
            problems.append(f"keys.{key}: {error}")
        else:
            if spec.how == "grid" and not isinstance(value, list):
                fix = 'name its values in a list, or draw from it with "trials": 20'
                problems.append(f"keys.{key}: a grid has no ranges, found {show(value)}; {fix}")
    return problems


def problems_of_count(spec):
    """What is wrong with the number of trials."""
    if spec.how == "grid":
        if spec.trials:
            return ["trials: a grid has one trial for every combination; leave it out"]
        lists = [value for value in spec.keys.values() if isinstance(value, list)]
        count = math.prod(map(len, lists))
    else:
        count = spec.trials
    if count is None:
        return [f'trials: is missing; say how many {spec.how} draws, as in "trials": 20']
    if count > MOST:
        return [f"trials: at most {MOST:,} are possible, found {count:,}"]
    return []


def domain(value):
    """The Choice or the range that a value of `keys` means; ValueError says what is wrong."""
    if isinstance(value, list):
        if not value:
            raise ValueError("the list is empty; name at least one value")
        texts = [json.dumps(item) for item in value]
        if twice := [text for text in texts if texts.count(text) > 1]:
            raise ValueError(f"{twice[0]} is in the list twice")
        return Choice(value)
    form = 'must be a list of values, or a range such as {"log_uniform": [1e-4, 1e-1]}'
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(f"{form}, found {show(value)}")
    [(kind, bounds)] = value.items()
    if kind not in RANGES:
        raise ValueError(f"no range {kind!r}{did_you_mean(kind, RANGES)} ({', '.join(RANGES)})")
    numbers = isinstance(bounds, list) and len(bounds) == 2 and all(map(is_number, bounds))
    if not numbers:
        raise ValueError(f"{kind}: must be [low, high], two finite numbers, found {show(bounds)}")
    low, high = bounds
    if kind == "integer" and not all(isinstance(bound, int) for bound in bounds):
        raise ValueError(f"integer: must be two whole numbers, found {show(bounds)}")
    if low >= high:
        raise ValueError(f"{kind}: the range {show(bounds)} is empty; low must be below high")
    if kind == "log_uniform" and low <= 0:
        raise ValueError(f"log_uniform: must begin above 0, found {show(bounds)}; try 1e-6, say")
    return RANGES[kind](low, high)


def is_number(value):
    """Whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def rng_of(spec, number):
    """The random numbers of one trial, which do not depend on how many there are."""
    return np.random.default_rng([spec.seed, number])


def as_json(spec):
    """A Spec as the JSON value that it is stored as."""
    return asdict(spec)
