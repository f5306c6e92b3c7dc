"""The contracts of the parts of a step: what a model, an objective, an optimizer and an update must
return, by types and shapes.

`compose` wraps each part of a recipe in functions that check its results while JAX traces it; a
compiled program contains nothing of them. So the same error is raised wherever a part is traced
first: by the check of a config, by `fit`, or when the step is compiled. It names the part at fault,
the line of the user's code, and the fix.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from model.base import Model
from training.base import (
    Measured,
    Objective,
    Optimizer,
    StepResult,
    TrainState,
    Update,
    Weights,
    check_value,
    is_weighted,
)
from training.objective import OF_PART, x_of
from training.transforms import kind_of
from utils import RunError, UserError, is_library, named_leaves, relative_path

if TYPE_CHECKING:
    from training.metrics import MetricPlan

TRAINING = Path(__file__).resolve().parent
# Files whose lines an error may name only together with the line that called them.
TOOLKIT = (TRAINING, TRAINING.parent / "model" / "layers", TRAINING.parent / "utils")
# JAX's messages if a layer, or an objective that adds noise, gets bytes.
FOUND_BYTES = ("the same dtypes, got uint8", "must be a float or complex dtype, got uint8")


# The parts.


def guarded_model(model: Model) -> Model:
    """The model, with functions that keep the contract of model/base.py."""
    with suppress(ValueError):  # it has no signature
        signature = inspect.signature(model.apply)
        try:
            signature.bind("params", "state", "x", train=False, key=None)
        except TypeError as error:
            form = "(params, state, x, *, train=False, key=None)"
            raise UserError(f"model: apply{signature} must take {form}") from error

    @wraps(model.init)
    def init(key: Array) -> Weights:
        with explained("model: the parameters cannot be made"):
            trees = model.init(key)
            if not is_tuple(trees, 2):
                raise UserError(
                    "model: init(key) must return (params, state), with {} for no state"
                )
            for name, leaf in named_leaves(trees[0]).items():
                if not jnp.issubdtype(type_of(leaf), jnp.floating):
                    raise UserError(
                        f"model: the parameter {name} is {type_of(leaf)}; "
                        "only floats can be trained; put everything else into state"
                    )
        return trees

    @wraps(model.apply)
    def apply(params: PyTree, state: PyTree, x: PyTree, **options: Any) -> Weights:
        results = model.apply(params, state, x, **options)
        if not is_tuple(results, 2):
            raise UserError(
                "model: apply must return (output, state), with the state unchanged or new"
            )
        return results

    if hasattr(model, "_replace"):
        return model._replace(init=init, apply=apply)
    return OwnModel(model, init, apply)  # pyright: ignore[reportReturnType]  # used like a Model


class OwnModel:
    """A model of the user's own class, or a module, with other functions."""

    def __init__(self, model: object, init: Callable, apply: Callable) -> None:
        self.model, self.init, self.apply = model, init, apply

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def _replace(self, **functions: Callable) -> OwnModel:
        return OwnModel(self.model, **{"init": self.init, "apply": self.apply} | functions)


def guarded_objective(objective: Objective) -> Objective:
    """The objective, which must return one loss and one value of each metric per example, and keep
    the form of the state."""

    @wraps(objective.apply)
    def apply(
        params: PyTree, state: PyTree, batch: PyTree, key: Array, train: bool, **declared: Any
    ) -> Measured:
        what = (
            f"model, loss or metrics do not fit the data, whose batches are ({shapes_text(batch)})"
        )
        if not train:
            what += ", in an evaluation (train=False; `supervised` passes key=None)"
        with explained(what, batch):
            results = objective.apply(params, state, batch, key, train, **declared)
            if not is_tuple(results, 3):
                raise UserError("objective: must return (losses, state, metrics)")
            losses, new_state, metrics = results
            check_values(losses, metrics, jax.tree.leaves(batch)[0].shape[0])
            if not same_shapes(new_state, state):
                raise UserError(
                    "model: apply changes the form of its state, "
                    f"from ({named_shapes(state)}) to ({named_shapes(new_state)})"
                )
        return results

    @wraps(objective.finish)
    def finish(means: PyTree) -> PyTree:
        with explained("metrics: the means cannot be finished"):
            return objective.finish(means)

    return objective._replace(apply=apply, finish=finish)


def check_values(losses: PyTree, metrics: PyTree, size: int) -> None:
    """Refuse anything but one loss that can be differentiated, and one value of each metric, for
    each of the `size` examples of a batch."""
    check_value("objective: the loss", losses)
    check_value("objective: the metrics", metrics)
    if {jnp.shape(leaf) for leaf in jax.tree.leaves(losses)} != {(size,)}:
        raise UserError(
            f"loss: must be one number for each of the {size} examples of a batch, "
            f"got {shapes_text(losses) or 'none'}"
        )
    for term in jax.tree.leaves(losses, is_leaf=is_weighted):
        dtype = type_of(term.value if is_weighted(term) else term)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise UserError(
                f"loss: is {dtype}, from which nothing can be learned; "
                "return a float that has a gradient, and measure counts as a metric"
            )
    for name, leaf in named_leaves(metrics).items():
        if jnp.shape(leaf)[:1] != (size,):
            raise UserError(
                f"objective: the metric {name} must have one value per example, with the shape "
                f"({size}, ...), got {jnp.shape(leaf)}"
            )


