"""Which operation of a step made its first nan or infinity, in which layer, and of what.

A bad step leaves the state as it was, so it can be taken again. From the first value that `training.update.all_finite` finds bad
the way goes back through values that are not finite, to the operation that made one of finite numbers. What `jnp.where` masks
away is passed by.
"""

import linecache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from training.debugging.replay import Replay, Value, bind
from training.loss import distribution
from training.programs import form, leaves_of
from training.update import all_finite, floats
from utils import named_leaves

HERE = Path(__file__).resolve().parents[1]  # training/
NAMES = {
    "params": "the parameter",
    "state": "the model's state",
    "opt": "the optimizer's state",
    "ema": "the averaged weight",
}
HINTS = {"gather": " (an index outside an array reads nan)"}
UPDATE = "in the update"
BORN, OF_ANOTHER, WRITTEN = range(
    3
)  # of finite numbers; a nan of infinities; of one that is written in the code


def first_bad_op(step, ts, batch, valid):
    """What made the first nan or infinity of a step, in one sentence; None where all is finite. `step` is that of an Update."""
    ts, batch = jax.device_put(
        (ts, batch), jax.local_devices()[0]
    )  # one is enough, and all values must be on the same
    leaves = [
        Value(a, name=name, parameter=name.startswith("params"))
        for name, a in named_inputs(ts, batch)
    ]
    replay = Replay(jax.make_jaxpr(lambda ts, batch: step(ts, batch, valid))(ts, batch), leaves)
    checks = [
        op
        for op in replay.ops
        if op.name == "cond" and any(is_in(frame, all_finite) for frame in op.frames())
    ]
    # An update that does not end with `accepted` may have checks of its own.
    checked = (
        checks[0].inputs[1:]
        if checks
        else [op.inputs[0] for op in replay.ops if op.name == "is_finite"]
    )
    gradients = 1 + len(floats(ts.params))
    # The optimizer, and most of it, may not be needed.
    for group in (checked[:1], checked[1:gradients], *([value] for value in checked[gradients:])):
        replay.reach(group)
        hit = next((value for value in group if value.bad), None)
        if hit is not None:
            return told(*origin(hit), checked, hit in checked[1:gradients], batch, valid)
    return None


def named_inputs(ts, batch):
    """[(name, leaf)] of a step's inputs, in their order."""
    return list(named_leaves(ts).items()) + [
        (f"batch/{name}", leaf) for name, leaf in leaves_of(batch)
    ]


def origin(hit):
    """(the operation, or the input of the step, where it began that a value is not finite; "nan" or "inf")."""
    todo = [(hit, kind) for kind in hit.bad]
    seen, found = set(todo), []
    while todo:
        value, kind = todo.pop()
        op = value.maker
        if op is None:
            return value, kind
        came = [pair for pair in op.sources[kind] if not pair[0].constant]
        if not op.sources[kind]:
            found.append((BORN, op.order, op, kind))
        elif op.is_first(kind):
            found.append((OF_ANOTHER, op.order, op, kind))
        elif not came:
            found.append((WRITTEN, op.order, op, kind))
        todo += [pair for pair in came if pair not in seen]
        seen |= set(came)
    return min(found, key=lambda entry: entry[:2])[2:]


def told(found, kind, checked, hit_gradient, batch, valid):
    """The sentence on what was found."""
    if isinstance(found, Value):
        return tell_input(found, kind)
    frames = found.frames()
    if frames and is_in(frames[0], distribution):
        return tell_label(found, batch, valid)
    return tell_op(found, kind, phase(found, checked[0], hit_gradient))


def phase(op, losses, hit_gradient):
    """In which part of the step an operation is, in words."""
    if op in behind(losses):
        return (
            "in the forward pass"
            if losses.bad
            else "in the forward pass (the loss survived it, by a mask or an inverse)"
        )
    if op.is_under("transpose"):
        return "in the backward pass"
    if op.is_under("jvp"):
        # Computed along with the forward pass, for the backward pass alone.
        return (
            "in the backward pass, as the slope of this line"
            if hit_gradient
            else "in the forward pass"
        )
    return UPDATE


def behind(value):
    """All operations that a value comes from."""
    todo, ops = [value.maker], {None}
    while todo:
        if (op := todo.pop()) not in ops:
            ops.add(op)
            todo += [given.maker for given in op.inputs]
    return ops


def tell_input(value, kind):
    """An input of the step that was not finite."""
    array = np.asarray(value.array)
    head, _, rest = value.name.partition("/")
    name, count = f"{NAMES.get(head, head)} {rest}".strip(), (~np.isfinite(array)).sum()
    what = f"{name}{first_place(array, kind)} is {kind}"
    many = f" ({count} of {array.size} numbers are not finite)" if array.size > 1 else ""
    return (
        f"the data itself: {what}{many}"
        if head == "batch"
        else f"not this step: {what} already before it{many}"
    )


