"""Checks of the parts and the data that `fit` is given, with the kind of message that a config
gets: what was passed, and what to pass instead."""

import importlib
import inspect
import pkgutil
from difflib import get_close_matches

import jax
import jax.numpy as jnp
import numpy as np

from data_loader.base import Data
from data_loader.nest import check_integers, check_readable, check_type, named_nest
from training.base import Callback, Optimizer, Schedule, Tracker
from training.objective import cutmix, mixup, supervised
from training.recipe import part_name
from utils import PACKAGE, UserError, first_line

# Where the parts of each kind are, for the message about a name that was passed for a part.
HOMES = {
    "optimizer": ("training.optimizers", "training.transforms"),
    "schedule": ("training.schedules",),
    "callbacks": ("training.watching.callbacks",),
    "trackers": ("training.watching.trackers",),
    "loss": ("training.loss",),
    "metrics": ("training.metrics",),
    "preprocess": ("training.preprocess",),
    "augment": ("training.augment",),
    "objective": ("training.objective", "training.objectives"),
    "update": ("training.update", "training.objectives"),
}
# The kinds whose functions make the part, so that the user calls them.
SUPERVISED = (supervised, mixup, cutmix)  # the objectives that compare outputs with targets
MADE = {"optimizer": Optimizer, "schedule": Schedule, "callbacks": Callback, "trackers": Tracker}


def check_model(model):
    """Refuse an argument that is not a Model."""
    if isinstance(model, str):
        fix = "pass what its function in model/ returns, as mlp(input_shape=(4,), num_classes=3)"
        raise UserError(f"model: {model!r} is only a name; {fix}")
    classes = (model if isinstance(model, type) else type(model)).__mro__
    if {base.__module__.split(".")[0] for base in classes} & {"flax", "equinox", "haiku"}:
        fix = "wrap it: docs/add_your_own.md#a-model-of-another-library"
        raise UserError(f"model: {classes[0].__name__} is of another library; {fix}")
    if isinstance(model, type) or not (hasattr(model, "init") and hasattr(model, "apply")):
        if callable(model) and hasattr(model, "__name__"):
            raise UserError(uncalled("model", model))
        fix = "pass a Model (model/base.py), as the functions in model/ return one"
        raise UserError(f"model: {type(model).__name__} has no init and apply; {fix}")


def check_optimizer(optimizer):
    """Refuse an argument that is not an Optimizer."""
    check_named("optimizer", optimizer)
    if isinstance(optimizer, list | tuple) and not hasattr(optimizer, "update"):
        fix = "chain them: chain(...) of training.transforms"
        raise UserError(f"optimizer: must be one optimizer, got {len(optimizer)}; {fix}")
    if isinstance(optimizer, type) or not all(hasattr(optimizer, n) for n in ("init", "update")):
        if callable(optimizer) and hasattr(optimizer, "__name__"):
            raise UserError(uncalled("optimizer", optimizer))
        fix = "pass one of training.optimizers, as adamw(lr=0.001), or of Optax"
        kind = type(optimizer).__name__
        raise UserError(f"optimizer: {kind} has no init and update; {fix}")


def check_schedule(schedule):
    """Refuse an argument that is not a function from the step to a number."""
    if schedule is None:
        return
    check_function("schedule", schedule)
    try:
        value = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:  # the user's own, or a factory that was not called
        if hasattr(schedule, "__name__") and required(schedule) != required(lambda step: step):
            raise UserError(uncalled("schedule", schedule)) from error
        why = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"schedule: fails on a step: {why}") from error
    if getattr(value, "shape", None) != ():
        raise UserError(f"schedule: must return one number for a step, got {value}")
    first = float(jax.jit(schedule)(0))
    if not 0 <= first <= 1 + 1e-6:
        why = "it multiplies the optimizer's rate, so it must be from 0 to 1"
        raise UserError(f"schedule: returns {first:g} for the first step; {why}")


def check_function(kind, function):
    """Refuse an argument that is not a function, or that is a factory of one."""
    check_named(kind, function)
    if not callable(function):
        raise UserError(f"{kind}: {function!r} is not a function; pass the function itself")
    check_called(kind, function)


def check_list(kind, values):
    """Refuse an argument that is not a list of parts."""
    if isinstance(values, str | dict) or not np.iterable(values) or isinstance(values, type):
        check_named(kind, values)
        name = part_name(values) if inspect.isfunction(values) else "..."
        raise UserError(f"{kind}: must be a list, got {values!r}; put it in brackets: [{name}]")
    for value in values:
        check_named(kind, value)
        check_called(kind, value)
        if kind in ("preprocess", "augment") and not callable(value):
            raise UserError(f"{kind}: {value!r} is not a function; pass the function itself")


def check_called(kind, value):
    """Refuse a function that makes parts of this kind, where a part is needed."""
    if kind in MADE and returns(value) in (MADE[kind], MADE[kind].__name__):
        raise UserError(uncalled(kind, value))


