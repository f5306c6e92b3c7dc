"""Finds the op that produced the first nan or infinity of a step, its layer and its inputs.

A bad step leaves the state unchanged, so it can be run again, one op at a time. The search starts
at the first bad value among the loss, the gradients and the new state, and goes back through inputs
that are not finite to the op that made one from finite inputs. Values that `jnp.where` masks out
are ignored.
"""

import linecache
import sysconfig
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from training.loss import distribution
from training.programs import leaves_of, type_and_shape
from training.update import floats, genuine, loss_of_examples, made_floats
from utils import counts_of_scan, named_leaves

# {op that only calls a function: its parameter that holds the function}
CALLS = {"jit": "jaxpr", "remat2": "jaxpr", "closed_call": "call_jaxpr"}
CALLS |= {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
TESTS = {"nan": np.isnan, "inf": np.isinf}
TRAINING = Path(__file__).resolve().parents[1]
JAX, PYTHON = f"{Path(jax.__file__).parent}/", f"{sysconfig.get_path('stdlib')}/"
NAMES = {"params": "the parameter", "state": "the model's state"}
NAMES |= {"opt": "the optimizer's state", "ema": "the averaged weight"}
HINTS = {"gather": " (an index outside an array reads nan)"}
UPDATE = "in the update"


@dataclass(eq=False)
class Input:
    """An array of the step's arguments that is not finite."""

    name: str
    array: Any


@dataclass(eq=False)
class Op:
    """An op that returned something that is not finite. `path` is its equation, followed by the
    equations of the calls around it; `rounds` are the iterations of the loops around it."""

    order: int
    path: tuple
    rounds: tuple
    sources: dict  # {kind: [(the Op or Input, or None for a constant, its kind)]}
    arrays: (
        tuple | None
    )  # (those of the inputs, of the outputs), if no input is of an output's kind
    after: tuple | None  # (whether its inputs are parameters alone, the last parameter before it)

    @property
    def name(self):
        return self.path[0].primitive.name

    def frames(self):
        """(file, line, function) of the op's code, innermost first, without JAX and Python."""
        frames = [frame for eqn in self.path for frame in eqn.source_info.traceback.frames]
        own = [frame for frame in frames if not is_foreign(frame.file_name)]
        return [(f.file_name, f.line_num, f.function_name) for f in own]

    def is_under(self, transform):
        """Whether the op comes from this transformation of JAX (`jvp`, `transpose`, ...)."""
        return any(f"{transform}(" in str(eqn.source_info.name_stack) for eqn in self.path)


@dataclass(eq=False)
class Value:
    """A value of the step while it is needed."""

    array: Any
    made_by: Any = None  # the Op or Input, if it is not finite and not a constant
    constant: bool = False  # whether it is computed only from constants in the code
    parameter: bool = False  # whether it is computed only from parameters
    fed: tuple | None = (
        None  # (when a parameter last contributed to it, the name of that parameter)
    )

    def kinds(self):
        """Those of "nan" and "inf" that are in the array."""
        if not jnp.issubdtype(jnp.result_type(self.array), jnp.inexact):
            return []
        array = np.asarray(self.array)
        return [kind for kind, test in TESTS.items() if test(array).any()]


def first_bad_op(step, ts, batch, valid):
    """A sentence about the op that made the first nan or infinity in an Update's step, or None."""
    # All values must be on the same device, and one device is enough.
    ts, batch = jax.device_put((ts, batch), jax.local_devices()[0])

    def computed(ts, batch):
        result = step(ts, batch, valid)
        loss = jnp.where(genuine(batch, valid), loss_of_examples(result.losses), 0)
        made = [*floats(result.grads), *made_floats(result.new)]
        return [loss, *(leaf for _, leaf in made)]

    named = [*named_leaves(ts).items(), *((f"batch/{n}", leaf) for n, leaf in leaves_of(batch))]
    inputs = [as_input(name, leaf) for name, leaf in named]
    closed = jax.make_jaxpr(computed)(ts, batch)
    values = Interpreter().run(closed, inputs, stop_at_bad=closed.jaxpr.outvars[0])
    bad = next((value for value in values if value is not None and value.kinds()), None)
    if bad is None:
        return None
    source, kind = origin(bad)
    if isinstance(source, Input):
        return described_input(source, kind)
    frames = source.frames()
    if frames and is_in(frames[0], distribution):
        return described_label(source, batch, valid)
    return described_op(source, kind, phase(source, bad is values[0]))


def as_input(name, leaf):
    """The Value of an argument of the step."""
    parameter = name.startswith("params")
    return Value(leaf, Input(name, leaf), parameter=parameter, fed=(0, name) if parameter else None)


class Interpreter:
    """Runs a function one op at a time, and remembers how values that are not finite spread."""

    def __init__(self):
        self.count = 0

    def run(self, closed, inputs, path=(), rounds=(), stop_at_bad=None):
        """The output Values of a jaxpr, open or closed. If the variable `stop_at_bad` is not
        finite, it stops there, and the outputs that are not known are None."""
        jaxpr = getattr(closed, "jaxpr", closed)
        constants = [Value(const, constant=True) for const in getattr(closed, "consts", ())]
        known = dict(zip(jaxpr.constvars, constants, strict=True))
        known |= dict(zip(jaxpr.invars, inputs, strict=True))
        outputs = [atom for atom in jaxpr.outvars if not isinstance(atom, Literal)]
        last_use = dict.fromkeys(outputs, len(jaxpr.eqns))
        for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    last_use.setdefault(atom, i)

        def read(atom):
            return Value(atom.val, constant=True) if isinstance(atom, Literal) else known.get(atom)

        for i, eqn in enumerate(jaxpr.eqns):
            results = self.results(eqn, [read(atom) for atom in eqn.invars], (eqn, *path), rounds)
            known |= dict(zip(eqn.outvars, results, strict=True))
            for atom in [*eqn.invars, *eqn.outvars]:  # free what is not needed any more
                if not isinstance(atom, Literal) and last_use.get(atom, -1) <= i:
                    known.pop(atom, None)
            if stop_at_bad in eqn.outvars and known[stop_at_bad].kinds():
                break
        return [read(atom) for atom in jaxpr.outvars]

    def results(self, eqn, operands, path, rounds):
        """The Values of an equation's outputs."""
        name, arrays = eqn.primitive.name, [value.array for value in operands]
        if name in CALLS:
            return self.run(eqn.params[CALLS[name]], operands, path, rounds)
        if name == "cond":
            branches = eqn.params["branches"]
            chosen = np.clip(int(arrays[0]), 0, len(branches) - 1)
            return self.run(branches[chosen], operands[1:], path, rounds)
        if name == "scan" and eqn.params["length"]:
            return self.scan(eqn, operands, path, rounds)
        return self.recorded(operands, bind(eqn, arrays), path, rounds)

    def scan(self, eqn, operands, path, rounds):
        """The outputs of a loop, one iteration after the other."""
        length, (first, carried) = eqn.params["length"], counts_of_scan(eqn.params)
        consts, carry = operands[:first], operands[first : first + carried]
        xs, stacks = operands[first + carried :], []
        order = range(length)[:: -1 if eqn.params["reverse"] else 1]
        for i in order:
            rows = [
                self.recorded([x], [jax.lax.dynamic_index_in_dim(x.array, i, keepdims=False)], path)
                for x in xs
            ]
            inputs = [*consts, *carry, *(row for [row] in rows)]
            shown = f"{i + 1} of {length}"
            results = self.run(eqn.params["jaxpr"], inputs, path, (*rounds, shown))
            carry = results[:carried]
            stacks.append(results[carried:])
        stacks = zip(*(stacks[order.index(i)] for i in range(length)), strict=True)
        together = [
            self.recorded(rows, [jnp.stack([row.array for row in rows])], path) for rows in stacks
        ]
        return [*carry, *(value for [value] in together)]

    def recorded(self, inputs, arrays, path, rounds=()):
        """The Values of these arrays, which an op made from the inputs."""
        self.count += 1
        inputs_of_step = [value for value in inputs if not value.constant]
        constant = not inputs_of_step
        parameter = not constant and all(value.parameter for value in inputs_of_step)
        fed = [
            (self.count if value.parameter and not parameter else value.fed[0], value.fed[1])
            for value in inputs_of_step
            if value.fed
        ]
        values = [
            Value(array, None, constant, parameter, max(fed, default=None)) for array in arrays
        ]
        bad = {kind: value for value in values for kind in value.kinds()}
        if bad and not constant:
            sources = {
                kind: sources_of(path[0], inputs, value, kind) for kind, value in bad.items()
            }
            is_first = any(kind not in kinds_of(sources[kind]) for kind in bad)
            kept = ([value.array for value in inputs], arrays) if is_first else None
            parameters = [(value.parameter, *value.fed) for value in inputs if value.fed]
            after = max(parameters, default=None)
            op = Op(self.count, path, rounds, sources, kept, after and (after[0], after[2]))
            for value in values:
                value.made_by = op
        return values


def kinds_of(sources):
    return [kind for _, kind in sources]


def sources_of(eqn, inputs, value, kind):
    """[(Op, Input or None, its kind)] that made a value nan (or inf): inputs of the same kind if
    there are any."""
    if eqn.primitive.name == "select_n":  # jnp.where: only the cases that it took bad values from
        which, *cases = inputs
        bad = TESTS[kind](np.asarray(value.array))
        taken = np.broadcast_to(np.asarray(which.array).astype(int), bad.shape)[bad]
        inputs = [case for i, case in enumerate(cases) if (taken == i).any()]
    found = [(each.made_by, other) for each in inputs for other in each.kinds()]
    return [pair for pair in found if pair[1] == kind] or found


def origin(bad):
    """(the Op or Input that first made a value not finite, "nan" or "inf")."""
    todo = [(bad.made_by, kind) for kind in bad.kinds()]
    seen, candidates = set(todo), []
    while todo:
        op, kind = todo.pop()
        if isinstance(op, Input):
            return op, kind
        sources = [pair for pair in op.sources[kind] if pair[0] is not None]
        # The most informative origin first: finite numbers; infinities for a nan; a constant.
        reasons = (not op.sources[kind], kind not in kinds_of(op.sources[kind]), not sources)
        if any(reasons):
            candidates.append((reasons.index(True), op.order, op, kind))
        todo += [pair for pair in sources if pair not in seen]
        seen |= set(sources)
    return min(candidates, key=lambda candidate: candidate[:2])[2:]


def bind(eqn, arrays):
    """The outputs of an equation for these inputs."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        outputs = compiled(eqn.primitive, tuple(params.items()))(*arrays)
    return outputs if eqn.primitive.multiple_results else [outputs]


@cache
def compiled(primitive, params):
    """An op as a program, compiled without optimization (in two thirds of the time)."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(partial(primitive.bind, **dict(params)), compiler_options=options)


def phase(op, loss_is_bad):
    """The words for the part of the step to which an op belongs."""
    if loss_is_bad:
        return "in the forward pass"
    if op.is_under("transpose"):
        return "in the backward pass"
    if op.is_under("jvp"):
        return "in the forward pass or its derivative (the loss is finite)"
    return UPDATE


def described_input(source, kind):
    """The sentence on an input of the step that is not finite."""
    array = np.asarray(source.array)
    head, _, rest = source.name.partition("/")
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
    parameter = ""
    if op.after and phase != UPDATE:
        alone, name = op.after
        parameter = f", {'with' if alone else 'after'} {name.removeprefix('params/')}"
    head = (
        f"{op.name} made the first {kind}, {phase}{rounds}: {code_places(op.frames())}{parameter}"
    )
    if op.arrays is None:
        return f"{head}; it is a constant in the code, or computed only from constants"
    inputs, outputs = op.arrays
    array = next(a for a in map(np.asarray, outputs) if kind in Value(a).kinds())
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


def is_foreign(file):
    """Whether a file belongs to JAX or Python, or is op.py, whose wrapper surrounds every layer."""
    if file.endswith("model/layers/op.py") or file.startswith((JAX, "<frozen")):
        return True
    return file.startswith(PYTHON) and "-packages/" not in file


def is_library(file):
    return "-packages/" in file


def short(file):
    """The path of a file below the project, the working directory or the installed packages."""
    if is_library(file):
        return file.rpartition("-packages/")[2]
    bases = [base for base in (TRAINING.parent, Path.cwd()) if Path(file).is_relative_to(base)]
    return str(Path(file).relative_to(bases[0])) if bases else file


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
