"""The sections of a config that name no parts: keys, types, defaults, ranges. `fit` takes them too.

The comment above or beside a field becomes its description in config.schema.json.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import (
    Annotated,
    Literal,
    NamedTuple,
    Required,
    TypedDict,
    TypeVar,
    get_type_hints,
)

from jaxtyping import PyTree

from data_loader.base import Batch
from data_loader.loader import collated
from training.base import Tracker
from utils import UserError
from utils.forms import (
    Count,
    CountOrZero,
    LocalPath,
    Positive,
    at_most,
    between_0_and_1,
    check_options,
    form,
    nonnegative,
)

Name = TypeVar("Name", bound=str | None)


def comments(options: Callable) -> dict[str, str]:
    """{name: the comment above or beside it} of a function, a dataclass or a TypedDict."""
    option = r"^((?:    # .*\n)*)    (\w+): .*?(?:  # (.*))?$"
    file = inspect.getsource(sys.modules[options.__module__])  # that of a class alone takes 20 ms
    own = re.search(rf"^(class|def) {options.__name__}\b(.|\n)*?(?=\n\n\n|\Z)", file, re.MULTILINE)
    found = re.findall(option, own[0] if own else "", re.MULTILINE)
    texts = {name: " ".join(re.findall("# (.*)", above)) or beside for above, name, beside in found}
    return {name: text for name, text in texts.items() if text}


def text_of(options: type) -> str:
    """The options of a section, with their types, defaults and comments."""
    hints, texts = get_type_hints(options, include_extras=True), {}
    with suppress(OSError):  # there is no source
        texts = comments(options)
    return "\n".join(
        f"{each.name}: {form(hints[each.name]).shown.replace('`', '')} = {each.default!r}\n"
        f"    {texts.get(each.name, '')}"
        for each in fields(options)
    )


class OfHeldOut(NamedTuple):
    """The collate_fn of held-out sets, whose errors name its own option."""

    collate_fn: Batch

    def __call__(self, examples: Sequence[PyTree]) -> Batch:
        return collated(examples, self.collate_fn, "loader.eval_collate_fn")


@dataclass(frozen=True)
class LoaderOptions:
    """How examples become batches."""

    batch_size: Count = 128  # examples in one step, over all devices
    shuffle: bool = True  # take the training set in another order in every epoch
    # held out of the training set: a count, or a fraction below 1
    val_size: Annotated[int | float, nonnegative] = 0
    split_seed: int = 0  # the seed that decides which examples `val_size` holds out
    collate_fn: Batch | None = None  # makes a batch from a list of examples
    eval_batch_size: Count | None = None  # the batch size of held-out sets; null: batch_size
    eval_collate_fn: Batch | None = None  # the collate_fn of held-out sets; null: collate_fn
    device_budget_mb: CountOrZero = 2048  # larger datasets are streamed from the host
    # how many batches of a streamed dataset are read ahead
    prefetch: Annotated[Count, at_most(1024)] = 2

    def __post_init__(self) -> None:
        check_options(self)

    def of(self, set_name: str) -> "LoaderOptions":
        """The options of one set; held-out sets use `eval_batch_size` and `eval_collate_fn`."""
        size = self.eval_batch_size or self.batch_size
        own = self.eval_collate_fn
        collate_fn = self.collate_fn if own in (None, self.collate_fn) else OfHeldOut(own)
        if set_name == "train" or (size, collate_fn) == (self.batch_size, self.collate_fn):
            return self
        return replace(self, batch_size=size, collate_fn=collate_fn)

    def size_option(self, set_name: str) -> str:
        """The option that gives the size of a set's batches."""
        of_held_out = set_name != "train" and self.eval_batch_size
        return "loader.eval_batch_size" if of_held_out else "loader.batch_size"


class PretrainedOptions(TypedDict, total=False):
    """Which weights a run starts from. The regexes match the names in the model's table of
    parameters; the names of the model's state begin with `state/`."""

    path: Required[LocalPath]  # a checkpoint, a safetensors file, or a folder of HuggingFace
    fresh: tuple[str, ...]  # regexes of the leaves that keep their initial values
    # a ready rule file, the path of one, or a list of rules: [regex, name of a leaf, form]
    rules: LocalPath | tuple[tuple, ...]
    # rules that are applied before `rules`, each of which must match a name
    rename: tuple[tuple, ...]
    interpolate: tuple[str, ...]  # regexes of position embeddings resized to the model's image
    probe: bool  # refuse weights if the code in model/ computes something else now; default true


