"""Traces everything that a step calls, from shapes alone. An error says which part fails, where in
the user's code, and why."""

import inspect
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from training.base import TrainState
from training.gradient import check_differentiable
from training.objective import OF_PART, augmented_by_epoch, preprocessed, x_of
from training.recipe import MissingLoss
from training.replicas import as_inputs
from training.update import gradient_update
from utils import UserError, is_library, named_leaves, relative_path

TRAINING = Path(__file__).resolve().parents[1]
# Files whose lines an error may name only together with the line that called them.
TOOLKIT = (TRAINING, TRAINING.parent / "model" / "layers", TRAINING.parent / "utils.py")
# JAX's messages if a layer, or an objective that adds noise, gets bytes.
FOUND_BYTES = ("the same dtypes, got uint8", "must be a float or complex dtype, got uint8")


def trace_shapes(recipe, batch, held_out):
    """The shapes of (params, state, metrics), from tracing everything that an update calls, and an
    evaluation of a `held_out` batch."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    trees = attempt("model: the parameters cannot be made", recipe.model.init, key)
    if not isinstance(trees, tuple) or len(trees) != 2:
        raise UserError("model: init(key) must return (params, state), with {} for no state")
    params, state = trees
    for name, leaf in named_leaves(params).items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(
                f"model: the parameter {name} is {leaf.dtype}; "
                "only floats can be trained; put everything else into state"
            )
    by_epoch = partial(augmented_by_epoch, recipe.augment, 0)
    batch = attempt("augment does not fit the data", by_epoch, batch)
    try:
        trained, evaluated = (
            trace_objective(recipe.objective, params, state, rows, key, train)
            for rows, train in ((batch, True), (held_out, False))
        )
    except MissingLoss:
        raise
    except UserError:
        check_apply(recipe, params, state, batch)
        raise
    if not same_form(trained, evaluated):
        raise UserError(
            f"objective: the metrics of training ({named_forms(trained)}) and "
            f"evaluation ({named_forms(evaluated)}) differ"
        )
    recipe.metric_plan.check(trained)
    trace_optimizer(recipe.optimizer, params)
    return params, state, trained


def check_apply(recipe, params, state, batch):
    """Refuse an `apply` that cannot be called, or returns no pair, if that may be why an objective
    failed; nothing else, since other objectives call the model with other inputs."""
    arguments = {"train": False, "key": None}
    with suppress(ValueError):  # it has no signature
        try:
            inspect.signature(recipe.model.apply).bind(params, state, batch, **arguments)
        except TypeError as error:
            found = inspect.signature(recipe.model.apply)
            form = "(params, state, x, *, train=False, key=None)"
            raise UserError(f"model: apply{found} must take {form}") from error

    def apply(params, state, batch):
        x = preprocessed(recipe.preprocess, x_of(batch))
        return recipe.model.apply(params, state, x, **arguments)

    results = (jax.ShapeDtypeStruct((), jnp.float32),) * 2
    with suppress(Exception):
        results = jax.eval_shape(apply, params, state, batch)
    if not isinstance(results, tuple) or len(results) != 2:
        raise UserError("model: apply must return (output, state), with the state unchanged or new")


def trace_objective(objective, params, state, batch, key, train):
    """The shapes of the metrics of one batch. The loss must be one number per example, and the
    state must keep its shapes and types."""

    def call(params, state, batch, key):
        return objective(params, state, batch, key, train)

    what = f"model, loss or metrics do not fit the data, whose batches are ({forms(batch)})"
    if not train:
        what += ", in an evaluation (train=False; `supervised` passes key=None)"
    try:
        results = attempt(what, call, params, state, batch, key)
    except UserError as error:
        if fix := fix_for(str(error), batch):
            raise UserError(f"{error}; {fix}") from error
        raise
    if not isinstance(results, tuple) or len(results) != 3:
        raise UserError("objective: must return (losses, state, metrics)")
    losses, new_state, metrics = results
    size = jax.tree.leaves(batch)[0].shape[0]
    shapes = {getattr(leaf, "shape", None) for leaf in jax.tree.leaves(losses)}
    if shapes != {(size,)}:
        raise UserError(
            f"loss: must be one number for each of the {size} examples of a batch, got {losses}"
        )
    check_differentiable(losses)
    if not same_form(new_state, state):
        raise UserError(
            "model: apply changes the form of its state, "
            f"from ({named_forms(state)}) to ({named_forms(new_state)})"
        )
    return metrics


def fix_for(message, batch):
    """What helps if the message says that something got bytes or a dict; None for any other one."""
    if any(text in message for text in FOUND_BYTES):
        return "the preprocess to_unit makes floats of images that are bytes"
    x = x_of(batch)
    if isinstance(x, dict) and "'dict'" in message:
        return f"x is a dict of {', '.join(x)}: use a model, or a preprocess, that takes one"
    return None


def trace_optimizer(optimizer, params):
    """The updates must have the shapes and types of the params, and the optimizer's state must keep
    its own."""
    state = attempt("optimizer: its state cannot be made", optimizer.init, params)
    what = "optimizer or schedule: the update fails"
    results = attempt(what, optimizer.update, params, state, params)
    if not isinstance(results, tuple) or len(results) != 2:
        raise UserError("optimizer: update must return (updates, state)")
    for name, new, old in (("updates", results[0], params), ("state", results[1], state)):
        if not same_form(new, old):
            raise UserError(
                f"optimizer or schedule: the form of the {name} is ({forms(new)}), "
                f"expected ({forms(old)})"
            )


def trace_update(update, ts, batch):
    """A step must keep the shapes and types of the TrainState. That of `gradient_update` is known
    to, and tracing it takes a second."""
    made_by = f"{update.step.__module__}.{update.step.__qualname__}"
    if made_by.startswith(f"{gradient_update.__module__}.{gradient_update.__name__}."):
        return
    new = attempt("update: its step fails", update.step, ts, batch, 1).new
    for name in TrainState._fields:
        before, after = getattr(ts, name), getattr(new, name)
        if not same_form(before, after):
            raise UserError(
                f"update: its step changes the form of {name}, "
                f"from ({named_forms(before)}) to ({named_forms(after)})"
            )


def same_form(a, b):
    """Whether two trees have the same structure, shapes and types."""
    return jax.tree.structure(a) == jax.tree.structure(b) and forms(a) == forms(b)


def forms(tree):
    """The types and shapes of a tree's leaves."""
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree))


