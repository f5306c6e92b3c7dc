"""Whether the trials of a sweep run in processes of their own or, where they differ only in numbers
that the compiled step takes as inputs, as one program (search/program.py)."""

from dataclasses import replace

from utils import UserError, first_line
from wiring.build import build
from wiring.config import show
from wiring.vary import COMPILED

# {section: {option: the value that it must have}}: other values are for a run as a whole.
OF_A_RUN = {
    "training": {
        "replicas": 1,
        "vary": None,
        "max_seconds": None,
        "test_at": "epochs",
        "detect_nans": False,
    },
    "logging": {
        "trackers": (),
        "gradient_norm": False,
        "parameter_norm": False,
        "leaf_statistics": False,
    },
}


def with_form(sweep, recipe, source, trusted, folders):
    """The sweep with the form that its trials will have: a program where that is possible, unless
    the spec chooses processes. Raises a UserError if it demands a program that is not possible."""
    wanted = sweep.spec.form
    if wanted == "processes":
        return sweep
    reasons = reasons_in_spec(sweep.spec, sweep.trials) + reasons_in_options(recipe)
    reasons = reasons or reasons_in_trace(sweep, source, trusted, folders)
    if not reasons:
        return replace(sweep, form="program")
    if wanted == "program":
        lines = "\n  ".join(reasons)
        fix = 'change that, or use "form": "auto"'
        raise UserError(f"form: the trials cannot run as one program; {fix}\n  {lines}")
    return replace(sweep, why=first_line(reasons[0]))


def reasons_in_spec(spec, trials):
    """Why the trials of a spec cannot be one program, one line for each reason."""
    reasons = []
    if spec.how == "optuna":
        reasons.append("sampler: optuna proposes a trial from the results of those before it")
    elif len(trials) < 2:
        reasons.append("keys: there is only one trial")
    if spec.halving:
        reasons.append("halving: the trials of a program train equally long")
    if spec.workers > 1:
        reasons.append(f"workers: {spec.workers} processes train at the same time")
    for key in spec.keys:
        other = [t.values[key] for t in trials if type(t.values[key]) not in (int, float)]
        if key.split(".")[0] not in COMPILED and key != "seed":
            kinds = ", ".join(COMPILED)
            reasons.append(f"keys.{key}: a program takes numbers of {kinds}, and the seed")
        elif other:
            reasons.append(f"keys.{key}: a program takes numbers, and not {show(other[0])}")
    return reasons


def reasons_in_options(recipe):
    """Why a run with the options of the config cannot be one program, one line for each reason."""
    reasons = [
        f"{section}.{name}: is for a run as a whole, and a program is one run"
        for section, options in OF_A_RUN.items()
        for name, value in options.items()
        if getattr(getattr(recipe, section), name) != value
    ]
    if recipe.callbacks:
        fix = "to train all trials as one program, add callbacks=[]"
        reasons.append(f"callbacks: the config has callbacks, which are for a single run; {fix}")
    if recipe.training.on_nonfinite == "rollback":
        reasons.append("training.on_nonfinite: all trials of a program would go back together")
    return reasons


def reasons_in_trace(sweep, source, trusted, folders):
    """Why tracing a program of the first two trials fails, one line for each reason."""
    from training.commands.start import checked_recipe

    try:
        checked_recipe(build(sweep.program_config(sweep.trials[:2]), source, trusted, folders))
    except UserError as error:
        return str(error).splitlines()
    return []
