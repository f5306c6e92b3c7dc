"""A step taken again, one operation at a time, with what is not finite followed from value to value."""

import sysconfig
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

# Operations that are nothing but a call, and the parameter that holds what is called.
CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
JAX, PYTHON = f"{Path(jax.__file__).parent}/", f"{sysconfig.get_path('stdlib')}/"


class Value:
    """One value of the step. What is known of it stays; its array goes when nothing needs it any more."""

    def __init__(self, array=None, *, name=None, constant=False, parameter=False):
        self.array, self.name = array, name  # a name is that of an input of the step
        self.constant, self.parameter = (
            constant,
            parameter,
        )  # whether it comes from the code alone, from parameters alone
        self.fed = (
            (0, name) if parameter else None
        )  # when a parameter flowed into it last, and which
        self.bad = kinds_in(array)  # of "nan" and "inf"
        self.maker, self.uses = (
            None,
            0,
        )  # the operation that made it; how many to come need its array


class Op:
    """One operation; `path` is its equation and behind it those of the calls around it, `rounds` are those of the loops."""

    def __init__(self, path, rounds, inputs, outputs):
        self.path, self.rounds, self.inputs, self.outputs = path, rounds, inputs, outputs
        self.name, self.params = path[0].primitive.name, path[0].params
        self.order = None  # when it was evaluated
        self.sources = {}  # {kind: [(value, its kind)]}: through which inputs its outputs came to be nan, inf
        self.arrays = None  # (of the inputs, of the outputs), where no input was nan but an output is, or none inf
        for value in outputs:
            value.maker = self

    def frames(self):
        """(file, line, function) of the code behind it, innermost first, without JAX's own, Python's and the mark's."""
        frames = [frame for eqn in self.path for frame in eqn.source_info.traceback.frames]
        return [
            (f.file_name, f.line_num, f.function_name)
            for f in frames
            if not is_foreign(f.file_name)
        ]

    def is_under(self, transform):
        """Whether it was made by jax's `jvp`, `transpose`, ..."""
        return any(f"{transform}(" in str(eqn.source_info.name_stack) for eqn in self.path)

    def is_first(self, kind):
        """Whether it made a nan, or an infinity, of what was none."""
        return all(of != kind for _, of in self.sources[kind])


