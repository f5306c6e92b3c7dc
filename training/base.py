"""The protocols of training, on one page; Model is in model/base.py, and Data, Batch, Tokenizer and
Parsed are in data_loader/base.py.

A part is a public function whose return annotation is its kind. For an `Optimizer`, a `Schedule`, a
`Callback` or a `Tracker`, a config gives all arguments of the function; for the others those after
the ones that training passes (`given` in training/kinds.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NewType, TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Num, PyTree, UInt

from utils import UserError, parameters_of
from utils.forms import checked

if TYPE_CHECKING:
    from model.base import Model
    from training.devices.options import MeshOptions
    from training.options import CheckpointOptions, LoaderOptions, LoggingOptions, TrainingOptions

Function = TypeVar("Function", bound=Callable)
# A number of an option: an array where training.vary makes it an input of the program.
Number: TypeAlias = int | float | Array
Weights: TypeAlias = tuple[PyTree, PyTree]  # (params, state)
# The sets of a run, {"train": ..., "val": ..., "test": ...}: each is a Dataset
# (data_loader/base.py), or any iterable of batches.
Sets: TypeAlias = dict[str, Any]
Numbers: TypeAlias = Mapping[str, Any]  # {path in the config: a number of training.vary}


class Optimizer(NamedTuple):
    """Optax's protocol: updates are added to the params."""

    init: Callable[[PyTree], PyTree]  # params -> opt_state
    # (grads, opt_state, params) -> (updates, opt_state)
    update: Callable[..., tuple[PyTree, PyTree]]
    # "step": turns gradients into updates; "gradients": only changes gradients, as clipping does,
    # and must come before a step; "return": a step that may go back to earlier params, so that
    # nothing may change its updates; "": unknown, and never refused
    kind: str = ""


class Weighted(NamedTuple):
    """The value of an example that counts `weight` times in every mean, such as the mean over the
    tokens of a sequence and their number. The weight is a constant for the gradient."""

    value: Num[Any, "..."]  # on the device or the host
    weight: Float[Any, "..."]


# The return annotations of parts. At run time, each is only a name, by which training/kinds.py
# recognizes a part; for a type checker it is what the part returns.
if TYPE_CHECKING:
    Schedule: TypeAlias = Callable[[ArrayLike], ArrayLike]
    Loss: TypeAlias = Array | Weighted | dict[str, Array | Weighted]
    Metric: TypeAlias = PyTree
    Preprocessed: TypeAlias = PyTree
    Augmented: TypeAlias = PyTree
    Callback: TypeAlias = Any
    Tracker: TypeAlias = Any
else:
    Schedule = NewType("Schedule", Callable)  # step -> multiplier in [0, 1]
    # def fn(output, target) -> Loss: a scalar or a Weighted, or a dict of terms
    Loss = NewType("Loss", object)
    # def fn(output, target) -> Metric: the same; `fn.finish`, if any, maps the mean to the value
    Metric = NewType("Metric", object)
    # def fn(x) -> Preprocessed: the same in training and evaluation
    Preprocessed = NewType("Preprocessed", object)
    # def fn(key, x) -> Augmented: in training only. One that declares `target` returns (x, target);
    # one that moves no pixel of an image has the attribute `of_values`
    Augmented = NewType("Augmented", object)
    # an object with any of the methods of training/observers.py
    Callback = NewType("Callback", object)
    # an object with any of the methods that training/watching/publish.py calls
    Tracker = NewType("Tracker", object)


def is_weighted(value: object) -> TypeGuard[Weighted]:
    return isinstance(value, Weighted)


def check_value(what: str, value: PyTree) -> None:
    """Refuse a loss or a metric that is a tuple or a list: its numbers would be added."""
    if isinstance(value, dict):
        for name, term in value.items():
            check_value(f"{what}: {name}", term)
    elif is_weighted(value):
        check_value(what, value.value)
    elif isinstance(value, tuple | list):
        fix = "return a number, a Weighted (training/base.py) or a dict of terms"
        fix += "; what is only measured belongs into `metrics`"
        raise UserError(f"{what}: is a {type(value).__name__} of {len(value)} values; {fix}")


LossFunction: TypeAlias = Callable[..., Loss]
Metrics: TypeAlias = Mapping[str, Callable[..., Metric]]  # {label: function}
Functions: TypeAlias = Sequence[Callable[..., PyTree]]  # what preprocesses, or augments
# (losses, state, {metric: values}): the loss, or each of its terms, and the metrics have one value
# per example
Measured: TypeAlias = tuple[PyTree, PyTree, dict[str, PyTree]]

