"""A run in progress: how far it is, its clock, and the values that it reports by name."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from training.base import Mode, Schedule, TrainState, Weights, unchanged
from training.engine import quick
from training.metrics import phase_of
from training.observers import name_of, reported_by
from training.options import monitor_for
from training.rows import Row, Sums, TrainingSums, per_leaf, results_of_rows, unweighted
from utils import UserError, named_leaves

if TYPE_CHECKING:
    from training.checkpoint.keeper import Best
    from training.engine import Trainer
    from training.observers import Point
    from training.recipe import Recipe

SHOWN = 4  # values in repr(run)
# The keys of a row that are no values.
NOT_VALUES = ("epoch", "step", "end_of_epoch", "evaluation", "initial", "final")
BLOCK = 4096  # steps whose learning rates are computed at once
# The reported values that depend on time, and so differ between equal runs.
TIMES = ("seconds", "compile_seconds", "steps_per_second", "examples_per_second", "waiting")
TIMES += ("tokens_per_second", "mfu")


@dataclass(repr=False)
class Run:
    """A run in progress, or finished. Only the loop changes it."""

    trainer: Trainer
    epochs: int | None  # None: a limit of steps or seconds ends it
    steps: int | None  # in an epoch; None if unknown
    sums: TrainingSums  # of the epoch in progress
    epoch: int = 0  # the epoch in progress, or the last one
    completed: int = 0  # epochs trained to their end
    position: int = 0  # batches taken of the epoch in progress
    line_position: int = 0  # the position of the last log line in this epoch
    step: int = 0  # steps in all epochs, refused ones included
    metrics: dict[str, Any] = field(default_factory=dict)  # of the latest log line or epoch
    row: dict[str, Any] = field(default_factory=dict)  # the latest row of an epoch or an evaluation
    throughput: dict[str, float] | None = (
        None  # since the log line before, if one ends at this step
    )
    arrays: dict[str, PyTree] = field(
        default_factory=dict
    )  # the results of metrics for callbacks alone
    each_step: dict[str, np.ndarray] = field(
        default_factory=dict
    )  # {name: array}: the steps since the last line
    evaluated: list[str] = field(default_factory=list)  # the held-out sets of the latest evaluation
    history: list[dict[str, Any]] = field(default_factory=list)  # one row per epoch
    # While the evaluations and checkpoints that are due here are not done: "steps" within an epoch;
    # "epoch" at its end, after on_steps; "evaluation" after the values of its training are reported
    open_at: str | None = None
    resumed: bool = False  # whether it began from a checkpoint
    stopped: bool = False
    stopped_by: str | None = None  # the reason for the stop, for the log
    for_good: bool = False  # whether it must not be resumed, as after early stopping
    budget_exhausted: str | None = None  # the option that set the budget that ended it
    signal: str | None = None  # the signal, or the reason of a `pause`, that ended it early
    untested: bool = False  # whether the final test is still to be done
    best: Best | None = None  # at the end; None without a folder
    # the first replica's (params, state) of `best`, if the run ends with these and not the latest
    restored: Weights | None = None
    # whether all trackers ended; a stuck one would also block the interpreter
    published: bool = True

    def __repr__(self) -> str:
        """One line: how far it is, and its latest values, with held-out sets first."""
        values = {k: v for k, v in self.metrics.items() if "/" not in k and not k.endswith("_norm")}
        names = sorted(values, key=lambda name: name.startswith("train_"))[:SHOWN]
        shown = "".join(f", {name} {values[name]:.4g}" for name in names)
        left = f", stopped by {self.stopped_why}" if self.cut_short else ""
        which = f", with the weights of {self.weights_from}" if self.restored else ""
        of = f" of {self.epochs}" if self.epochs else ""
        done = f"{self.completed}{of} epochs, step {self.step}"
        return f"Run({done}{left}{which}{shown})"

    def states(self) -> list[TrainState]:
        """The TrainState of each replica, which for a `late` observer may be a chunk ahead of
        `step`. The next step reuses its memory, so copy what you keep."""
        return self.trainer.replica_states()

    def evaluated_weights(self) -> Weights:
        return self.restored or self.states()[0].evaluated()

    @property
    def weights_from(self) -> str:
        """To which weights `params`, `state` and `metrics` belong, in words."""
        return self.best.name if self.best and self.restored else "the last weights"

    @property
    def params(self) -> PyTree:
        """A copy of the first replica's params that are evaluated: the averaged ones if there are
        any."""
        return jax.tree.map(jnp.copy, self.evaluated_weights()[0])

    @property
    def state(self) -> PyTree:
        """A copy of the running statistics that belong to `params`."""
        return jax.tree.map(jnp.copy, self.evaluated_weights()[1])

    def record(self, elapsed: float) -> dict[str, Any]:
        """The loop's part of a checkpoint's record; `elapsed` are the seconds of this epoch."""
        within = bool(self.position)
        return {
            "step": self.step,
            "epoch": self.epoch if within else self.completed,
            "position": self.position,
            "lined": self.line_position,
            "elapsed": elapsed if within else 0.0,
            "stopped": self.for_good,
            "metrics": self.metrics,
        }

    def go_to(self, point: Point) -> None:
        """Continue from a Point."""
        record = point.record
        self.step, self.position, self.open_at = record["step"], record["position"], None
        self.line_position = record["lined"]
        self.epoch, self.completed = record["epoch"], record["epoch"] - bool(self.position)
        # Earlier versions wrote null for what is not finite.
        values = record["metrics"].items()
        self.metrics = {name: float("nan") if v is None else v for name, v in values}
        self.history, self.sums = point.history, point.sums or self.sums
        self.for_good = self.for_good or record["stopped"]
        self.stopped, self.budget_exhausted = bool(self.signal) or self.for_good, None

    @property
    def stopped_why(self) -> str:
        """What stopped it. If that happened before a resume, it was a callback."""
        return self.signal or self.stopped_by or "a callback"

    @property
    def cut_short(self) -> bool:
        """Whether it was stopped before all of it was done."""
        return self.stopped and (self.untested or not self.finished)

    @property
    def finished(self) -> bool:
        """Whether every epoch was trained to its end."""
        return self.epochs is not None and self.completed >= self.epochs


class Clock:
    """How fast a run trains, and how much of its `max_seconds` is spent; the time of compilations
    is reported separately. `tokens` is the number of tokens in an example of text;
    `utilisation(examples_per_second)` is the MFU, if known."""

    def __init__(
        self,
        trainer: Trainer,
        tokens: int | None = None,
        utilisation: Callable[[float], float] | None = None,
        max_seconds: float | None = None,
    ) -> None:
        self.trainer, self.tokens, self.utilisation = trainer, tokens, utilisation
        self.max_seconds, self.first = max_seconds, time.monotonic()
        self.spent_before = 0.0  # seconds before the run was resumed, counted from now on
        self.seconds = self.waited = 0.0  # of training in all, and of waiting for batches in it
        self.start_epoch(0.0)
        self.start_training()

    def spent(self) -> float:
        """The seconds of the run so far, with those before it was resumed."""
        return self.spent_before + time.monotonic() - self.first

    def is_spent(self) -> bool:
        return self.max_seconds is not None and self.spent() >= self.max_seconds

    def continue_after(self, seconds: float) -> None:
        """The run is resumed after so many seconds, or goes back, when none are won back."""
        self.spent_before, self.first = max(self.spent(), seconds), time.monotonic()

    def now(self) -> tuple[float, float]:
        """(the time, the seconds of waiting for batches so far)"""
        return time.perf_counter(), self.trainer.feed.waited

    def start_epoch(self, elapsed: float) -> None:
        """An epoch begins, or is resumed after `elapsed` seconds of it."""
        self.began = time.perf_counter() - elapsed
        self.first_compiled = self.trainer.compile_seconds()

    def start_training(self, in_epoch: int = 0, in_line: int = 0) -> None:
        """The epoch's steps begin, or are resumed after so many examples of the epoch, and of its
        log line in progress."""
        self.training, self.trained = self.now(), {}
        self.seen_before, self.line_seen_before = in_epoch, in_line
        self.line_seconds = self.line_waited = 0.0  # of the chunks since the last log line
        self.charged_until = time.perf_counter()  # all earlier time belongs to a chunk

    # A chunk is sent, then the one before it is read, so each second is charged to one of them:
    # sending a chunk is its own time, also where it waits for batches or for the device. All else,
    # such as the work of observers, belongs to the chunk that is read next.

    def sent(self, before: tuple[float, float]) -> tuple[float, float]:
        """A chunk was sent since the moment `before`: what `done` needs to know of it."""
        seconds, waited = (now - then for now, then in zip(self.now(), before, strict=True))
        self.charged_until += seconds
        return seconds, waited

    def done(self, sending: tuple[float, float]) -> float:
        """The seconds of a chunk that has just been read."""
        now, (seconds, waited) = time.perf_counter(), sending
        seconds = max(seconds + now - self.charged_until, 1e-6)
        self.charged_until = now
        self.line_seconds, self.line_waited = self.line_seconds + seconds, self.line_waited + waited
        self.seconds, self.waited = self.seconds + seconds, self.waited + waited
        return seconds

    def new_line(self, steps: int, examples: int) -> dict[str, float]:
        """The throughput since the last log line; the `examples` are all those of the line."""
        examples -= self.line_seen_before
        throughput = self.throughput(steps, examples, self.line_seconds, self.line_waited)
        self.line_seconds, self.line_waited, self.line_seen_before = 0.0, 0.0, 0
        return throughput

    def end_training(self, steps: int, examples: int) -> None:
        """The epoch's steps are done, with all of its examples."""
        seconds, waited = (now - then for now, then in zip(self.now(), self.training, strict=True))
        self.trained = self.throughput(steps, examples - self.seen_before, seconds, waited)

    def throughput(
        self, steps: int, examples: int, seconds: float, waited: float
    ) -> dict[str, float]:
        """{name: value} of steps that took so many seconds, with those of waiting for batches."""
        rates = {"steps_per_second": steps / seconds, "examples_per_second": examples / seconds}
        if self.tokens:
            rates["tokens_per_second"] = self.tokens * examples / seconds
        if self.utilisation:
            rates["mfu"] = self.utilisation(examples / seconds)
        return rates | {"waiting": min(waited / seconds, 1.0)}

    def elapsed(self) -> float:
        """The seconds of this epoch so far."""
        return time.perf_counter() - self.began

    def epoch(self) -> dict[str, float]:
        """The time and the throughput of the whole epoch."""
        compiled = self.trainer.compile_seconds() - self.first_compiled
        return {"seconds": self.elapsed(), "compile_seconds": compiled, **self.trained}