class Replay:
    """The operations of a function of `leaves`, in order, with calls in line. Loops and branches unfold when their turn comes."""

    def __init__(self, closed, leaves):
        self.ops, self.count = [], 0
        self.outputs = self.flatten(closed, leaves, (), ())

    def flatten(self, jaxpr, inputs, path, rounds):
        """Append the operations of a jaxpr, open or closed, and answer its outputs."""
        consts, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
        values = dict(
            zip(jaxpr.constvars, [Value(const, constant=True) for const in consts], strict=True)
        )
        values |= dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom):
            return Value(atom.val, constant=True) if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            given, place, called = (
                [read(atom) for atom in eqn.invars],
                (eqn, *path),
                CALLS.get(eqn.primitive.name),
            )
            if called:
                made = self.flatten(eqn.params[called], given, place, rounds)
            else:
                made = [Value() for _ in eqn.outvars]
                self.ops.append(Op(place, rounds, hold(given), made))
            values |= dict(zip(eqn.outvars, made, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def reach(self, targets):
        """Evaluate what the targets need and is not evaluated yet; the targets are held."""
        wanted, chosen = set(hold(targets)), []
        for op in reversed(self.ops):
            if op.order is None and not wanted.isdisjoint(op.outputs):
                chosen.append(op)
                wanted |= set(op.inputs)
        for op in reversed(chosen):
            if op.name == "scan" and op.params["length"]:
                self.scan(op)
            elif op.name == "cond":
                self.cond(op)
            else:
                self.note(op, bind(op.path[0], [value.array for value in op.inputs]))
            op.order = self.count
            release(op.inputs)

    def cond(self, op):
        """A branch."""
        index, *given = op.inputs
        branches = op.params["branches"]
        made = self.inside(branches[np.clip(int(index.array), 0, len(branches) - 1)], given, op)
        for out, value in zip(op.outputs, made, strict=True):
            self.hand_on(op, [value], out, value.array)
        release(made)

    def scan(self, op):
        """A loop, round by round."""
        length, first = op.params["length"], op.params["num_consts"]
        last = first + op.params["num_carry"]
        kept, carry, xs = op.inputs[:first], op.inputs[first:last], op.inputs[last:]
        rounds = range(length)[:: -1 if op.params["reverse"] else 1]
        stacks = [[None] * length for _ in op.outputs[last - first :]]
        for i in rounds:
            rows = [jax.lax.dynamic_index_in_dim(x.array, i, keepdims=False) for x in xs]
            rows = [self.hand_on(op, [x], Value(), row) for x, row in zip(xs, rows, strict=True)]
            made = self.inside(
                op.params["jaxpr"], [*kept, *carry, *rows], op, (f"{i + 1} of {length}",)
            )
            release(carry if i != rounds[0] else ())
            carry = made[: last - first]
            for stack, value in zip(stacks, made[last - first :], strict=True):
                stack[i] = value
        for out, value in zip(op.outputs, carry, strict=False):
            self.hand_on(op, [value], out, value.array)
        for out, stack in zip(op.outputs[last - first :], stacks, strict=True):
            self.hand_on(op, stack, out, jnp.stack([value.array for value in stack]))
            release(stack)
        release(carry)

    def inside(self, closed, given, op, rounds=()):
        """The outputs of a body, evaluated and held."""
        around, self.ops = self.ops, []
        made = self.flatten(closed, hold(given), op.path, op.rounds + rounds)
        self.reach(made)
        release(given)
        self.ops = around
        return made

    def hand_on(self, op, inputs, out, array):
        """A value that is nothing but others, stacked, or a row of one."""
        self.note(Op(op.path, op.rounds, inputs, [out]), [array])
        return out

    def note(self, op, arrays):
        """Keep what was learned of an operation, now that it is evaluated."""
        self.count += 1
        op.order = self.count
        inputs = [value for value in op.inputs if not value.constant]
        parameter = bool(inputs) and all(value.parameter for value in inputs)
        fed = [
            (op.order if value.parameter and not parameter else value.fed[0], value.fed[1])
            for value in inputs
            if value.fed
        ]
        for value, array in zip(op.outputs, arrays, strict=True):
            value.array, value.bad = array, kinds_in(array)
            value.constant, value.parameter, value.fed = (
                not inputs,
                parameter,
                max(fed, default=None),
            )
        op.sources = {kind: sources(op, kind) for value in op.outputs for kind in value.bad}
        if any(op.is_first(kind) for kind in op.sources):
            op.arrays = [value.array for value in op.inputs], list(arrays)


def bind(eqn, arrays):
    """The outputs of an equation."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        made = compiled(eqn.primitive, tuple(params.items()))(*arrays)
    return made if eqn.primitive.multiple_results else [made]


@cache
def compiled(primitive, params):
    """An operation as a program, compiled without optimization: in two thirds of the time."""
    return jax.jit(
        partial(primitive.bind, **dict(params)),
        compiler_options={"xla_backend_optimization_level": 0},
    )


def hold(values):
    """One use more of each."""
    for value in values:
        value.uses += 1
    return values


def release(values):
    """One use less of each; arrays that nothing needs are let go."""
    for value in values:
        value.uses -= 1
        if value.uses == 0 and value.maker is not None:
            value.array = None


def kinds_in(array):
    """Which of "nan" and "inf" are in an array."""
    if array is None or not jnp.issubdtype(jnp.result_type(array), jnp.inexact):
        return frozenset()
    array = np.asarray(array)
    if np.isfinite(array).all():
        return frozenset()
    return frozenset(
        kind for kind, test in (("nan", np.isnan), ("inf", np.isinf)) if test(array).any()
    )


def sources(op, kind):
    """[(input, its kind)] through which an output came to be nan, or inf: of the same kind where there is one."""
    inputs = chosen(op, kind) if op.name == "select_n" else op.inputs
    same = [(value, kind) for value in inputs if kind in value.bad]
    return same or [(value, other) for value in inputs for other in value.bad]


def chosen(op, kind):
    """The cases that a select_n (jnp.where) took at the places where its output is nan, or inf."""
    which, *cases = op.inputs
    bad = {"nan": np.isnan, "inf": np.isinf}[kind](np.asarray(op.outputs[0].array))
    taken = np.broadcast_to(np.asarray(which.array).astype(int), bad.shape)[bad]
    return [case for i, case in enumerate(cases) if (taken == i).any()]


def is_foreign(file):
    """Whether a file is part of JAX or of Python, or the export mark, which stands between a layer and its caller."""
    if file.endswith("model/layers/op.py"):
        return True
    return file.startswith((JAX, "<frozen")) or (
        file.startswith(PYTHON) and "-packages/" not in file
    )
