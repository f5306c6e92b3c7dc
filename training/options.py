"""The sections of a config that name no parts: their keys, types, defaults and ranges. `fit` takes the same names."""

import difflib
import math
from dataclasses import dataclass
from os import PathLike
from typing import Literal, Required, TypedDict, get_args, get_origin, get_type_hints

from data_loader.base import Batch
from training.base import Tracker
from utils import UserError


def check(options, **at_least):
    """Refuse values of another type, outside their choices or below their smallest, all in one ValueError, a line each."""
    wrong = []
    for name, annotation in get_type_hints(type(options)).items():
        value, choices = getattr(options, name), get_args(annotation)
        if get_origin(annotation) is Literal and value not in choices:
            wrong.append(f"{name}: must be one of {', '.join(map(repr, choices))}, got {value!r}")
        elif name in at_least and not isinstance(value, annotation):
            wrong.append(
                f"{name}: must be {getattr(annotation, '__name__', annotation)}, got {value!r}"
            )
        elif name in at_least and value is not None and value < at_least[name]:
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


class PretrainedOptions(TypedDict, total=False):
    """Which weights a run starts from; leaves are called as in the model's table, those of its state `state/...`."""

    path: Required[str]
    fresh: tuple[str, ...]  # regexes of the leaves that keep their initial values
    rename: tuple[
        tuple[str, str | None], ...
    ]  # (regex, replacement) for the file's names; null leaves one out
    probe: bool  # refuse weights whose model/ has since changed its meaning; true


def check_pretrained(given):
    """Refuse what is neither a path nor PretrainedOptions, all in one ValueError, a line each."""
    if given is None or (isinstance(given, str | PathLike) and given):
        return
    if not isinstance(given, dict):
        raise ValueError(f"pretrained: must be a path, an object with one, or null, got {given!r}")
    known, wrong = list(PretrainedOptions.__annotations__), []
    for key in [key for key in given if key not in known]:
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        wrong.append(f"pretrained: no such key {key!r}{hint} ({', '.join(known)})")
    path, fresh, rename = given.get("path"), given.get("fresh", ()), given.get("rename", ())
    if not isinstance(path, str | PathLike) or not path:
        wrong.append(f"pretrained: path must be that of a checkpoint, got {path!r}")
    if not is_list(fresh) or not all(isinstance(regex, str) for regex in fresh):
        wrong.append(f"pretrained: fresh must be a list of regexes, got {fresh!r}")
    if not is_list(rename) or not all(is_list(rule) and is_renaming(*rule) for rule in rename):
        wrong.append(
            f"pretrained: rename must be a list of [regex, replacement or null], got {rename!r}"
        )
    if not isinstance(given.get("probe", True), bool):
        wrong.append(f"pretrained: probe must be true or false, got {given['probe']!r}")
    if wrong:
        raise ValueError("\n".join(wrong))


def is_list(value):
    return isinstance(value, list | tuple)


def is_renaming(regex=None, replacement=0, *more):
    """Whether the items of a list are a regex and its replacement."""
    return isinstance(regex, str) and isinstance(replacement, str | None) and not more


@dataclass(frozen=True)
class TrainingOptions:
    """How long and in what manner a run trains."""

    epochs: int = 10
    eval_every: int = 1  # epochs; 0: never
    eval_initial: bool = False  # before the first step too
    test_at: Literal["epochs", "end"] = (
        "epochs"  # end: the test set once, after training, with the best checkpoint
    )
    limit_batches: int | None = None  # at most so many of every set, in each pass over it
    overfit_batches: int = 0  # train on the first ones alone, the same in every epoch; 0: on all
    precision: Literal["float32", "bfloat16"] = "float32"
    replicas: int = 1  # seeds trained side by side
    accumulate: int = 1  # microbatches a batch is cut into
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    detect_nans: bool = False  # a run that stops by a step that is not finite names the layer and the operation that made it
    rollbacks: int = (
        3  # how often a run that is not finite goes back to its last checkpoint, with another seed
    )
    ema: float | None = None  # decay of the averaged weights, which are then evaluated and saved
    pretrained: str | PretrainedOptions | None = None  # a checkpoint to start from

    def __post_init__(self):
        check(
            self,
            epochs=1,
            eval_every=0,
            limit_batches=1,
            overfit_batches=0,
            replicas=1,
            accumulate=1,
            rollbacks=1,
        )
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema: must lie between 0 and 1, got {self.ema}")
        check_pretrained(self.pretrained)


