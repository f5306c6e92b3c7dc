"""What a config says of a recipe, as other frameworks are told it."""

from pathlib import Path

from utils import UserError
from wiring.config import read

ROOT = Path(__file__).parents[1]
RECIPES = {
    "": ROOT / "configs" / "mnist_fast.json",
    ", AdamW": ROOT / "benchmarks" / "mnist_adamw.json",
}
NO_MUON = ("keras",)  # its rates mean something else, and it leaves out what the recipe does not
AS_THEY_ARE = (
    "$schema",
    "title",
    "seed",
    "model",
    "data",
    "preprocess",
    "metrics",
    "checkpoint",
    "logging",
)  # or no matter
TAKEN = {
    "data": ("mnist",),
    "loss": ("cross_entropy",),
    "optimizer": ("adamw", "muon"),
    "schedule": ("constant", "warmup_linear"),
}
RATES = {"adamw": ("lr", "weight_decay"), "muon": ("lr", "weight_decay", "adamw_lr")}
LAST_LAYER = "head/classes/.*"  # other frameworks' Muon leaves it to AdamW
SHAPE = (28, 28, 1)


def recipe_of(file):
    """{"workload": the fields of a Workload, "mean", "std"} of a config that says no more than other frameworks are told."""
    from training.runs.folder import flat  # here, as others need not wait for it

    given, resolved = read(file), resolved_of(read(file), file)
    for place in ("data", "loss", "optimizer", "schedule"):
        name = resolved[place]["name"] if isinstance(resolved[place], dict) else "a chain"
        if name not in TAKEN[place]:
            raise UserError(
                f"{file}: {place}: other frameworks are told of {' or '.join(TAKEN[place])}, not of {name}"
            )
    smoothing, optimizer = resolved["loss"]["args"]["label_smoothing"], resolved["optimizer"]
    rates = {name: optimizer["args"][name] for name in RATES[optimizer["name"]]}
    fixed = {"by_adamw": LAST_LAYER} if optimizer["name"] == "muon" else {}
    warmup = resolved["schedule"]["args"].get("warmup_epochs")
    batch_size, epochs = resolved["loader"]["batch_size"], resolved["training"]["epochs"]
    told = {name: given[name] for name in AS_THEY_ARE if name in given} | {
        "loader": {"batch_size": batch_size},
        "loss": {"name": "cross_entropy", "args": {"label_smoothing": smoothing}},
        "optimizer": {"name": optimizer["name"], "args": rates | fixed},
        "schedule": "constant"
        if warmup is None
        else {"name": "warmup_linear", "args": {"warmup_epochs": warmup}},
        "training": {"epochs": epochs},
    }
    expected = flat(resolved_of(told, file))
    if untold := [path for path, value in flat(resolved).items() if expected.get(path) != value]:
        raise UserError(f"{file}: other frameworks are not told of {', '.join(untold)}")
    recipe = (
        {"schedule": "constant"}
        if warmup is None
        else {"schedule": "one_cycle", "warmup": warmup / epochs}
    )
    recipe |= {
        "name": "recipe",
        "model": resolved["model"]["name"],
        "args": args_of(given["model"]),
        "shape": SHAPE,
    }
    recipe |= {
        "batch_size": batch_size,
        "epochs": epochs,
        "label_smoothing": smoothing,
        "optimizer": optimizer["name"],
        **rates,
    }
    return {"workload": recipe, **normalization(file, resolved["preprocess"])}


def resolved_of(config, file):
    """A config with all defaults."""
    from wiring.build import (
        build,
    )  # takes jax, which some of the frameworks that are served do without

    return build(config, file).config


def args_of(part):
    """What a config says of a part."""
    return part.get("args", {}) if isinstance(part, dict) else {}


def normalization(file, preprocess):
    """The mean and the standard deviation that images in [0, 1] are normalized by."""
    names = [part["name"] for part in preprocess]
    if names not in (["to_unit"], ["to_unit", "normalize"]):
        raise UserError(
            f"{file}: preprocess: other frameworks are told of to_unit and normalize, not of {', '.join(names)}"
        )
    return {"mean": 0.0, "std": 1.0} | {
        name: value[0] for name, value in preprocess[-1]["args"].items()
    }
