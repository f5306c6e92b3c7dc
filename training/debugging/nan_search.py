"""Finds the op that produced the first nan or infinity of a step, its layer and its inputs.

A bad step leaves the state unchanged, so it can be run again. The search starts at the first value
that `training.update.all_finite` finds bad, and goes back through values that are not finite to the
op that made one from finite inputs. Values that `jnp.where` masks out are ignored.
"""

import linecache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from training.debugging.replay import TESTS, Replay, Value, bind
from training.loss import distribution
from training.programs import leaves_of, type_and_shape
from training.update import all_finite, floats
from utils import named_leaves

TRAINING = Path(__file__).resolve().parents[1]
NAMES = {"params": "the parameter", "state": "the model's state"}
NAMES |= {"opt": "the optimizer's state", "ema": "the averaged weight"}
HINTS = {"gather": " (an index outside an array reads nan)"}
UPDATE = "in the update"


def first_bad_op(step, ts, batch, valid):
    """A sentence about the op that made the first nan or infinity in an Update's step, or None."""
    # All values must be on the same device, and one device is enough.
    ts, batch = jax.device_put((ts, batch), jax.local_devices()[0])
    named = [*named_leaves(ts).items(), *((f"batch/{n}", leaf) for n, leaf in leaves_of(batch))]
    leaves = [Value(leaf, name=n, parameter=n.startswith("params")) for n, leaf in named]
    replay = Replay(jax.make_jaxpr(lambda ts, batch: step(ts, batch, valid))(ts, batch), leaves)
    checked = [op.inputs[0] for op in replay.ops if op.name == "is_finite"]
    conds = [op for op in replay.ops if op.name == "cond"]
    # The check in `training.update.accepted`; a user's own update may have other checks.
    if checks := [op for op in conds if any(is_in(frame, all_finite) for frame in op.frames())]:
        checked = checks[0].inputs[1:]
    # The loss and the gradients, and then the new state, which may not be needed: the optimizer
    # computes most of it.
    end = 1 + len(floats(ts.params))
    for group in (checked[:1], checked[1:end], *([value] for value in checked[end:])):
        replay.evaluate(group)
        bad = next((value for value in group if value.bad), None)
        if bad is not None:
            return described_origin(bad, checked[0], bad in checked[1:end], batch, valid)
    return None


def described_origin(bad, loss, is_gradient, batch, valid):
    """The sentence on the origin of a bad value."""
    source, kind = origin(bad)
    if isinstance(source, Value):
        return described_input(source, kind)
    frames = source.frames()
    if frames and is_in(frames[0], distribution):
        return described_label(source, batch, valid)
    return described_op(source, kind, phase(source, loss, is_gradient))


def origin(bad):
    """(the op, or the input of the step, that first made a value not finite; "nan" or "inf")."""
    todo = [(bad, kind) for kind in bad.bad]
    seen, candidates = set(todo), []
    while todo:
        value, kind = todo.pop()
        op = value.maker
        if op is None:
            return value, kind
        sources = [pair for pair in op.sources[kind] if not pair[0].constant]
        # The most informative origin first: finite numbers; infinities for a nan; a constant.
        reasons = (not op.sources[kind], op.is_first(kind), not sources)
        if any(reasons):
            candidates.append((reasons.index(True), op.order, op, kind))
        todo += [pair for pair in sources if pair not in seen]
        seen |= set(sources)
    return min(candidates, key=lambda candidate: candidate[:2])[2:]


def phase(op, loss, is_gradient):
    """The words for the part of the step to which an op belongs."""
    if op in ancestors(loss):
        kept = "" if loss.bad else " (a mask or an inverse kept the loss finite)"
        return f"in the forward pass{kept}"
    if op.is_under("transpose"):
        return "in the backward pass"
    if not op.is_under("jvp"):
        return UPDATE
    # Computed during the forward pass, but only for the backward pass.
    derivative = "in the backward pass, as the derivative of this line"
    return derivative if is_gradient else "in the forward pass"


def ancestors(value):
    """All ops from which a value is computed, and None for the inputs of the step."""
    todo, ops = [value.maker], {None}
    while todo:
        if (op := todo.pop()) not in ops:
            ops.add(op)
            todo += [operand.maker for operand in op.inputs]
    return ops


def described_input(value, kind):
    """The sentence on an input of the step that is not finite."""
    array = np.asarray(value.array)
    head, _, rest = value.name.partition("/")
    name = f"{NAMES.get(head, head)} {rest}".strip() + first_index(array, kind)
    count = (~np.isfinite(array)).sum()
    many = f" ({count} of {array.size} numbers are not finite)" if array.size > 1 else ""
    if head == "batch":
        return f"the data itself: {name} is {kind}{many}"
    return f"not this step: {name} was already {kind} before it{many}"