class LearningRates:
    """{name: learning rate} at a step. `rates` are numbers, or functions of the step. They are
    computed for many steps at once: a program per step would wait for the steps in progress on the
    device."""

    def __init__(self, rates: Mapping[str, float | Schedule], trainer: Trainer) -> None:
        self.rates, self.trainer, self.blocks = rates, trainer, {}

    def __call__(self, step: int) -> dict[str, float]:
        if not self.rates:
            return {}
        block, i = divmod(max(step - 1, 0), BLOCK)  # the rates of the latest step
        if block not in self.blocks:
            self.blocks = {block: self.computed(block * BLOCK)}
        values = {name: float(array[i]) for name, array in self.blocks[block].items()}
        scale = self.trainer.rate_scale
        return {k: float(f"{v * scale:.7g}") for k, v in values.items()}  # not 0.003000000026

    def computed(self, first: int) -> dict[str, np.ndarray]:
        """The rates of a block of steps that begins at `first`."""
        functions = {name: rate for name, rate in self.rates.items() if callable(rate)}
        numbers = {k: np.full(BLOCK, rate) for k, rate in self.rates.items() if k not in functions}
        if not functions:
            return numbers
        steps = np.arange(first, first + BLOCK, dtype=np.int32)
        each = jax.vmap(lambda step: {name: rate(step) for name, rate in functions.items()})
        return numbers | jax.device_get(quick(each, self.trainer.plan.whole)(steps))


