"""The sections of a config that name no parts: their keys, types, defaults and ranges. `fit` takes the same names."""

from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from data_loader.base import Batch


def check(options, **at_least):
    """Refuse values of another type, outside their choices or below their smallest, all in one ValueError, a line each."""
    wrong = []
    for name, annotation in get_type_hints(type(options)).items():
        value, choices = getattr(options, name), get_args(annotation)
        if get_origin(annotation) is Literal and value not in choices:
            wrong.append(f"{name}: must be one of {', '.join(map(repr, choices))}, got {value!r}")
        elif name in at_least and not isinstance(value, annotation):
            wrong.append(f"{name}: must be {getattr(annotation, '__name__', annotation)}, got {value!r}")
        elif name in at_least and value < at_least[name]:
            wrong.append(f"{name}: must be at least {at_least[name]}, got {value}")
    if wrong:
        raise ValueError("\n".join(wrong))


@dataclass(frozen=True)
class LoaderOptions:
    """How examples become batches."""

    batch_size: int = 128
    shuffle: bool = True
    val_size: int | float = 0  # held out of the training set: a count, or a share below 1
    split_seed: int = 0
    collate_fn: Batch | None = None
    device_budget_mb: int = 2048  # larger datasets are streamed from the host
    prefetch: int = 2  # batches read ahead where data is streamed

    def __post_init__(self):
        check(self, batch_size=1, val_size=0, device_budget_mb=0, prefetch=1)


@dataclass(frozen=True)
class TrainingOptions:
    """How long and in what manner a run trains."""

    epochs: int = 10
    eval_every: int = 1  # epochs; 0: never
    precision: Literal["float32", "bfloat16"] = "float32"
    replicas: int = 1  # seeds trained side by side
    accumulate: int = 1  # microbatches a batch is cut into
    on_nonfinite: Literal["stop", "skip"] = "stop"
    ema: float | None = None  # decay of the averaged weights, which are then evaluated and saved
    pretrained: str | None = None  # a checkpoint to start from

    def __post_init__(self):
        check(self, epochs=1, eval_every=0, replicas=1, accumulate=1)
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema: must lie between 0 and 1, got {self.ema}")


def check_together(loader, training):
    """Refuse what is sound in each section but not in both."""
    if loader.batch_size % training.accumulate:
        raise ValueError(
            f"training.accumulate: a batch of {loader.batch_size} does not divide into {training.accumulate} microbatches"
        )


@dataclass(frozen=True)
class CheckpointOptions:
    """Which checkpoints are written, and which are kept."""

    dir: str = "saved"
    every_epochs: int = 1
    keep: int = 5
    monitor: str | None = None  # the best by this metric is kept besides the last
    mode: Literal["min", "max"] = "min"

    def __post_init__(self):
        check(self, every_epochs=1, keep=1)


@dataclass(frozen=True)
class LoggingOptions:
    """How often a run reports."""

    every_steps: int = 50

    def __post_init__(self):
        check(self, every_steps=1)