def check_named(kind, value):
    """Refuse the name of a part, which is how a config refers to it."""
    name = value.get("name") if isinstance(value, dict) else value
    if not isinstance(name, str):
        return
    parts = parts_of(kind)
    if (near := next(iter(most_similar(name, parts)), None)) is None:
        raise UserError(f"{kind}: {name!r} is only a name, and no part's: {', '.join(parts)}")
    hint = "" if near == name else f" (did you mean {near!r}?)"
    use = f"{near}({', '.join(required(parts[near]))})" if kind in MADE else near
    raise UserError(
        f"{kind}: {name!r} is only a name{hint}; pass the object: "
        f"from {parts[near].__module__} import {near}, then {use}"
    )


def most_similar(name, names):
    """The names that are most similar to this one; it comes first if it is among them."""
    return [name] if name in names else get_close_matches(name.lower(), names, n=1)


def parts_of(kind):
    """{name: function} of the toolkit's parts of a kind."""
    modules = []
    for home in HOMES[kind]:
        module = importlib.import_module(PACKAGE + home)
        inner = pkgutil.iter_modules(getattr(module, "__path__", ()), f"{module.__name__}.")
        modules += [importlib.import_module(m.name) for m in inner] or [module]
    return {
        name: function
        for module in modules
        for name, function in vars(module).items()
        if getattr(function, "__module__", None) == module.__name__
        and inspect.isfunction(function)
        and (returns(function) is not None or kind == "objective")
    }


def returns(function):
    """The return annotation of a function, if it has one."""
    return getattr(function, "__annotations__", {}).get("return")


def required(function):
    """The names of the arguments that have no default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ["..."]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]


def uncalled(kind, factory):
    """The message about a function that was passed instead of its result."""
    call = f"{factory.__name__}({', '.join(required(factory))})"
    return f"{kind}: {factory.__name__} is a function that makes one; call it: {call}"


# Data.


def check_data(name, data):
    """Refuse data that is not a pair, a dataset or an iterable of batches."""
    pair = f"pass a pair of arrays, (x, y), or a dataset (docs/data.md) as `{name}`"
    if isinstance(data, Data):
        sets = "sets = data.load(), then sets['train'] and sets['test']"
        raise UserError(f"{name}: is a Data, whose examples are not loaded yet; use {sets}")
    if isinstance(data, dict):
        raise UserError(f"{name}: is a dict of {', '.join(map(str, data))}; {pair}")
    if isinstance(data, tuple) and len(data) != 2:
        raise UserError(f"{name}: is a tuple of {len(data)}; {pair}")
    readable = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    if data is not None and (isinstance(data, str | bytes | type) or not readable):
        raise UserError(f"{name}: {data!r} holds no examples; {pair}")


def check_side(name, side, values, pair):
    """Refuse lists of numbers, lists of examples, and arrays that do not hold numbers."""
    check_readable({side: values}, name)
    for path, leaf in named_nest({side: values}):
        if isinstance(leaf, int | float | complex | bool | str | bytes | np.generic):
            raise UserError(f"{name}: {side} is a list; pass an array: np.asarray({side})")
        array = np.asanyarray(leaf)
        if array.dtype.kind in "OUSMm":
            found = f"holds {array.dtype}, not numbers"
            raise UserError(f"{name}: {path} {found}; {numbers_from(path, leaf, array)}")
        check_type(f"{name}: {path}", array.dtype)
        check_integers({path: array}, 64 if jax.config.jax_enable_x64 else 32, name)
    other = pair[1] if side == "x" else pair[0]
    is_list = isinstance(values, list) and hasattr(other, "shape") and len(values) == len(other)
    if is_list and any(np.shape(leaf)[:1] != (len(other),) for leaf in values):
        fix = f"pass one array: np.stack({side})"
        raise UserError(f"{name}: {side} is a list of {len(values)} arrays; {fix}")


def numbers_from(path, leaf, array):
    """How numbers can be made of what is not numbers."""
    if hasattr(leaf, "toarray"):  # a sparse matrix of SciPy
        return f"pass {path}.toarray()"
    if array.dtype.kind in "Mm":
        return f'pass the days since the first: ({path} - {path}.min()) / np.timedelta64(1, "D")'
    if hasattr(leaf, "columns"):  # a table of pandas
        odd = [f"{name} ({kind})" for name, kind in leaf.dtypes.items() if kind.kind not in "biuf"]
        return f"drop or encode the columns {', '.join(odd)}; pd.get_dummies encodes names"
    first = next(iter(array.ravel()), "")
    if isinstance(first, np.ndarray):
        return f"pass one array: np.stack({path})"
    if array.dtype.kind == "O" and not isinstance(first, str):
        return f"pass {path}.astype({'int' if isinstance(first, int) else 'float'})"
    return "pass numbers; np.unique(names, return_inverse=True)[1] numbers the names"


def check_pairs(sets, objective):
    """Refuse a single array where the objective needs pairs, as from fit(model, x, y)."""
    if getattr(objective, "func", objective) not in SUPERVISED:
        return
    for name, data in sets.items():
        if hasattr(data, "dtype") and hasattr(data, "shape"):
            form = f"{data.dtype}{list(data.shape)}"
            fix = "pass the inputs with their targets: fit(model, (x, y), (x_test, y_test))"
            raise UserError(f"{name}: is one array, {form}, without targets; {fix}")