class Reader(NamedTuple):
    """Turns Sums into named values: `<set>_<metric>`, and norms under their own names."""

    finish: Callable[[PyTree], PyTree] = (
        unchanged  # the objective's: {metric: mean} -> {metric: reported value}
    )
    hidden: frozenset[str] = frozenset()  # labels that are measured for callbacks alone
    leaves: tuple[str, ...] = ()  # names of the params' leaves

    def values(self, prefix: str, sums: Sequence[Sums]) -> dict[str, float]:
        """{"train_loss": ...} from the Sums of each replica. With several replicas, that is their
        mean, and `train_loss/0`, ... are their values."""
        read = [each.results() for each in sums]
        named = [self.named(prefix, sums[0].modes, values) for values, _ in read]
        named = [{name: float(value) for name, value in own.items()} for own in named]
        return over_replicas(named) | mean_of([self.norms(norms) for _, norms in read])

    def arrays(self, prefix: str, sums: Sequence[Sums]) -> dict[str, PyTree]:
        """{"test_confusion": ...}: the values for callbacks alone, of the first replica."""
        values, _ = sums[0].results()
        return {f"{prefix}_{label}": values[label] for label in self.aside(sums[0].modes)}

    def each_step(self, modes: dict[str, Mode], rows: Sequence[Row]) -> dict[str, np.ndarray]:
        """{"train_loss": an array with one value per step} from the rows of each replica."""
        read = [results_of_rows(modes, own) for own in rows]
        named = [self.named("train", modes, values, jax.vmap) for values, _ in read]
        named = [{name: np.asarray(value) for name, value in own.items()} for own in named]
        return over_replicas(named) | mean_of([self.norms(norms) for _, norms in read])

    def named(
        self,
        prefix: str,
        modes: dict[str, Mode],
        values: dict[str, PyTree],
        over: Callable[[Callable], Callable] = lambda fn: fn,
    ) -> dict[str, Any]:
        """{"train_loss": ...} of all results that are logged."""
        aside = self.aside(modes)
        means = {k: value for k, value in values.items() if k not in aside and k != "loss"}
        finished = over(self.finish)(means) if means else {}
        loss = sum(jax.tree.leaves(values["loss"]))  # of terms with their own weights
        labels = {"loss": loss, **finished}  # the loss stays first
        leaves = {k: v for label in labels for k, v in named_leaves({label: labels[label]}).items()}
        return {f"{prefix}_{name.replace('/', '_')}": value for name, value in leaves.items()}

    def aside(self, modes: dict[str, Mode]) -> set[str]:
        """The labels of values that are for callbacks alone, and never logged."""
        return {k for k, mode in modes.items() if k in self.hidden or mode == "CONCAT"}

    def norms(self, norms: Mapping[str, Any]) -> dict[str, Any]:
        """{"gradient_norm": ..., "gradient_norm/head/bias": ...}"""
        named = {name: value for name, value in norms.items() if not name.endswith("_leaves")}
        for name in [name for name in norms if name not in named]:
            prefix = name.removesuffix("_leaves")
            named |= {f"{prefix}/{leaf}": norms[name][..., i] for i, leaf in enumerate(self.leaves)}
        return named