Mode = Literal["MEAN", "SUM", "SINGLE", "MAX", "MIN", "STD", "CONCAT"]
Freq = Literal["STEP", "EPOCH", "ANY"]
Phase = Literal["TRAIN", "VAL", "TEST", "EVAL", "ANY"]


class Tracked(NamedTuple):
    """A metric, and how, when and where it is measured."""

    # None for a metric that the objective returns by itself, under the same label
    function: Callable[..., Metric] | None
    mode: Mode = "MEAN"
    freq: Freq = "ANY"
    phase: Phase = "ANY"


@checked
def tracked(
    function: Callable[..., Metric] | None,
    mode: Mode = "MEAN",
    freq: Freq = "ANY",
    phase: Phase = "ANY",
) -> Tracked:
    """A metric with another mode, freq (STEP: log lines within an epoch, EPOCH: at its end) or
    phase."""
    if freq == "STEP" and phase in ("VAL", "TEST", "EVAL"):
        raise ValueError(
            f"freq: STEP is within an epoch of training, so {phase} would never be measured; "
            "use EPOCH, or phase TRAIN"
        )
    if freq == "STEP" and mode == "CONCAT":
        raise ValueError("freq: CONCAT gathers a whole epoch; use EPOCH")
    return Tracked(function, mode, freq, phase)


def part_name(part: Callable | Tracked) -> str:
    """The name of a function, also under functools.partial or in a Tracked."""
    function = part.function if isinstance(part, Tracked) else part
    function = getattr(function, "func", function)
    return getattr(function, "__name__", "")


def labelled(
    metrics: Mapping[str, Callable | Tracked] | Sequence[Callable | Tracked],
) -> dict[str, Tracked]:
    """{label: Tracked} of {label: metric}, or of a list of metrics, whose labels are the names of
    their functions."""
    rules = {}
    if isinstance(metrics, Mapping):
        named = [(label, label, metric) for label, metric in metrics.items()]
    else:
        named = [(str(i), part_name(metric), metric) for i, metric in enumerate(metrics)]
    for key, label, metric in named:
        if label in ("", "loss") or label in rules or "/" in label:
            raise UserError(
                f"metrics.{key}: the name {label!r} is taken, or has a '/', or is empty; "
                "give other names: {name: metric, ...}"
            )
        rules[label] = metric if isinstance(metric, Tracked) else Tracked(metric)
    return rules


def marked(**attributes: Any) -> Callable[[Function], Function]:
    """The decorator that gives a function attributes, by which training knows how to call it."""

    def with_attributes(function: Function) -> Function:
        vars(function).update(attributes)
        return function

    return with_attributes


def unchanged(value: PyTree) -> PyTree:
    return value


class Objective(NamedTuple):
    """What a model is trained for; it is called as `objective(params, state, batch, key,
    train)`."""

    # returns (loss per example, state, {metric: value per example}); a loss may be Weighted, or a
    # dict of terms whose means are added. One that declares `mask` gets, (B,), which examples are
    # genuine: for a loss that compares the examples of a batch with each other. One that declares
    # `step` gets how many steps were trained before
    apply: Callable[..., Measured]
    finish: Callable[[PyTree], PyTree] = unchanged  # {metric: mean} -> {metric: reported value}
    # if the model makes examples: (params, key, labels, *, state, ...) -> a batch of examples
    sample: Callable[..., PyTree] | None = None
    # (name, digest) of each thing that it computes with besides the data, such as a teacher; a run
    # is resumed only if they are unchanged
    fingerprints: tuple[tuple[str, str], ...] = ()
    step: ArrayLike = 0  # what `apply` gets as its `step`

    @property
    def declared(self) -> set[str]:
        """Which of the keywords `mask` and `step` `apply` takes."""
        return parameters_of(self.apply).keys() & {"mask", "step"}

    def __call__(
        self,
        params: PyTree,
        state: PyTree,
        batch: PyTree,
        key: Array,
        train: bool,
        mask: Bool[Array, "batch"] | None = None,
    ) -> Measured:
        """Without a `mask`, all examples of the batch are genuine."""
        declared = self.declared
        if mask is None and "mask" in declared:
            mask = jnp.ones(jax.tree.leaves(batch)[0].shape[0], bool)
        given = {"step": self.step, "mask": mask}
        given = {name: given[name] for name in declared}
        return self.apply(params, state, batch, key, train, **given)


