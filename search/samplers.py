"""Samplers: which values the trials of a sweep have.

`ask(number)` returns the values of a trial, {path.to.key: value}. The `count` trials of a grid and
those that are drawn at random are known from the beginning; Optuna proposes one after the other,
and `tell` passes it the results of those before.
"""

import math
from itertools import product

import numpy as np

from search.spec import VARIANT
from utils import UserError


class Grid:
    """Every combination of the values and the variants."""

    def __init__(self, spec):
        combinations = product(*spec.domains.values())
        self.all = [dict(zip(spec.domains, values, strict=True)) for values in combinations]
        self.count = len(self.all)

    def ask(self, number):
        return self.all[number]


class Random:
    """Values that depend only on the seed and on the number of the draw; every variant has the
    same ones."""

    def __init__(self, spec):
        self.spec = spec
        self.variants = [{VARIANT: name} for name in spec.variants] or [{}]
        self.count = spec.trials * len(self.variants)

    def ask(self, number):
        draw, variant = divmod(number, len(self.variants))
        rng = np.random.default_rng([self.spec.seed, draw])
        drawn = {key: one_of(values, rng) for key, values in self.spec.keys.items()}
        return self.variants[variant] | drawn


def one_of(values, rng):
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
    """Values that Optuna's TPESampler proposes."""

    def __init__(self, spec):
        try:
            import optuna
        except ImportError:
            fix = 'install it (pip install optuna), or use "sampler": "random"'
            raise UserError(f"sampler: optuna is not installed; {fix}") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna, self.spec = optuna, spec
        self.study = optuna.create_study()
        self.distributions = {key: self.distribution(d) for key, d in spec.domains.items()}

    def distribution(self, values):
        kinds = self.optuna.distributions
        if isinstance(values, list):  # by index, since a value may be a list
            return kinds.CategoricalDistribution(range(len(values)))
        [(kind, bounds)] = values.items()
        if kind == "integer":
            return kinds.IntDistribution(*bounds)
        return kinds.FloatDistribution(*bounds, log=kind == "log_uniform")

    def tell(self, values, score, failed):
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

    def ask(self, number):
        seed = self.spec.seed + number
        self.study.sampler = self.optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        params, domains = self.study.ask(self.distributions).params, self.spec.domains
        return {
            key: domains[key][value] if isinstance(domains[key], list) else value
            for key, value in params.items()
        }


SAMPLERS = {"grid": Grid, "random": Random, "optuna": Optuna}


def sampler_of(spec):
    return SAMPLERS[spec.how](spec)


def planned(spec):
    """The values of all trials that are known before the first one starts."""
    if spec.how == "optuna":
        return []
    sampler = sampler_of(spec)
    return [sampler.ask(number) for number in range(sampler.count)]


def to_check(spec):
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
