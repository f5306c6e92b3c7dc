"""Which values the trials of a sweep have: every combination, random ones, or those of Optuna."""

from itertools import product

from search.spec import Choice, domain, rng_of
from utils import UserError


def planned(spec):
    """[{path.to.key: value}] of all trials that are known before the first one starts."""
    domains = {key: domain(value) for key, value in spec.keys.items()}
    if spec.how == "grid":
        combinations = product(*(choice.values for choice in domains.values()))
        return [dict(zip(domains, values, strict=True)) for values in combinations]
    if spec.how == "random":
        rngs = [rng_of(spec, number) for number in range(spec.trials)]
        return [{key: each.draw(rng) for key, each in domains.items()} for rng in rngs]
    return []


def to_check(spec):
    """The values with which the config is checked before the first trial starts: those of all
    trials, or for Optuna the ends of each range and each value of a list."""
    if spec.how != "optuna":
        return planned(spec)
    domains = {key: domain(value) for key, value in spec.keys.items()}
    first = {key: each.ends()[0] for key, each in domains.items()}
    others = [first | {key: end} for key, each in domains.items() for end in each.ends()[1:]]
    return [first, *others]


def check_installed(spec):
    """Raise a UserError if the sampler needs a package that is missing."""
    if spec.how == "optuna":
        try:
            import optuna  # noqa: F401
        except ImportError:
            fix = 'install it (pip install optuna), or use "sampler": "random"'
            raise UserError(f"sampler: optuna is not installed; {fix}") from None


def propose(spec, trials, sign):
    """The values of one more trial by Optuna, from the first scores of the others. The study is
    built from the trials each time, so a sweep that was killed continues with the same study."""
    import optuna
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    domains = {key: domain(value) for key, value in spec.keys.items()}
    distributions = {}
    for key, each in domains.items():
        if isinstance(each, Choice):  # by index, since a value may be a list
            distributions[key] = CategoricalDistribution(range(len(each.values)))
        elif each.whole:
            distributions[key] = IntDistribution(each.low, each.high)
        else:
            distributions[key] = FloatDistribution(each.low, each.high, log=each.log)
    sampler = optuna.samplers.TPESampler(seed=spec.seed + len(trials), constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    for trial in trials:
        state, value = TrialState.RUNNING, None
        if trial.failed:
            state = TrialState.FAIL
        elif trial.scores:
            state, value = TrialState.COMPLETE, sign * trial.scores[0][1]
        params = {
            key: each.values.index(trial.values[key])
            if isinstance(each, Choice)
            else trial.values[key]
            for key, each in domains.items()
        }
        study.add_trial(
            create_trial(state=state, value=value, params=params, distributions=distributions)
        )
    found = study.ask(distributions).params
    return {
        key: each.values[found[key]] if isinstance(each, Choice) else each.inside(found[key])
        for key, each in domains.items()
    }
