"""The checks before the first trial starts: the config is tried with the values of every trial."""

import json
import math
from pathlib import Path

from search.form import with_form
from search.samplers import check_installed, planned, to_check
from search.sweep_folder import Sweep, Trial, with_values
from utils import UserError
from wiring.build import build
from wiring.config import read_layers, refuse_elsewhere
from wiring.own_modules import look_in

NAMED = 3  # trials that a message names


def checked_sweep(file, overrides, spec, trusted=True):
    """The Sweep of a config file and a Spec, with all trials that are known; raises the problems of
    all of them at once."""
    check_installed(spec)
    config, layers = read_layers(file, overrides, trusted)
    if not trusted:
        refuse_elsewhere(file, config | {"run_name": spec.name}, layers)
    recipe, sets = check_trials(config, file, to_check(spec), spec.how != "optuna", trusted)
    checkpoint, training = recipe.for_sets(sets).checkpoint, recipe.training
    problems = []
    if config.get("distributed"):
        problems.append("distributed: a trial is one process; leave it out")
    if checkpoint.monitor is None:
        fix = "hold out a validation set (loader.val_size=0.1), or name one, as in "
        problems.append(
            "checkpoint.monitor: no metric says which trial is better; "
            f"{fix}checkpoint.monitor=test_loss"
        )
    if spec.halving and (not training.eval_every or spec.halving.first % training.eval_every):
        problems.append(
            f"training.eval_every: must divide halving.first, {spec.halving.first}, so that the "
            f"metric is known where trials pause; found {training.eval_every}"
        )
    evaluated = (checkpoint.monitor or "").split("_")[0] in recipe.sets_in_epochs(sets)
    by_epochs = training.max_steps is None and training.max_seconds is None
    planned_epochs = [values.get("training.epochs", training.epochs) for values in to_check(spec)]
    epochs = min(filter(None, planned_epochs), default=math.inf)
    if spec.halving and training.epochs is None:
        problems.append("training.epochs: is null, and halving needs a number, where trials end")
    if evaluated and by_epochs and training.eval_every > epochs:
        problems.append(
            f"training.eval_every: must be at most training.epochs, {epochs}, so that "
            f"{checkpoint.monitor} is measured; found {training.eval_every}"
        )
    if problems:
        raise UserError("\n".join(f"{file.name}: {problem}" for problem in problems))
    base = Path(config.get("checkpoint", {}).get("dir", "saved")).expanduser()
    folder = base / config.get("title", "run")
    trials = [Trial(number, values) for number, values in enumerate(planned(spec))]
    about = str(file.resolve()), checkpoint.monitor, checkpoint.sign(), training.epochs
    sweep = Sweep(folder / spec.name, spec, config, *about, trials)
    return with_form(sweep, recipe, file.name, trusted, look_in(file.parent))


def check_stored(sweep, trusted):
    """Refuse a stored sweep whose config imports, or reaches, what the user has not trusted."""
    file, beyond = Path(sweep.source), {}
    for trial in sweep.trials:
        parts = build(sweep.trial_config(trial), file.name, trusted, look_in(file.parent))
        beyond |= dict.fromkeys(parts.beyond)
    if beyond:
        raise UserError("\n".join(beyond))


def check_trials(config, file, all_values, named, trusted=True):
    """(the Recipe of the first trial, {set: its size}), once the parts of all trials are valid and
    fit each other. Numbers with a fraction do not change shapes, so trials that differ only in
    them are checked by shapes once. With `named`, the messages name the trials."""
    from training.commands.start import checked_recipe, sizes_of

    found, seen, first, folders = {}, set(), None, look_in(file.parent)
    for number, values in enumerate(all_values):
        shapes = json.dumps([None if isinstance(v, float) else v for v in values.values()])
        try:
            parts = build(with_values(config, values), file.name, trusted, folders)
            if parts.beyond:
                raise UserError("\n".join(parts.beyond))
            if shapes not in seen:
                recipe, _ = checked_recipe(parts)
                first = first or (recipe, sizes_of(parts))
                seen.add(shapes)
        except UserError as error:
            for line in str(error).splitlines():
                found.setdefault(line, []).append(number)
    if not found:
        return first
    lines = []
    for line, numbers in found.items():
        names = ", ".join(f"trial_{number:03d}" for number in numbers[:NAMED])
        more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
        everywhere = len(numbers) == len(all_values) or not named
        lines.append(line if everywhere else f"{line} ({names}{more})")
    raise UserError("\n".join(lines))
