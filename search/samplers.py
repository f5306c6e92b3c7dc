"""Which values the trials of a sweep have. Those of a grid and those that are drawn at random are
known from the beginning; Optuna proposes one trial after the other."""

import math
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from search.spec import VARIANT, Spec
from utils import UserError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


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