def check_pretrained(value: object) -> None:
    """Refuse weights in memory, where the path of a file belongs."""
    if holds_weights(value):
        fix = "model._replace(init=lambda key: (run.params, run.state)) as the model"
        raise ValueError(f"pretrained: names a file; to start from weights in memory, pass {fix}")


def holds_weights(value: object) -> bool:
    """Whether this is a run or its weights, rather than a path with options."""
    if not isinstance(value, dict):
        return isinstance(value, tuple) or hasattr(value, "params")
    is_tree = any(isinstance(a, dict | list | tuple) or hasattr(a, "shape") for a in value.values())
    return is_tree and not value.keys() & PretrainedOptions.__annotations__.keys()


class EvaluationEvery(TypedDict, total=False):
    """When the held-out sets are evaluated."""

    steps: Count
    epochs: Count


class Every(TypedDict, total=False):
    """When something happens."""

    steps: Count  # after every n-th step
    epochs: Count  # after every n-th epoch
    batches: Count  # after every n-th batch of an epoch
    seconds: Positive  # after the first chunk that ends so much later than the last time
    at: Count  # after this step


@dataclass(frozen=True)
class TrainingOptions:
    """How long a run trains, and in which way."""

    # passes over the training set; null: as many as max_steps or max_seconds takes
    epochs: Count | None = 10
    # the steps after which the run ends, if its epochs have more; schedules end at this step
    max_steps: Count | None = None
    max_seconds: Positive | None = None  # the seconds after which the run ends
    # epochs between two evaluations; 0: never; {"steps": n}: also within epochs
    eval_every: CountOrZero | EvaluationEvery = 1
    eval_initial: bool = False  # also evaluate before the first step
    # the most batches to take of each held-out set in an evaluation, but not in that of test_at=end
    limit_eval_batches: Count | None = None
    # end: evaluate the test set only once, after training, with the best checkpoint
    test_at: Literal["epochs", "end"] = "epochs"
    limit_batches: Count | None = None  # the most batches to take of each set in one pass over it
    overfit_batches: CountOrZero = 0  # train on the first batches only, in every epoch; 0: on all
    # the type that the model computes in; params and optimizer state stay in float32
    precision: Literal["float32", "bfloat16"] = "float32"
    replicas: Annotated[Count, at_most(4096)] = 1  # how many runs are trained side by side
    # {path of a number: its value in each replica}, for numbers of the model, loss, optimizer and
    # so on; the replicas then have the same seed unless "seed" is among them
    vary: dict | None = None
    accumulate: Count = 1  # how many microbatches a batch is cut into
    # what to do at a step whose loss or gradients are not finite
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    # when a step that is not finite stops the run, name the layer and the operation at fault
    detect_nans: bool = False
    # how often a non-finite run may go back to its last checkpoint and continue with another seed
    rollbacks: Count = 3
    # the decay of averaged weights, which are then evaluated and saved
    ema: Annotated[float, between_0_and_1] | None = None
    # the weights to start from: the path of a checkpoint, or an object
    pretrained: LocalPath | PretrainedOptions | None = None

    def __post_init__(self) -> None:
        check_pretrained(self.pretrained)
        check_options(self)
        if self.epochs is None and self.max_steps is None and self.max_seconds is None:
            raise ValueError(
                "epochs: is null, so a limit must end the run; set max_steps or max_seconds"
            )
        for path, values in (self.vary or {}).items():
            if not isinstance(values, list | tuple) or not values:
                form = 'a path is one key, as in {"optimizer.args.lr": [0.01, 0.003]}'
                raise ValueError(f"vary.{path}: must be a list of numbers, got {values!r}; {form}")

    def evaluations(self) -> Every:
        """When the held-out sets are evaluated, as the `every` of an observer."""
        if isinstance(self.eval_every, dict):
            return {**self.eval_every}
        return {"epochs": self.eval_every} if self.eval_every else {}


