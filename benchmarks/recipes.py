"""Translates a config into a recipe that the other frameworks can follow."""

from pathlib import Path

from utils import UserError
from wiring.config import read

ROOT = Path(__file__).parents[1]
RECIPES = {
    "": ROOT / "configs" / "mnist_fast.json",
    ", AdamW": ROOT / "benchmarks" / "mnist_adamw.json",
}
# Keras' Muon scales the learning rate differently, and excludes other layers than the recipe does.
NO_MUON = ("keras",)
# Sections that the recipe takes as they are, or that do not affect training.
COPIED = ("$schema", "title", "seed", "model", "data", "preprocess", "metrics")
COPIED += ("checkpoint", "logging")
SUPPORTED = {
    "data": ("mnist",),
    "loss": ("cross_entropy",),
    "optimizer": ("adamw", "muon"),
    "schedule": ("constant", "warmup_linear"),
}
RATES = {"adamw": ("lr", "weight_decay"), "muon": ("lr", "weight_decay", "adamw_lr")}
LAST_LAYER = "head/classes/.*"  # with other frameworks' Muon, AdamW updates it
SHAPE = (28, 28, 1)


def recipe_of(file):
    """{"workload": the fields of a Workload, "mean", "std"} of a config; a setting that the recipe
    cannot express is an error."""
    given, resolved = read(file), resolved_of(read(file), file)
    for section, names in SUPPORTED.items():
        name = resolved[section]["name"] if isinstance(resolved[section], dict) else "a chain"
        if name not in names:
            raise UserError(
                f"{file}: {section}: must be {' or '.join(names)} "
                f"for the other frameworks, got {name}"
            )
    recipe = workload_fields(given, resolved)
    check_complete(file, given, resolved, recipe)
    return {"workload": recipe, **normalization(file, resolved["preprocess"])}


def workload_fields(given, resolved):
    """The fields of a Workload."""
    optimizer, epochs = resolved["optimizer"], resolved["training"]["epochs"]
    warmup = resolved["schedule"]["args"].get("warmup_epochs")
    one_cycle = {} if warmup is None else {"schedule": "one_cycle", "warmup": warmup / epochs}
    return {
        "name": "recipe",
        "model": resolved["model"]["name"],
        "args": given["model"].get("args", {}) if isinstance(given["model"], dict) else {},
        "shape": SHAPE,
        "batch_size": resolved["loader"]["batch_size"],
        "epochs": epochs,
        "label_smoothing": resolved["loss"]["args"]["label_smoothing"],
        "optimizer": optimizer["name"],
        **{name: optimizer["args"][name] for name in RATES[optimizer["name"]]},
        **one_cycle,
    }


def check_complete(file, given, resolved, recipe):
    """Raise if the config has a setting that its recipe does not express."""
    rates = {name: recipe[name] for name in RATES[recipe["optimizer"]]}
    by_adamw = {"by_adamw": LAST_LAYER} if recipe["optimizer"] == "muon" else {}
    warmup = {"warmup_epochs": resolved["schedule"]["args"].get("warmup_epochs")}
    one_cycle = {"name": "warmup_linear", "args": warmup}
    loss = {"label_smoothing": recipe["label_smoothing"]}
    expressed = {name: given[name] for name in COPIED if name in given} | {
        "loader": {"batch_size": recipe["batch_size"]},
        "loss": {"name": "cross_entropy", "args": loss},
        "optimizer": {"name": recipe["optimizer"], "args": rates | by_adamw},
        "schedule": one_cycle if "schedule" in recipe else "constant",
        "training": {"epochs": recipe["epochs"]},
    }
    from training.checkpoint.run_folder import (
        flat,  # imported here, since only this function needs it
    )

    expected = flat(resolved_of(expressed, file))
    if missing := [path for path, value in flat(resolved).items() if expected.get(path) != value]:
        raise UserError(
            f"{file}: {', '.join(missing)}: cannot be expressed in the other frameworks' recipe"
        )


def resolved_of(config, file):
    """A config with all defaults filled in."""
    # Imported here, since it imports jax, which some of the served frameworks do not need.
    from wiring.build import build

    return build(config, file).config


def normalization(file, preprocess):
    """The mean and the standard deviation by which images in [0, 1] are normalized."""
    names = [part["name"] for part in preprocess]
    if names not in (["to_unit"], ["to_unit", "normalize"]):
        raise UserError(
            f"{file}: preprocess: must be to_unit, or to_unit and normalize, "
            f"for the other frameworks, got {', '.join(names)}"
        )
    arguments = {name: value[0] for name, value in preprocess[-1]["args"].items()}
    return {"mean": 0.0, "std": 1.0} | arguments