def named_forms(tree):
    """The names, types and shapes of a tree's leaves."""
    named = {name: forms(leaf) for name, leaf in named_leaves(tree).items()}
    return ", ".join(f"{name} {form}" for name, form in named.items()) or "none"


def attempt(what, fn, *arguments):
    """The shapes of fn(*arguments); an error says what failed, where in the project's or the user's
    code, and why."""
    try:
        return jax.eval_shape(fn, *arguments)
    except MissingLoss:
        raise
    except UserError as error:
        if str(error).startswith(f"{what.split(':')[0]}:"):  # it names the part already
            raise
        raise UserError(f"{what}: {error}") from error
    except (Exception, SystemExit) as error:  # the code may be the user's own
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(OF_PART)]
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        raise UserError(": ".join([what, *notes, *code_place(error), why])) from error


def code_place(error):
    """[the last line of code outside of libraries, and the user's own line that called it], or []
    if only libraries were called."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not is_library(f.filename) and f.filename != __file__]
    users = [f for f in own if not any(Path(f.filename).is_relative_to(p) for p in TOOLKIT)]
    shown = [*own[-1:], *(f for f in users[-1:] if f is not own[-1])]
    lines = [f"{relative_path(f.filename)}, line {f.lineno}, in {f.name}" for f in shown]
    return [", called from ".join(lines)] if lines else []


def trace_numbers(recipe, ts, batch):
    """Refuse numbers of training.vary that cannot be inputs of the compiled programs: of the one
    that draws the first params, and of the step."""

    def step(numbers, ts, batch):
        own = recipe.with_numbers(numbers)
        update = own.make_update(unroll=False)
        update.init(own.model.init(jax.random.key(0))[0])
        return update.step(ts, batch, 1)

    numbers = recipe.varied_numbers[0]
    what = f"training.vary: {', '.join(numbers)} cannot all differ within one program"
    attempt(what, step, as_inputs(numbers), ts, batch)