def described_label(op, batch, valid):
    """The sentence on a label outside the classes, for which training.loss returns nan."""
    classes = op.path[0].outvars[0].aval.shape[-1]
    for name, leaf in leaves_of(batch):
        labels = np.asarray(leaf)[: int(valid)]
        if (name == "y" or name.startswith("y/")) and np.issubdtype(labels.dtype, np.integer):
            outside = (labels < 0) | (labels >= classes)
            if outside.any():
                index = np.argwhere(outside)[0]
                label = f"batch {name}{index.tolist()} is {labels[tuple(index)]}"
                allowed = f"the {classes} classes, 0 to {classes - 1}"
                return f"the data itself: {label}, a label outside {allowed}"
    return f"a label is outside the {classes} classes, 0 to {classes - 1}"


def described_op(op, kind, phase):
    """The sentence on an op that made a nan or an infinity."""
    rounds = "".join(f", in iteration {number} of a loop" for number in op.rounds)
    where = f"{code_places(op.frames())}{last_parameter(op, phase)}"
    head = f"{op.name} made the first {kind}, {phase}{rounds}: {where}"
    if op.arrays is None:
        return f"{head}; it is a constant in the code, or computed only from constants"
    inputs, outputs = op.arrays
    pairs = zip(outputs, op.outputs, strict=True)
    array = next(np.asarray(a) for a, value in pairs if kind in value.bad)
    count = f"{(~np.isfinite(array)).sum()} of {array.size} not finite" if array.size > 1 else kind
    got = " and ".join(map(summary, inputs)) or "nothing"
    returned = f"{type_and_shape(array)}: {count}{example(op, inputs, array, kind)}"
    return f"{head}; it got {got}, and returned {returned}{HINTS.get(op.name, '')}"


def code_places(frames):
    """The lines of code of an op, from the innermost, maybe in a library, to the model's."""
    files = [file for file, *_ in frames]
    own = next((i for i, file in enumerate(files) if not is_library(file)), 0)
    other = [is_library(file) or Path(file).is_relative_to(TRAINING) for file in files]
    first_lines = [i for i in range(own + 1, len(files)) if files[i] != files[i - 1]]
    callers = [i for i in first_lines if not other[i]]
    names = [f"{short(f)}:{line} in {name.rpartition('<locals>.')[2]}" for f, line, name in frames]
    if own < len(frames) and (text := linecache.getline(*frames[own][:2]).strip()):
        names[own] += f" (`{text}`)"
    shown = [names[i] for i in sorted({0, own, *callers}) if i < len(names)]
    return ", called from ".join(shown) or "no line of Python code"


def is_in(frame, function):
    """Whether a frame belongs to this function of the toolkit."""
    return (frame[0], frame[2]) == (function.__code__.co_filename, function.__qualname__)


def is_library(file):
    return "-packages/" in file


def short(file):
    """The path of a file below the project, the working directory or the installed packages."""
    if is_library(file):
        return file.rpartition("-packages/")[2]
    bases = [base for base in (TRAINING.parent, Path.cwd()) if Path(file).is_relative_to(base)]
    return str(Path(file).relative_to(bases[0])) if bases else file


def last_parameter(op, phase):
    """The last parameter that contributed to the inputs of an op."""
    values = [value for value in op.inputs if value.fed]
    if not values or phase == UPDATE:
        return ""
    last = max(values, key=lambda value: (value.parameter, value.fed))
    return f", {'with' if last.parameter else 'after'} {last.fed[1].removeprefix('params/')}"


def summary(array):
    """Type, shape and range of an input of an op."""
    text = type_and_shape(array)
    if not jnp.issubdtype(jnp.result_type(array), jnp.number):
        return text
    array = np.asarray(array)
    if array.ndim == 0:
        return f"{text.removesuffix('[]')} {array.item():.4g}"
    finite = np.isfinite(array)
    bad = f" with {(~finite).sum()} of {array.size} not finite"
    if jnp.issubdtype(array.dtype, jnp.inexact):
        text += " all finite" if finite.all() else bad
    if jnp.issubdtype(array.dtype, jnp.complexfloating) or not finite.any():
        return text
    return f"{text} from {array[finite].min():.4g} to {array[finite].max():.4g}"


def example(op, inputs, array, kind):
    """The index of the first bad number and, for an elementwise op, the numbers that made it."""
    index = tuple(np.argwhere(TESTS[kind](array))[0])
    text = f", the first at {first_index(array, kind)}" if array.ndim else ""
    try:
        numbers = [np.broadcast_to(np.asarray(a), array.shape)[index] for a in inputs]
        result = np.asarray(bind(op.path[0], [jnp.asarray(number) for number in numbers])[0])
    except Exception:  # not an elementwise op
        return text
    if result.shape != () or not np.array_equal(result, array[index], equal_nan=True):
        return text
    return f"{text}: {op.name}({', '.join(f'{n:.4g}' for n in numbers)}) = {result:.4g}"


def first_index(array, kind):
    """The index of the first nan or infinity, such as "[4, 2]"; "" for a scalar."""
    return str(np.argwhere(TESTS[kind](array))[0].tolist()) if array.ndim else ""