class TrainState(NamedTuple):
    """The whole state of a replica: it is donated to each step, and a checkpoint holds it."""

    # steps, also those that `on_nonfinite: skip` refused; the key of one: fold_in(key(seed), step)
    step: Int[Array, "*replicas"]
    seed: UInt[Array, "*replicas"]
    params: PyTree
    state: PyTree
    opt: PyTree
    ema: PyTree | None  # averaged params, or None without them
    halted: Bool[
        Array, "*replicas"
    ]  # whether a step was not finite, so that all later ones are refused
    lr_scale: Float[
        Array, "*replicas"
    ]  # multiplies every update: the product of the factors of all callbacks

    def evaluated(self) -> tuple[PyTree, PyTree]:
        """The (params, state) that are evaluated and exported."""
        return getattr(self, evaluated_part(self._asdict())), self.state


# The prefix of the names of weights that no step changes and no checkpoint holds (model/base.py).
FROZEN = "state/frozen/"


def has_frozen(state: PyTree) -> bool:
    return isinstance(state, dict) and "frozen" in state


def without_frozen(state: PyTree) -> PyTree:
    """The running statistics of a model, without frozen weights."""
    return {k: v for k, v in state.items() if k != "frozen"} if has_frozen(state) else state


def with_frozen(state: PyTree, other: PyTree) -> PyTree:
    """The state with the frozen weights of `other`, if that has any."""
    return state | {"frozen": other["frozen"]} if has_frozen(other) else state


def evaluated_part(tree: Mapping[str, Any]) -> Literal["ema", "params"]:
    """The part that is evaluated and exported: "ema" if there are averaged params, else "params".
    `tree` is a dict of a TrainState's parts, or of the leaves in a checkpoint."""
    parts = {name.split("/")[0] for name, value in tree.items() if value is not None}
    return "ema" if "ema" in parts else "params"


class StepResult(NamedTuple):
    """What the step of an Update computes; `with_refusal` (training/update.py) keeps or refuses it,
    on the device."""

    new: TrainState  # with the new params, state, opt and ema
    grads: PyTree
    losses: PyTree  # one value per example, or a dict of terms that have one
    metrics: dict[str, PyTree]  # {label: one value per example}


class Update(NamedTuple):
    """How one batch changes a TrainState; the first `valid` examples of a batch are genuine."""

    init: Callable[[PyTree], tuple[PyTree, PyTree | None]]  # (opt_state, averaged params)
    step: Callable[[TrainState, PyTree, ArrayLike], StepResult]  # (state, batch, valid)
    # the cost of a step in forward passes of the objective, if known
    passes: int | None = None


def key_data(leaf: Any) -> Any:
    """The numbers of a random key, which some optimizers hold; any other leaf unchanged."""
    is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


@dataclass
class Parts:
    """What a run is made of, from a config (wiring/build.py) or from the arguments of `fit`."""

    model: "Model"
    objective: Callable[..., Objective | Callable]  # the factory that a config names
    update: Callable[..., Update]  # the factory that a config names
    optimizer: Optimizer
    loss: Callable[..., Loss] | None
    metrics: dict[str, Tracked]
    preprocess: tuple[Callable[..., Preprocessed], ...]
    augment: tuple[Callable[..., Augmented], ...]
    callbacks: tuple[Callback, ...]
    seed: int
    loader: "LoaderOptions"
    training: "TrainingOptions"
    checkpoint: "CheckpointOptions"
    logging: "LoggingOptions"
    mesh: "MeshOptions"
    sharding: Any  # the rules of training/devices/sharding.py
    # {name: a learning rate to log, a number or a function of the step}
    rates: Mapping[str, float | Schedule] = field(default_factory=dict)
    # {path: its value in each replica} of the numbers in training.vary, and the function
    # (parts, {path: number}) that returns the parts with these numbers in their place
    vary: dict[str, Any] = field(default_factory=dict)
    rebuild: "Callable[[Parts, Numbers], Parts]" = lambda parts, numbers: parts

    # Only of a config:
    source: str | None = None  # its name in messages
    config: dict[str, Any] | None = None  # resolved, with all defaults
    title: str | None = None
    run_name: str | None = None
    resume: str | None = None
    data: Any = None  # a Data
    facts: dict[str, Any] = field(default_factory=dict)  # what is known of the data
    example: PyTree = None  # one example of the data, as in a batch
    # {index in preprocess: the arguments that have yet to be computed from the training set}
    unfitted: dict[int, list[str]] = field(default_factory=dict)
    beyond: tuple[
        str, ...
    ] = ()  # the lines by which an untrusted config would act outside of its run
    own_files: Callable[[], dict[Path, Path]] | None = (
        None  # {path in the copy: file} of the user's modules that it imports
    )
