# ruff: noqa: B006 (no default is ever changed)
# pyright: reportArgumentType=false, reportInvalidTypeForm=false
# The defaults are JSON, which `wiring.tree` turns into what the annotations say.
"""The keys of a config: it is a call of `config`, whose arguments may be sections and parts.

The comment above or beside an argument becomes its description in config.schema.json.
"""

from dataclasses import is_dataclass
from inspect import Parameter
from typing import Annotated, Any, Literal

from data_loader.base import Data
from model.base import Model
from training.base import (
    Augmented,
    Callback,
    Loss,
    Metric,
    Objective,
    Optimizer,
    Preprocessed,
    Schedule,
    Update,
)
from training.devices.options import DistributedOptions, MeshOptions, Sharding
from training.options import CheckpointOptions, LoaderOptions, LoggingOptions, TrainingOptions
from utils.forms import Range, Seed, show
from wiring.config import DEFAULT_PARTS, no_folder_name
from wiring.parts import arguments


class FolderName(Range):
    """The texts that can name a folder."""

    def fault(self, value: Any, given: Any) -> str:
        why = no_folder_name(value)
        return f"must be usable as a folder name, {why}" if why else ""


class RunName(FolderName):
    """The texts that can name the folder of a run."""

    def fault(self, value: Any, given: Any) -> str:
        if value.startswith((".", "checkpoint-")):
            return f"must not begin with '.' or 'checkpoint-', found {show(value)}"
        return super().fault(value, given)


def config(
    *,
    # the schema by which an editor checks the file
    schema: str = "config.schema.json",
    # the name of the folder, in `checkpoint.dir`, that holds the runs of this config
    title: Annotated[str, FolderName("a folder name")] = "run",
    # the name of the run's folder, also its name and id at trackers; `null`: date and time
    run_name: Annotated[str, RunName("a folder name")] | None = None,
    seed: Seed = 0,  # the seed of everything random
    # `null`, or `"auto"`: continue the latest unfinished run of this title (to resume one run, use
    # `--resume RUN`)
    resume: Literal["auto"] | None = None,
    model: Model,
    data: Data,
    loader: LoaderOptions = {},
    preprocess: tuple[Preprocessed, ...] = (),
    augment: tuple[Augmented, ...] = (),
    loss: Loss | None = None,
    metrics: tuple[Metric, ...] | dict[str, Metric] = (),
    objective: Objective = DEFAULT_PARTS["objective"],
    optimizer: Optimizer,
    schedule: Schedule | None = DEFAULT_PARTS["schedule"],
    update: Update = DEFAULT_PARTS["update"],
    training: TrainingOptions = {},
    checkpoint: CheckpointOptions = {},
    logging: LoggingOptions = {},
    callbacks: tuple[Callback, ...] = (),
    mesh: MeshOptions = {},
    # a preset or rules that say how weights are divided over devices:
    # [docs/several_devices.md](several_devices.md)
    sharding: Sharding = None,
    distributed: DistributedOptions = {},
) -> None:
    """The keys of a config. A part is named by a string or an object, a section is an object."""


def keys() -> dict[str, Parameter]:
    """{key: Parameter}; the key `$schema`, as editors expect it, cannot be a name in Python."""
    schema, *others = arguments(config).items()
    return {"$schema": schema[1], **dict(others)}


def sections() -> dict[str, type]:
    """{key: the dataclass of its options}"""
    annotations = {key: parameter.annotation for key, parameter in keys().items()}
    return {
        key: each
        for key, each in annotations.items()
        if isinstance(each, type) and is_dataclass(each)
    }
