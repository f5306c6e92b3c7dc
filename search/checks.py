"""The checks before the first trial starts: the config is tried with the values of every trial, and
whether the trials can be the replicas of one run (training.vary), as one program."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search.spec import Optuna, Spec, planned, to_check
from search.sweep_folder import TOGETHER, Sweep, Trial, name_of, with_values
from utils import UserError, first_line
from wiring.build import build
from wiring.config import read_layers, refuse_elsewhere
from wiring.own_modules import look_in

NAMED = 3  # trials that a message names

if TYPE_CHECKING:
    from training.recipe import Recipe


def checked_sweep(file: Path, overrides: Sequence[str], spec: Spec, trusted: bool = True) -> Sweep:
    """The Sweep of a config file and a Spec, with all trials that are known; raises the problems of
    all of them at once."""
    if spec.how == "optuna":
        Optuna(spec)  # raises if it is not installed
    config, layers = read_layers(file, overrides, trusted)
    if not trusted:
        refuse_elsewhere(file, config | {"run_name": spec.name}, layers)
    recipe, sets = check_trials(config, file, spec, to_check(spec), trusted)
    checkpoint, training = recipe.for_sets(sets).checkpoint, recipe.training
    every, problems = training.evaluations().get("epochs"), []
    if config.get("distributed"):
        problems.append("distributed: a trial is one process; leave it out")
    if checkpoint.monitor is None:
        fix = "hold out a validation set (loader.val_size=0.1), or name one, as in "
        problems.append(
            "checkpoint.monitor: no metric says which trial is better; "
            f"{fix}checkpoint.monitor=test_loss"
        )
    if spec.halving and (not every or spec.halving["first"] % every):
        problems.append(
            f"training.eval_every: must divide halving.first, {spec.halving['first']}, so that the "
            f"metric is known where trials pause; found {training.eval_every}"
        )
    if spec.halving and training.epochs is None:
        problems.append("training.epochs: is null, and halving needs a number, where trials end")
    evaluated = (checkpoint.monitor or "").split("_")[0] in recipe.sets_in_epochs(sets)
    by_epochs = training.max_steps is None and training.max_seconds is None
    lengths = [spec.overrides(v).get("training.epochs", training.epochs) for v in to_check(spec)]
    epochs = min(filter(None, lengths), default=math.inf)
    if evaluated and by_epochs and (every or 0) > epochs:
        problems.append(
            f"training.eval_every: must be at most training.epochs, {epochs}, so that "
            f"{checkpoint.monitor} is measured; found {training.eval_every}"
        )
    if problems:
        raise UserError("\n".join(f"{file.name}: {problem}" for problem in problems))
    assert checkpoint.monitor is not None  # it is a problem
    base = Path(config.get("checkpoint", {}).get("dir", "saved")).expanduser()
    folder = base / config.get("title", "run") / spec.name
    about = str(file.resolve()), checkpoint.monitor, checkpoint.sign(), training.epochs
    trials = [Trial(n, values, name_of(n)) for n, values in enumerate(planned(spec))]
    sweep = Sweep(folder, spec, config, *about, trials=tuple(trials))
    return in_form(sweep, recipe, file, trusted)


def check_stored(sweep: Sweep, trusted: bool) -> None:
    """Refuse a stored sweep whose config is wrong by now, or imports or reaches what the user has
    not trusted."""
    values = [trial.values for trial in sweep.trials] or to_check(sweep.spec)
    check_trials(sweep.config, Path(sweep.source), sweep.spec, values, trusted)


def check_trials(
    config: dict[str, Any], file: Path, spec: Spec, all_values: list[dict[str, Any]], trusted: bool
) -> tuple["Recipe", dict[str, int]]:
    """(the Recipe of the first trial, {set: its size}), once the parts of all trials are valid and
    fit each other. Numbers with a fraction do not change shapes, so trials that differ only in
    them are checked by shapes once."""
    from training.commands.start import checked_recipe, sizes_of

    problems: dict[str, list[int]] = {}  # {line: the trials that have it}
    checked_shapes, first, folders = set(), None, look_in(file.parent)
    for number, values in enumerate(all_values):
        shapes = json.dumps([None if isinstance(v, float) else v for v in values.values()])
        try:
            config_of_trial = with_values(config, spec.overrides(values))
            parts = build(config_of_trial, file.name, trusted, folders)
            if parts.beyond:
                raise UserError("\n".join(parts.beyond))
            if shapes not in checked_shapes:
                recipe, _ = checked_recipe(parts)
                first = first or (recipe, sizes_of(parts))
                checked_shapes.add(shapes)
        except UserError as error:
            for line in str(error).splitlines():
                problems.setdefault(line, []).append(number)
    if not problems:
        assert first is not None  # since there are values
        return first
    lines = []
    for line, numbers in problems.items():
        names = ", ".join(map(name_of, numbers[:NAMED]))
        more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
        everywhere = len(numbers) == len(all_values) or spec.how == "optuna"
        lines.append(line if everywhere else f"{line} ({names}{more})")
    raise UserError("\n".join(lines))


def in_form(sweep: Sweep, recipe: "Recipe", file: Path, trusted: bool) -> Sweep:
    """The sweep with the form that its trials will have: a program where that is possible, unless
    the spec chooses processes. Raises a UserError if it demands a program that is not possible."""
    if sweep.spec.form == "processes":
        return sweep
    why = why_apart(sweep, recipe, file, trusted)
    if not why:
        return replace(sweep, form="program")
    if sweep.spec.form == "program":
        fix = 'change that, or use "form": "auto"'
        raise UserError(f"form: the trials cannot run as one program; {fix}\n  {why}")
    return replace(sweep, why=first_line(why))


def why_apart(sweep: Sweep, recipe: "Recipe", file: Path, trusted: bool) -> str:
    """Why the trials cannot be the replicas of one run; "" if they can."""
    from training.commands.start import checked_recipe

    spec, training, trials = sweep.spec, recipe.training, sweep.trials[:TOGETHER]
    of_one_trial = {
        "sampler: optuna": spec.how == "optuna",
        "keys: there is only one trial": len(trials) == 1,
        "variants": spec.variants,
        "halving": spec.halving,
        f"workers: {spec.workers}": spec.workers > 1,
        f"engine: {spec.engine}": spec.engine != "local",
        "callbacks (add callbacks=[])": recipe.callbacks,
        "logging.trackers": recipe.logging.trackers,
        "training.replicas": training.replicas > 1,
        "training.vary": training.vary,
        "training.max_seconds": training.max_seconds,
        "training.test_at": training.test_at == "end",
        "training.detect_nans": training.detect_nans,
        "training.on_nonfinite": training.on_nonfinite == "rollback",
    }
    if found := [place for place, is_so in of_one_trial.items() if is_so]:
        return f"these are for trials that run by themselves: {', '.join(found)}"
    try:
        config = sweep.run_config(trials)
        checked_recipe(build(config, file.name, trusted, look_in(file.parent)))
    except UserError as error:
        return str(error)
    return ""