def check_metrics(
    plan: MetricPlan, trained: dict[str, PyTree], evaluated: dict[str, PyTree]
) -> None:
    """Refuse metrics that differ between training and evaluation, or that are in the plan and not
    returned. Both are {label: shapes}, with the loss."""

    def of_example(metrics: PyTree) -> PyTree:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), metrics)

    trained, evaluated = (
        {label: tree for label, tree in values.items() if label != "loss"}
        for values in (trained, evaluated)
    )
    if not same_shapes(of_example(trained), of_example(evaluated)):
        raise UserError(
            f"objective: the metrics of training ({named_shapes(trained)}) and "
            f"evaluation ({named_shapes(evaluated)}) differ"
        )
    plan.check(trained)


def guarded_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer, whose updates must have the shapes and types of the params, and whose state
    must keep its own."""

    def init(params: PyTree) -> PyTree:
        with explained("optimizer: its state cannot be made"):
            return optimizer.init(params)

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any) -> Weights:
        with explained("optimizer or schedule: the update fails"):
            results = optimizer.update(grads, state, params, **extra)
            if not is_tuple(results, 2):
                raise UserError("optimizer: update must return (updates, state)")
            like = grads if params is None else params
            for name, new, old in (("updates", results[0], like), ("state", results[1], state)):
                if not same_shapes(new, old):
                    raise UserError(
                        f"optimizer or schedule: the form of the {name} is ({shapes_text(new)}), "
                        f"expected ({shapes_text(old)})"
                    )
        return results

    return Optimizer(init, update, kind_of(optimizer))


def guarded_update(update: Update) -> Update:
    """The Update, whose step must keep the shapes and types of the TrainState."""
    if not isinstance(update, Update):
        raise UserError(f"update: must return an Update(init, step), got {type(update).__name__}")

    @wraps(update.init)
    def init(params: PyTree) -> tuple[PyTree, PyTree | None]:
        with explained("update: its state cannot be made"):
            made = update.init(params)
            averaged = made[1] if is_tuple(made, 2) else "none"
            if averaged is not None and jax.tree.structure(averaged) != jax.tree.structure(params):
                raise UserError(
                    "update: init(params) must return (opt_state, averaged params or None)"
                )
        return made

    @wraps(update.step)
    def step(ts: TrainState, batch: PyTree, valid: ArrayLike) -> StepResult:
        with explained("update: its step fails"):
            result = update.step(ts, batch, valid)
            if not isinstance(result, StepResult):
                raise UserError(
                    "update: its step must end with `return StepResult(new, grads, losses, "
                    f"metrics)` of training/base.py, got {type(result).__name__}"
                )
            for name in TrainState._fields:
                before, after = getattr(ts, name), getattr(result.new, name)
                if not same_shapes(before, after):
                    raise UserError(
                        f"update: its step changes the form of {name}, "
                        f"from ({named_shapes(before)}) to ({named_shapes(after)})"
                    )
        return result

    return update._replace(init=init, step=step)


# The structure, types and shapes of trees.


def is_tuple(value: object, length: int) -> bool:
    return isinstance(value, tuple) and len(value) == length


def type_of(leaf: Any) -> np.dtype:
    """The type of an array, of its shape, or of a Python number."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def same_shapes(a: PyTree, b: PyTree) -> bool:
    """Whether two trees have the same structure, shapes and types."""
    return jax.tree.structure(a) == jax.tree.structure(b) and shapes_text(a) == shapes_text(b)


def shapes_text(tree: PyTree) -> str:
    """The types and shapes of a tree's leaves."""
    return ", ".join(f"{type_of(leaf)}{list(jnp.shape(leaf))}" for leaf in jax.tree.leaves(tree))


def named_shapes(tree: PyTree) -> str:
    """The names, types and shapes of a tree's leaves."""
    named = {name: shapes_text(leaf) for name, leaf in named_leaves(tree).items()}
    return ", ".join(f"{name} {shape}".strip() for name, shape in named.items()) or "none"


# Errors.


@contextmanager
def explained(what: str, batch: PyTree = None) -> Iterator[None]:
    """Turn an error of traced code, which may be the user's own, into a UserError: what fails,
    where, why, and the fix if one is known for this batch. A UserError names its part already, and
    an error of values, as with --debug, is not one of shapes: both are raised unchanged."""
    try:
        yield
    except (UserError, RunError):
        raise
    except (Exception, SystemExit) as error:
        if not isinstance(jnp.zeros(()), Tracer):
            raise
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(OF_PART)]
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        message = ": ".join([what, *notes, *code_place(error), why])
        raise UserError("; ".join([message, *fixes_for(why, batch)])) from error


def code_place(error: BaseException) -> list[str]:
    """[the last line of code outside of libraries, and the user's own line that called it], or []
    if only libraries were called."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not is_library(f.filename) and f.filename != __file__]
    users = [f for f in own if not any(Path(f.filename).is_relative_to(p) for p in TOOLKIT)]
    shown = [*own[-1:], *(f for f in users[-1:] if f is not own[-1])]
    lines = [f"{relative_path(f.filename)}, line {f.lineno}, in {f.name}" for f in shown]
    return [", called from ".join(lines)] if lines else []


def fixes_for(message: str, batch: PyTree) -> list[str]:
    """[what helps if the message says that something got bytes or a dict], else []."""
    if any(text in message for text in FOUND_BYTES):
        return ["the preprocess to_unit makes floats of images that are bytes"]
    x = None if batch is None else x_of(batch)
    if isinstance(x, dict) and "'dict'" in message:
        return [f"x is a dict of {', '.join(x)}: use a model, or a preprocess, that takes one"]
    return []