def tell_label(op, batch, valid):
    """A label outside the classes, of which training.loss makes a nan."""
    classes = op.path[0].outvars[0].aval.shape[-1]
    for name, leaf in leaves_of(batch):
        labels = np.asarray(leaf)[: int(valid)]
        if (name == "y" or name.startswith("y/")) and np.issubdtype(labels.dtype, np.integer):
            outside = (labels < 0) | (labels >= classes)
            if outside.any():
                at = np.argwhere(outside)[0]
                found = f"batch {name}{at.tolist()} is {labels[tuple(at)]}"
                return f"the data itself: {found}, a label outside the {classes} classes, 0 to {classes - 1}"
    return f"a label is outside the {classes} classes, 0 to {classes - 1}"


def tell_op(op, kind, phase):
    """An operation that made one of others."""
    rounds = "".join(f", in round {round} of a loop" for round in op.rounds)
    head = (
        f"{op.name} made the first {kind}, {phase}{rounds}: {places(op.frames())}{fed(op, phase)}"
    )
    if op.arrays is None:
        return f"{head}; it is written in the code, or made of nothing but numbers written there"
    given, made = op.arrays
    array = next(
        np.asarray(a) for a, value in zip(made, op.outputs, strict=True) if kind in value.bad
    )
    count = (
        f"{(~np.isfinite(array)).sum()} of {array.size} not finite" if array.size > 1 else f"{kind}"
    )
    got = " and ".join(map(described, given)) or "nothing"
    made = f"{form(array)}: {count}{example(op, given, array, kind)}"
    return f"{head}; it got {got}, and gave {made}{HINTS.get(op.name, '')}"


def places(frames):
    """Where the code is, from the innermost file, which may be a library's, to that of the model."""
    files = [file for file, *_ in frames]
    own = next((i for i, file in enumerate(files) if not is_library(file)), 0)
    callers = [
        i
        for i in range(own + 1, len(files))
        if not is_library(files[i]) and not Path(files[i]).is_relative_to(HERE)
    ]
    callers = [i for i in callers if files[i] != files[i - 1]]
    names = [
        f"{short(file)}:{line} in {function.rpartition('<locals>.')[2]}"
        for file, line, function in frames
    ]
    if own < len(frames) and (text := linecache.getline(*frames[own][:2]).strip()):
        names[own] += f" (`{text}`)"
    return (
        ", called from ".join(names[i] for i in sorted({0, own, *callers}) if i < len(names))
        or "of no line of Python"
    )


def is_in(frame, function):
    """Whether a frame is one of a function of the toolkit."""
    return (frame[0], frame[2]) == (function.__code__.co_filename, function.__qualname__)


def is_library(file):
    return "-packages/" in file


def short(file):
    """A file below the project, the working folder or the installed packages."""
    if is_library(file):
        return file.rpartition("-packages/")[2]
    bases = [base for base in (HERE.parent, Path.cwd()) if Path(file).is_relative_to(base)]
    return str(Path(file).relative_to(bases[0])) if bases else file


def fed(op, phase):
    """The last parameter that flowed into what an operation got."""
    given = [value for value in op.inputs if value.fed]
    if not given or phase == UPDATE:
        return ""
    last = max(given, key=lambda value: (value.parameter, value.fed))
    return f", {'with' if last.parameter else 'after'} {last.fed[1].removeprefix('params/')}"


def described(array):
    """Type, shape and range of what an operation got."""
    if not jnp.issubdtype(jnp.result_type(array), jnp.number):
        return form(array)
    array = np.asarray(array)
    if array.ndim == 0:
        return f"{form(array).removesuffix('[]')} {array.item():.4g}"
    finite = np.isfinite(array)
    text = form(array)
    if jnp.issubdtype(array.dtype, jnp.inexact):
        text += (
            " all finite" if finite.all() else f" with {(~finite).sum()} of {array.size} not finite"
        )
    if jnp.issubdtype(array.dtype, jnp.complexfloating) or not finite.any():
        return text
    return f"{text} from {array[finite].min():.4g} to {array[finite].max():.4g}"


def example(op, given, array, kind):
    """The first number that is not finite, and, where it is made of one number of each input, of which."""
    place = first_place(array, kind)
    index = tuple(np.argwhere(bad_places(array, kind))[0])
    text = f", the first at {place}" if place else ""
    try:
        numbers = [np.broadcast_to(np.asarray(a), array.shape)[index] for a in given]
        alone = np.asarray(bind(op.path[0], [jnp.asarray(number) for number in numbers])[0])
    except Exception:  # not an operation of single numbers
        return text
    same = alone.shape == () and np.array_equal(alone, array[index], equal_nan=True)
    return (
        f"{text}: {op.name}({', '.join(f'{n:.4g}' for n in numbers)}) = {alone:.4g}"
        if same
        else text
    )


def bad_places(array, kind):
    return {"nan": np.isnan, "inf": np.isinf}[kind](array)


def first_place(array, kind):
    """[4, 2], the first place of a nan or an infinity; nothing for a single number."""
    return str(np.argwhere(bad_places(array, kind))[0].tolist()) if array.ndim else ""
