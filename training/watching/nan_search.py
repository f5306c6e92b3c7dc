"""Finds the operation that made the first nan or infinity of a step, its layer and its inputs.

A bad step leaves the state unchanged, so it can be taken again, one operation at a time. The search
starts at the first bad value among the loss, the gradients and the new state, and goes back through
inputs that are not finite to the operation that made one from finite inputs. Values that
`jnp.where` masks out are ignored.
"""

import linecache
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from typing import Literal as OneOf

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import Array, Int, PyTree

from training.base import StepResult, TrainState
from training.engine import leaves_of, type_and_shape
from training.loss import distribution
from training.update import floats, genuine, loss_of_examples, made_floats
from utils import counts_of_scan, is_library, named_leaves, relative_path

Kind: TypeAlias = OneOf["nan", "inf"]

# {operation that only calls a function: its parameter that holds the function}
CALLS = {"jit": "jaxpr", "remat2": "jaxpr", "closed_call": "call_jaxpr"}
CALLS |= {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
TESTS: dict[Kind, Callable[[np.ndarray], np.ndarray]] = {"nan": np.isnan, "inf": np.isinf}
TRAINING = Path(__file__).resolve().parents[1]
JAX, PYTHON = f"{Path(jax.__file__).parent}/", f"{sysconfig.get_path('stdlib')}/"
NAMES = {"params": "the parameter", "state": "the model's state"}
NAMES |= {"opt": "the optimizer's state", "ema": "the averaged weight"}
HINTS = {"gather": " (an index outside an array reads nan)"}
UPDATE = "in the update"
NOT_FIRST = 3  # the rank of an operation that was given what is bad about its result


Equations: TypeAlias = tuple[
    JaxprEqn, ...
]  # that of an operation, then those of the calls around it
Rounds: TypeAlias = tuple[str, ...]  # the iterations of the loops around an operation


class Frame(NamedTuple):
    """A line of code."""

    file: str
    line: int
    function: str


@dataclass(eq=False)
class Cause:
    """What made a value that is not finite: an operation, or an argument of the step, which has a
    name. `rank` is 0 for an operation with finite inputs, 1 if it made nan of infinities, 2 if its
    bad inputs are constants in the code."""

    kind: Kind
    rank: int
    order: int = 0  # of the operation in the step
    sources: tuple["Cause", ...] = ()  # the Causes of the inputs that are not finite
    path: Equations = ()
    rounds: Rounds = ()
    after: str = ""  # the last parameter that contributed
    name: str = ""  # of an argument
    inputs: tuple[Array, ...] = ()  # only of what may be the first cause
    array: Any = None  # the result


class Value(NamedTuple):
    """An array of the step while it is needed."""

    array: Any
    constant: bool = False  # whether it is computed only from constants in the code
    # (when a parameter last contributed to it, or 0 if it is computed from parameters alone, the
    # name of that parameter)
    after: tuple[int, str] | None = None
    cause: Cause | None = None  # if it is not finite and not a constant

    @property
    def kind(self) -> Kind | None:
        """ "nan" or "inf" if such numbers are in the array."""
        if not jnp.issubdtype(jnp.result_type(self.array), jnp.inexact):
            return None
        return next((k for k, test in TESTS.items() if test(np.asarray(self.array)).any()), None)


def first_bad_op(
    step: Callable[..., StepResult], ts: TrainState, batch: PyTree, valid: Int[Array, ""] | int
) -> str | None:
    """A sentence about the operation that made the first nan or infinity in an Update's step, or
    None."""
    # All values must be on the same device, and one device is enough.
    ts, batch = jax.device_put((ts, batch), jax.local_devices()[0])

    def computed(ts: TrainState, batch: PyTree) -> list[Array]:
        result = step(ts, batch, valid)
        loss = jnp.where(genuine(batch, valid), loss_of_examples(result.losses), 0)
        return [loss, *(leaf for _, leaf in (*floats(result.grads), *made_floats(result.new)))]

    closed = jax.make_jaxpr(computed)(ts, batch)
    named = [*named_leaves(ts).items(), *((f"batch/{n}", leaf) for n, leaf in leaves_of(batch))]
    arguments = [argument(name, leaf) for name, leaf in named]
    loss, *others = Interpreter().run(closed, arguments)
    bad = next((value.cause for value in (loss, *others) if value.cause), None)
    if bad is None:
        return None
    cause = first_cause(bad)
    if cause.name:
        return described_argument(cause)
    frames = frames_of(cause)
    of_labels = unwrap(distribution).__code__.co_filename, distribution.__qualname__
    if frames and (frames[0].file, frames[0].function) == of_labels:
        return described_label(cause, batch, valid)
    return described_op(cause, frames, phase(cause, bad is loss.cause))


def argument(name: str, leaf: Array) -> Value:
    """The Value of an argument of the step."""
    value = Value(leaf, after=(0, name) if name.startswith("params") else None)
    cause = value.kind and Cause(value.kind, -1, name=name, array=leaf)
    return value._replace(cause=cause)


class Interpreter:
    """Runs a function one operation at a time, and remembers how values that are not finite
    spread."""

    def __init__(self) -> None:
        self.count = 0

    def run(
        self,
        closed: ClosedJaxpr | Jaxpr,
        inputs: Sequence[Value],
        path: Equations = (),
        rounds: Rounds = (),
    ) -> list[Value]:
        """The Values that a jaxpr, open or closed, makes from these."""
        jaxpr = getattr(closed, "jaxpr", closed)
        constants = [Value(const, constant=True) for const in getattr(closed, "consts", ())]
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True))
        uses = [(atom, i) for i, eqn in enumerate(jaxpr.eqns) for atom in eqn.invars]
        uses += [(atom, len(jaxpr.eqns)) for atom in jaxpr.outvars]
        last_use = {atom: i for atom, i in uses if not isinstance(atom, Literal)}

        def read(atom: Var | Literal) -> Value:
            return Value(atom.val, constant=True) if isinstance(atom, Literal) else known[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            results = self.results(eqn, [read(atom) for atom in eqn.invars], (eqn, *path), rounds)
            known |= dict(zip(eqn.outvars, results, strict=True))
            for atom in [*eqn.invars, *eqn.outvars]:  # free what is not needed any more
                if not isinstance(atom, Literal) and last_use.get(atom, i) == i:
                    known.pop(atom, None)
        return [read(atom) for atom in jaxpr.outvars]

    def results(
        self, eqn: JaxprEqn, operands: Sequence[Value], path: Equations, rounds: Rounds
    ) -> list[Value]:
        """The Values of an equation's results."""
        name = eqn.primitive.name
        if name in CALLS:
            return self.run(eqn.params[CALLS[name]], operands, path, rounds)
        if name == "cond":
            branches = eqn.params["branches"]
            chosen = np.clip(int(operands[0].array), 0, len(branches) - 1)
            return self.run(branches[chosen], operands[1:], path, rounds)
        if name == "scan" and eqn.params["length"]:
            return self.scan(eqn.params, operands, path, rounds)
        arrays = bind(eqn, [value.array for value in operands])
        return [self.recorded(operands, array, path, rounds) for array in arrays]

    def scan(
        self, params: dict[str, Any], operands: Sequence[Value], path: Equations, rounds: Rounds
    ) -> list[Value]:
        """The results of a loop over rows."""
        length, (first, carried) = params["length"], counts_of_scan(params)
        consts, carry = operands[:first], operands[first : first + carried]
        xs, made = operands[first + carried :], {}
        for i in reversed(range(length)) if params["reverse"] else range(length):
            row_of = partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
            rows = [self.recorded([x], row_of(x.array), path) for x in xs]
            inside = (*rounds, f"{i + 1} of {length}")
            results = self.run(params["jaxpr"], [*consts, *carry, *rows], path, inside)
            carry, made[i] = results[:carried], results[carried:]
        stacks = zip(*(made[i] for i in range(length)), strict=True)
        arrays = [(rows, jnp.stack([row.array for row in rows])) for rows in stacks]
        return [*carry, *(self.recorded(rows, array, path) for rows, array in arrays)]

    def recorded(
        self, inputs: Sequence[Value], array: Array, path: Equations, rounds: Rounds = ()
    ) -> Value:
        """The Value of an array that an operation made from the inputs."""
        self.count += 1
        constant = all(value.constant for value in inputs)
        after = max((value.after for value in inputs if value.after), default=None)
        fresh = [value.after[1] for value in inputs if value.after and value.after[0] == 0]
        if fresh and any(v.after is None or v.after[0] for v in inputs if not v.constant):
            after = self.count, fresh[-1]
        value = Value(array, constant, after)
        if constant or not (kind := value.kind):
            return value
        sources = sources_of(path[0], inputs, array, kind)
        causes = tuple(source.cause for source in sources if source.cause)
        is_first = not sources, sources and sources[0].kind != kind, not causes, True
        cause = Cause(kind, is_first.index(True), self.count, causes, path, rounds)
        if cause.rank < NOT_FIRST:
            cause.array, cause.inputs = array, tuple(value.array for value in inputs)
            cause.after = after[1].removeprefix("params/") if after else ""
        return value._replace(cause=cause)


def sources_of(eqn: JaxprEqn, inputs: Sequence[Value], array: Array, kind: Kind) -> list[Value]:
    """The inputs that made a result nan (or inf): those of the same kind if there are any."""
    if eqn.primitive.name == "select_n":  # jnp.where: only the cases that it took bad values from
        which, *cases = inputs
        bad = TESTS[kind](np.asarray(array))
        taken = np.broadcast_to(np.asarray(which.array).astype(int), bad.shape)[bad]
        inputs = [case for i, case in enumerate(cases) if (taken == i).any()]
    bad = [value for value in inputs if value.kind]
    return [value for value in bad if value.kind == kind] or bad


def first_cause(bad: Cause) -> Cause:
    """The first of all Causes of a bad value, the most informative ones before the others."""
    todo, causes = [bad], set()
    while todo:
        if (cause := todo.pop()) not in causes:
            causes.add(cause)
            todo += cause.sources
    return min(causes, key=lambda cause: (cause.rank, cause.order))


def bind(eqn: JaxprEqn, arrays: Sequence[Any]) -> list[Array]:
    """The results of an equation for these inputs."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*arrays, **params)
    return results if eqn.primitive.multiple_results else [results]


def phase(cause: Cause, loss_is_bad: bool) -> str:
    """The words for the part of the step to which an operation belongs."""
    if loss_is_bad:
        return "in the forward pass"
    transforms = "".join(str(eqn.source_info.name_stack) for eqn in cause.path)
    if "transpose(" in transforms:
        return "in the backward pass"
    if "jvp(" in transforms:
        return "in the forward pass or its derivative (the loss is finite)"
    return UPDATE


def described_argument(cause: Cause) -> str:
    """The sentence on an argument of the step that is not finite."""
    array = np.asarray(cause.array)
    head, _, rest = cause.name.partition("/")
    name = f"{NAMES.get(head, head)} {rest}".strip() + first_index(array, cause.kind)
    many = f" ({bad_of(array)} numbers are not finite)" if array.size > 1 else ""
    if head == "batch":
        return f"the data itself: {name} is {cause.kind}{many}"
    return f"not this step: {name} was already {cause.kind} before it{many}"


def described_label(cause: Cause, batch: PyTree, valid: Int[Array, ""] | int) -> str:
    """The sentence on a label outside the classes, for which training.loss returns nan."""
    classes = cause.array.shape[-1]
    allowed = f"outside the {classes} classes, 0 to {classes - 1}"
    for name, leaf in leaves_of(batch):
        labels = np.asarray(leaf)[: int(valid)]
        if name.split("/")[0] == "y" and np.issubdtype(labels.dtype, np.integer):
            for index in np.argwhere((labels < 0) | (labels >= classes)):
                found = f"batch {name}{index.tolist()} is {labels[tuple(index)]}"
                return f"the data itself: {found}, a label {allowed}"
    return f"a label is {allowed}"


def described_op(cause: Cause, frames: list[Frame], phase: str) -> str:
    """The sentence on an operation that made a nan or an infinity."""
    operation = cause.path[0].primitive.name
    rounds = "".join(f", in iteration {number} of a loop" for number in cause.rounds)
    after = f", after {cause.after}" if cause.after and phase != UPDATE else ""
    head = f"{operation} made the first {cause.kind}, {phase}{rounds}: {code_places(frames)}{after}"
    if cause.rank == 2:
        return f"{head}; it is a constant in the code, or computed only from constants"
    array = np.asarray(cause.array)
    count = f"{bad_of(array)} not finite" if array.size > 1 else cause.kind
    got = " and ".join(map(summary, cause.inputs)) or "nothing"
    returned = f"{type_and_shape(array)}: {count}{example(cause, array)}"
    return f"{head}; it got {got}, and returned {returned}{HINTS.get(operation, '')}"


def frames_of(cause: Cause) -> list[Frame]:
    """The lines of an operation's code, innermost first, without JAX, Python and
    op.py, whose wrapper surrounds every layer."""
    tracebacks = [eqn.source_info.traceback for eqn in cause.path]
    frames = [frame for traceback in tracebacks if traceback for frame in traceback.frames]
    return [
        Frame(f.file_name, f.line_num, f.function_name)
        for f in frames
        if not f.file_name.startswith((JAX, "<frozen"))
        and not f.file_name.endswith("model/layers/op.py")
        and (is_library(f.file_name) or not f.file_name.startswith(PYTHON))
    ]


def code_places(frames: list[Frame]) -> str:
    """The lines of code of an operation: the innermost, which may be in a library, the innermost
    outside of libraries, and the calls of the model around it."""
    shown, own, before = [], None, None
    for file, line, function in frames:
        is_own = own is None and not is_library(file)
        is_model = not is_library(file) and not Path(file).is_relative_to(TRAINING)
        if is_own or not shown or (own and is_model and file != before):
            path = file.rpartition("-packages/")[2] if is_library(file) else relative_path(file)
            shown.append(f"{path}:{line} in {function.rpartition('<locals>.')[2]}")
        if is_own:
            own = file
            shown[-1] += f" (`{linecache.getline(file, line).strip()}`)"
        before = file
    return ", called from ".join(shown) or "no line of Python code"


def summary(array: Array) -> str:
    """Type, shape and range of an input of an operation."""
    text, numbers = type_and_shape(array), np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.number):
        return text
    if numbers.ndim == 0:
        return f"{text.removesuffix('[]')} {numbers.item():.4g}"
    finite = np.isfinite(numbers)
    if jnp.issubdtype(array.dtype, jnp.inexact):
        text += " all finite" if finite.all() else f" with {bad_of(numbers)} not finite"
    if jnp.issubdtype(array.dtype, jnp.complexfloating) or not finite.any():
        return text
    return f"{text} from {numbers[finite].min():.4g} to {numbers[finite].max():.4g}"


def example(cause: Cause, array: np.ndarray) -> str:
    """The index of the first bad number and, for an elementwise operation, the numbers that made
    it."""
    index = tuple(np.argwhere(TESTS[cause.kind](array))[0])
    text = f", the first at {first_index(array, cause.kind)}" if array.ndim else ""
    try:
        numbers = [np.broadcast_to(np.asarray(a), array.shape)[index] for a in cause.inputs]
        result = np.asarray(bind(cause.path[0], [jnp.asarray(number) for number in numbers])[0])
    except Exception:  # not an elementwise operation
        return text
    if result.shape != () or not np.array_equal(result, array[index], equal_nan=True):
        return text
    shown = ", ".join(f"{number:.4g}" for number in numbers)
    return f"{text}: {cause.path[0].primitive.name}({shown}) = {result:.4g}"


def bad_of(array: np.ndarray) -> str:
    """How many numbers of an array are not finite, such as "5 of 20"."""
    return f"{(~np.isfinite(array)).sum()} of {array.size}"


def first_index(array: np.ndarray, kind: Kind) -> str:
    """The index of the first nan or infinity, such as "[4, 2]"; "" for a scalar."""
    return str(np.argwhere(TESTS[kind](array))[0].tolist()) if array.ndim else ""