@dataclass(frozen=True)
class CheckpointOptions:
    """When checkpoints are written, in what format, and which are kept."""

    dir: LocalPath = "saved"  # the folder that holds the folders of runs, by title
    every_epochs: CountOrZero = 1  # 0: not by epochs; the end of a run is saved in any case
    every_steps: CountOrZero = 0  # 0: not by steps
    every_seconds: Annotated[int | float, nonnegative] = 0  # 0: not by time
    keep: Count | None = 5  # how many of the last checkpoints are kept; null: all
    # the metric by which the best checkpoints are kept, too; auto: the loss of the validation set,
    # if there is one; null: none
    monitor: str | None = "auto"
    # whether `monitor` is good when low or high; auto: by its name
    mode: Literal["auto", "min", "max"] = "auto"
    save_top_k: Count = 1  # how many of the best are kept
    save_optimizer_state: bool = True  # a run that was killed can only be resumed with it
    # auto: safetensors with one process, Orbax with several
    format: Literal["auto", "safetensors", "orbax"] = "auto"
    # whether the run stops when a checkpoint or a log line cannot be written
    on_write_error: Literal["stop", "go_on"] = "stop"

    def __post_init__(self) -> None:
        check_options(self)
        if self.save_top_k > 1 and self.monitor is None:
            why = "no metric decides which are the best; name one with `monitor`"
            raise ValueError(f"save_top_k: is {self.save_top_k}, but {why}")

    def sign(self) -> Literal[-1, 1]:
        """1 if the monitored metric should be low, -1 if it should be high."""
        return sign_of(self.monitor, self.mode, "checkpoint.mode")


def monitor_for(monitor: Name, sets: Iterable[str], otherwise: Name) -> Name | str:
    """The metric that `monitor` means in a run that evaluates these sets: "auto" is the loss of
    `val`, else of the first validation set, else `otherwise`."""
    validation = [name for name in sets if name not in ("train", "test")]
    if monitor != "auto" or not validation:
        return otherwise if monitor == "auto" else monitor
    return f"{'val' if 'val' in validation else validation[0]}_loss"


LOW_IS_GOOD = {"loss", "error", "mse", "rmse", "mae", "perplexity", "bits"}
HIGH_IS_GOOD = {"accuracy", "f1", "precision", "recall", "auc", "iou"}


def sign_of(monitor: str | None, mode: str, key: str) -> Literal[-1, 1]:
    """1 if a metric should be low, -1 if it should be high; `auto` decides by the metric's name."""
    words = {"loss"} if monitor in (None, "auto") else set(monitor.split("_"))
    low, high = words & LOW_IS_GOOD, words & HIGH_IS_GOOD
    if mode == "auto" and bool(low) == bool(high):
        why = f"cannot tell whether {monitor!r} is good when low or high"
        raise UserError(f"{key}: {why}; use 'min' or 'max'")
    return -1 if mode == "max" or (mode == "auto" and high) else 1


@dataclass(frozen=True)
class LoggingOptions:
    """What a run logs, how often, and where."""

    every_steps: CountOrZero = 50  # after every n-th batch of an epoch; 0: not by batches
    every_seconds: Annotated[int | float, nonnegative] = 0  # 0: not by time
    # also log the values of every single step, which are written with the next log line
    log_all: bool = False
    learning_rate: bool = True  # log the learning rate
    gradient_norm: bool = False  # log the norm of the gradient
    parameter_norm: bool = False  # log the norm of the weights
    leaf_statistics: bool = False  # the gradient norm and the parameter norm of each leaf
    # histograms of the weights at the end of every epoch, for the trackers that show them
    histograms: bool = False
    trackers: tuple[Tracker, ...] = ()  # where the values go besides metrics.jsonl
    report: bool = True  # write report.html at the end
    # draw a bar over the steps of an epoch where the output is a terminal or a notebook
    progress_bar: bool = True

    def __post_init__(self) -> None:
        check_options(self)


for section in (LoaderOptions, TrainingOptions, CheckpointOptions, LoggingOptions):
    section.__doc__ = f"{section.__doc__}\n\n{text_of(section)}"  # for help()