@dataclass(frozen=True)
class CheckpointOptions:
    """When checkpoints are written, in what form, and which are kept."""

    dir: str = "saved"
    every_epochs: int = 1  # 0: at the end only, or as the next two say
    every_steps: int = 0  # 0: never
    every_seconds: int | float = 0  # 0: never
    keep: int | None = 5  # the last ones; null: all
    monitor: str | None = None  # the best by this metric are kept besides the last
    mode: Literal["auto", "min", "max"] = "auto"
    save_top_k: int = 1  # how many of the best
    save_optimizer_state: bool = True  # without it a run that was killed cannot be gone on with
    format: Literal["auto", "safetensors", "orbax"] = (
        "auto"  # auto: safetensors, or Orbax with several processes
    )
    on_write_error: Literal["stop", "go_on"] = "stop"

    def __post_init__(self):
        check(self, every_epochs=0, every_steps=0, every_seconds=0, keep=1, save_top_k=1)
        if not math.isfinite(self.every_seconds):
            raise ValueError(f"every_seconds: must be finite, got {self.every_seconds}; 0 is never")
        if self.save_top_k > 1 and self.monitor is None:
            raise ValueError(
                f"save_top_k: {self.save_top_k} best by what? Name a metric with `monitor`"
            )

    def sign(self):
        """1 where the monitored metric is to be low, -1 where it is to be high."""
        return sign_of(self.monitor, self.mode, "checkpoint.mode")


LOW_IS_GOOD = {"loss", "error", "mse", "rmse", "mae", "perplexity"}
HIGH_IS_GOOD = {"accuracy", "f1", "precision", "recall", "auc", "iou"}


def sign_of(monitor, mode, place):
    """1 where a metric is to be low, -1 where it is to be high; `auto` tells by its name."""
    words = set((monitor or "loss").split("_"))
    low, high = words & LOW_IS_GOOD, words & HIGH_IS_GOOD
    if mode == "auto" and bool(low) == bool(high):
        raise UserError(
            f"{place}: cannot tell whether {monitor!r} is good when low or high; say 'min' or 'max'"
        )
    return -1 if mode == "max" or (mode == "auto" and high) else 1


@dataclass(frozen=True)
class LoggingOptions:
    """How often a run reports, what, and to whom."""

    every_steps: int = 50  # 0: not by steps
    every_seconds: int | float = 0  # 0: not by time
    log_all: bool = False  # the values of every single step as well, written together
    learning_rate: bool = True
    gradient_norm: bool = False
    parameter_norm: bool = False
    leaf_statistics: bool = False  # both norms of each leaf
    histograms: bool = (
        False  # of the weights, at the end of every epoch, for the trackers that show them
    )
    trackers: tuple[Tracker, ...] = ()
    report: bool = True  # report.html at the end

    def __post_init__(self):
        check(self, every_steps=0, every_seconds=0)
        if not math.isfinite(self.every_seconds):
            raise ValueError(f"every_seconds: must be finite, got {self.every_seconds}; 0 is never")


def check_together(loader, training, checkpoint):
    """Refuse what is sound in each section but not in both, a line each."""
    wrong = []
    if loader.batch_size % training.accumulate:
        wrong.append(
            f"training.accumulate: a batch of {loader.batch_size} does not divide into {training.accumulate} microbatches"
        )
    if training.on_nonfinite == "rollback" and not checkpoint.save_optimizer_state:
        wrong.append(
            "training.on_nonfinite: 'rollback' needs whole checkpoints; set checkpoint.save_optimizer_state to true"
        )
    if wrong:
        raise ValueError("\n".join(wrong))