def over_replicas(replicas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each value as the mean over the replicas and, if there are several, for each replica."""
    named = mean_of(replicas)
    if len(replicas) > 1:
        for name in replicas[0]:
            named |= {f"{name}/{r}": values[name] for r, values in enumerate(replicas)}
    return named


def mean_of(replicas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each value as the mean over the replicas: a float of numbers, an array of arrays."""
    means = {
        name: value if len(replicas) == 1 else np.mean([r[name] for r in replicas], axis=0)
        for name, value in replicas[0].items()
    }
    return {name: value if np.ndim(value) else float(value) for name, value in means.items()}


def examples_of(sums: Iterable[Sums]) -> int:
    """How many examples all replicas have seen, from the Sums of each."""
    return sum(each.examples for each in sums)


# The names of the values, and the monitors that name one of them.


def check_names(recipe: Recipe, values: dict[str, PyTree], sets: Iterable[str]) -> None:
    """Refuse metrics that cannot be reported, and monitors of what is not measured. `values` are
    the shapes of what the objective returns, `sets` the names of all sets."""
    recipe, in_epochs = recipe.for_sets(sets), recipe.sets_monitored(sets)
    measured = measured_names(recipe, ["train", *in_epochs], reported_names(recipe, values))
    best = recipe.checkpoint
    check_monitor("checkpoint.monitor", best, best.monitor, measured)
    for i, callback in enumerate(recipe.callbacks):
        monitor = monitor_for(getattr(callback, "monitor", None), in_epochs, "test_loss")
        check_monitor(f"callbacks.{i}.args.monitor", callback, monitor, measured)
        if not getattr(callback, "restore_best", False):
            continue
        if monitor not in (best.monitor, None) or (best.monitor and callback.sign() != best.sign()):
            raise UserError(
                f"callbacks: {name_of(callback)}: restore_best restores the best checkpoint by "
                f"checkpoint.monitor, which is {best.monitor}, and it watches {monitor}; "
                "name the same metric in both, with the same mode"
            )


def reported_names(recipe: Recipe, values: dict[str, PyTree]) -> dict[str, list[str]]:
    """{label: the names under which it is reported}, with the loss. Each must be one number, or a
    dict of them, unless it is for callbacks alone."""
    metrics = {k: v for k, v in values.items() if k != "loss" and not recipe.metric_plan.aside(k)}
    means = per_leaf(lambda a: jax.ShapeDtypeStruct(unweighted(a).shape[1:], jnp.float32), metrics)
    names = {"loss": ["loss"], **{label: [] for label in metrics}}
    for name, leaf in named_leaves(jax.eval_shape(recipe.objective.finish, means)).items():
        if leaf.shape != ():
            raise UserError(
                f"metrics: {name} ends with shape {leaf.shape}; "
                "return a number, give the function a `finish`, or use mode CONCAT"
            )
        names.setdefault(name.split("/")[0], []).append(name.replace("/", "_"))
    for label, tree in metrics.items():
        if not names[label] and not jax.tree.leaves(tree):  # a `finish` may leave values out
            raise UserError(f"metrics: {label} returns nothing; return a number")
    flat = [name for group in names.values() for name in group]
    if twice := {name for name in flat if flat.count(name) > 1}:
        raise UserError(
            f"metrics: {', '.join(sorted(twice))}: two of them have this name; "
            "give labels: {label: metric, ...}"
        )
    return names


def measured_names(
    recipe: Recipe, sets: Sequence[str], reported: dict[str, list[str]]
) -> list[str]:
    """All names under which something is measured at the end of an epoch."""
    metric_plan, names = recipe.metric_plan, []
    for set_name in sets:
        labels = metric_plan.modes(reported, phase_of(set_name), "EPOCH")
        names += [f"{set_name}_{name}" for label in labels for name in reported[label]]
    norms = [norm for norm in ("gradient_norm", "parameter_norm") if norm in metric_plan.needs]
    own = [name for c in recipe.callbacks for name in reported_by(c, sets)]
    return [*names, *own, *norms, *recipe.rates]


def check_monitor(where: str, part: Any, monitor: str | None, measured: Sequence[str]) -> None:
    """Refuse the monitor of a part that is never measured, or whose direction is unknown. The hint
    names metrics of the same set only: the training loss, say, cannot replace the test loss."""
    if monitor is not None and monitor not in measured:
        set_name = monitor.split("_")[0]
        sets = {name.split("_")[0] for name in measured}
        hint = ""
        if set_name in ("val", "test") and set_name not in sets:
            hint = f"; no epoch evaluates a set {set_name!r}"
            hint += " (loader.val_size holds out a validation set)"
        else:
            meant = difflib.get_close_matches(set_name, sets, n=1)
            same = [name for name in measured if [name.split("_")[0]] == meant]
            if near := difflib.get_close_matches(monitor, same, n=1):
                hint = f"; did you mean {near[0]!r}?"
        raise UserError(f"{where}: {monitor!r} is not measured{hint} ({', '.join(measured)})")
    if hasattr(part, "sign"):
        part.sign()
