"""Checks of the parts and the data that `fit` is given, with the kind of message that a config
gets: what was passed, and what to pass instead."""

import inspect
from difflib import get_close_matches

import jax
import jax.numpy as jnp
import numpy as np

from data_loader.base import Data
from data_loader.nest import check_integers, check_readable, check_type, named_nest
from training.base import Tracked
from training.kinds import KINDS, adapter_for, find, makes
from training.objective import cutmix, mixup, supervised
from training.recipe import part_name
from utils import UserError, first_line, parameters_of

SUPERVISED = (supervised, mixup, cutmix)  # the objectives that compare outputs with targets


def check_part(kind, value):
    """Refuse an argument that is not a part of this kind: a name, as a config has it, a function
    that has yet to be called, or anything else."""
    check_named(kind, value)
    cls = value if isinstance(value, type) else type(value)
    if kind == "model" and adapter_for(cls):
        fix = "wrap it: docs/add_your_own.md#a-model-of-another-library"
        raise UserError(f"model: {cls.__name__} is of another library; {fix}")
    needed = KINDS[kind].attributes
    missing = [name for name in needed if not hasattr(value, name) or value is cls]
    if not KINDS[kind].given and (missing or makes(value, kind)):
        if isinstance(value, list | tuple) and kind == "optimizer":
            fix = "chain them: chain(...) of training.transforms"
            raise UserError(f"optimizer: must be one optimizer, got {len(value)}; {fix}")
        if callable(value) and hasattr(value, "__name__"):
            raise UserError(uncalled(kind, value))
        fix = f"pass what a function in {' or '.join(KINDS[kind].homes)} returns"
        name = type(value).__name__
        raise UserError(f"{kind}: {name} has no {' and '.join(missing)}; {fix}")
    if KINDS[kind].given and not callable(value) and not isinstance(value, Tracked):
        raise UserError(f"{kind}: {value!r} is not a function; pass the function itself")


def check_schedule(schedule):
    """Refuse an argument that is not a function from the step to a number."""
    check_part("schedule", schedule)
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


def check_list(kind, values):
    """Refuse an argument that is not a list of parts."""
    if isinstance(values, str | dict) or not np.iterable(values) or isinstance(values, type):
        check_named(kind, values)
        name = part_name(values) if inspect.isfunction(values) else "..."
        raise UserError(f"{kind}: must be a list, got {values!r}; put it in brackets: [{name}]")
    for value in values:
        check_part(kind, value)


def check_named(kind, value):
    """Refuse the name of a part, which is how a config refers to it."""
    name = value.get("name") if isinstance(value, dict) else value
    if not isinstance(name, str):
        return
    parts = find(kind)[0]
    near = [name] if name in parts else get_close_matches(name.lower(), parts, n=1)
    if not near:
        raise UserError(f"{kind}: {name!r} is only a name, and no part's: {', '.join(parts)}")
    part = parts[near[0]]
    hint = "" if near == [name] else f" (did you mean {near[0]!r}?)"
    use = part.__name__ if KINDS[kind].given else call_of(part)
    raise UserError(
        f"{kind}: {name!r} is only a name{hint}; pass the object: "
        f"from {part.__module__} import {part.__name__}, then {use}"
    )


def call_of(function):
    """The text of a call with the arguments that have no default."""
    return f"{function.__name__}({', '.join(required(function))})"


def required(function):
    """The names of the arguments that have no default."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = parameters_of(function).values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def uncalled(kind, factory):
    """The message about a function that was passed instead of its result."""
    name = factory.__name__
    return f"{kind}: {name} is a function that makes one; call it: {call_of(factory)}"


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
