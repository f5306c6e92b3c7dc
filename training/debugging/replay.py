"""Runs a step again, one op at a time, and records how values that are not finite spread."""

import sysconfig
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from utils import counts_of_scan

# {op that only calls a function: its parameter that holds the function}
CALLS = {"jit": "jaxpr", "remat2": "jaxpr", "closed_call": "call_jaxpr"}
CALLS |= {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
JAX, PYTHON = f"{Path(jax.__file__).parent}/", f"{sysconfig.get_path('stdlib')}/"
TESTS = {"nan": np.isnan, "inf": np.isinf}


class Value:
    """One value of the step. Its array is freed after its last use; the other fields stay."""

    def __init__(self, array=None, *, name=None, constant=False, parameter=False):
        self.array, self.name = array, name  # only inputs of the step have a name
        # Whether it is computed only from constants in the code; only from parameters.
        self.constant, self.parameter = constant, parameter
        # (when a parameter last contributed to it, the name of that parameter)
        self.fed = (0, name) if parameter else None
        self.bad = kinds_in(array)  # a subset of {"nan", "inf"}
        self.maker, self.uses = None, 0  # the op that computed it; how many ops still need it


class Op:
    """One op of the step. `path` is its equation, followed by the equations of the calls around it;
    `rounds` are the iterations of the loops around it."""

    def __init__(self, path, rounds, inputs, outputs):
        self.path, self.rounds, self.inputs, self.outputs = path, rounds, inputs, outputs
        self.name, self.params = path[0].primitive.name, path[0].params
        self.order = None  # when it was evaluated
        # {kind: [(input, kind of the input)]}: the inputs that made an output nan or inf
        self.sources = {}
        # (arrays of the inputs, of the outputs), if an output has a kind that no input has
        self.arrays = None
        for value in outputs:
            value.maker = self

    def frames(self):
        """(file, line, function) of the op's code, innermost first, without JAX and Python."""
        frames = [frame for eqn in self.path for frame in eqn.source_info.traceback.frames]
        own = [frame for frame in frames if not is_foreign(frame.file_name)]
        return [(f.file_name, f.line_num, f.function_name) for f in own]

    def is_under(self, transform):
        """Whether the op comes from this transformation of JAX (`jvp`, `transpose`, ...)."""
        return any(f"{transform}(" in str(eqn.source_info.name_stack) for eqn in self.path)

    def is_first(self, kind):
        """Whether the op's output is nan (or inf) although no input is."""
        return all(input_kind != kind for _, input_kind in self.sources[kind])


class Replay:
    """The ops of a function of `leaves`, with calls inlined; loops are expanded when evaluated."""

    def __init__(self, closed, leaves):
        self.ops, self.count = [], 0
        self.outputs = self.inline(closed, leaves, (), ())

    def inline(self, jaxpr, inputs, path, rounds):
        """Append the ops of a jaxpr, open or closed, and return its outputs."""
        consts, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
        constants = [Value(const, constant=True) for const in consts]
        values = dict(zip(jaxpr.constvars, constants, strict=True))
        values |= dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom):
            return Value(atom.val, constant=True) if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            if called := CALLS.get(eqn.primitive.name):
                results = self.inline(eqn.params[called], operands, (eqn, *path), rounds)
            else:
                results = [Value() for _ in eqn.outvars]
                self.ops.append(Op((eqn, *path), rounds, hold(operands), results))
            values |= dict(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def evaluate(self, targets):
        """Evaluate the targets, and hold them; values that are known already are not recomputed."""
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
                self.record(op, bind(op.path[0], [value.array for value in op.inputs]))
            op.order = self.count
            release(op.inputs)

    def cond(self, op):
        """Evaluate the chosen branch."""
        index, *operands = op.inputs
        branches = op.params["branches"]
        number = np.clip(int(index.array), 0, len(branches) - 1)
        results = self.body(branches[number], operands, op)
        for out, value in zip(op.outputs, results, strict=True):
            self.pass_on(op, [value], out, value.array)
        release(results)

    def scan(self, op):
        """Evaluate a loop, one iteration after the other."""
        length, (first, carried) = op.params["length"], counts_of_scan(op.params)
        last = first + carried
        consts, carry, xs = op.inputs[:first], op.inputs[first:last], op.inputs[last:]
        rounds = range(length)[:: -1 if op.params["reverse"] else 1]
        stacks = [[None] * length for _ in op.outputs[last - first :]]
        for i in rounds:
            rows = [jax.lax.dynamic_index_in_dim(x.array, i, keepdims=False) for x in xs]
            rows = [self.pass_on(op, [x], Value(), row) for x, row in zip(xs, rows, strict=True)]
            operands = [*consts, *carry, *rows]
            results = self.body(op.params["jaxpr"], operands, op, (f"{i + 1} of {length}",))
            release(carry if i != rounds[0] else ())
            carry = results[: last - first]
            for stack, value in zip(stacks, results[last - first :], strict=True):
                stack[i] = value
        for out, value in zip(op.outputs, carry, strict=False):
            self.pass_on(op, [value], out, value.array)
        for out, stack in zip(op.outputs[last - first :], stacks, strict=True):
            self.pass_on(op, stack, out, jnp.stack([value.array for value in stack]))
            release(stack)
        release(carry)

    def body(self, closed, operands, op, rounds=()):
        """The outputs of the body of a loop or branch, evaluated and held."""
        outer, self.ops = self.ops, []
        results = self.inline(closed, hold(operands), op.path, op.rounds + rounds)
        self.evaluate(results)
        release(operands)
        self.ops = outer
        return results

    def pass_on(self, op, inputs, out, array):
        """Record `out` as a copy of a value, a row of one, or several stacked, and return it."""
        self.record(Op(op.path, op.rounds, inputs, [out]), [array])
        return out

    def record(self, op, arrays):
        """Store the outputs of an op and what is known about them."""
        self.count += 1
        op.order = self.count
        inputs = [value for value in op.inputs if not value.constant]
        parameter = bool(inputs) and all(value.parameter for value in inputs)
        fed = []
        for value in inputs:
            if value.fed:
                order, name = value.fed
                fed.append((op.order if value.parameter and not parameter else order, name))
        for value, array in zip(op.outputs, arrays, strict=True):
            value.array, value.bad = array, kinds_in(array)
            value.constant, value.parameter = not inputs, parameter
            value.fed = max(fed, default=None)
        op.sources = {kind: sources(op, kind) for value in op.outputs for kind in value.bad}
        if any(op.is_first(kind) for kind in op.sources):
            op.arrays = [value.array for value in op.inputs], list(arrays)


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


def hold(values):
    """Count one more use of each value."""
    for value in values:
        value.uses += 1
    return values


def release(values):
    """Count one use fewer of each value; free arrays that are no longer needed."""
    for value in values:
        value.uses -= 1
        if value.uses == 0 and value.maker is not None:
            value.array = None


def kinds_in(array):
    """Which of "nan" and "inf" an array contains."""
    if array is None or not jnp.issubdtype(jnp.result_type(array), jnp.inexact):
        return frozenset()
    array = np.asarray(array)
    return frozenset(kind for kind, test in TESTS.items() if test(array).any())


def sources(op, kind):
    """[(input, its kind)] that made an output nan (or inf): inputs of the same kind if any."""
    inputs = op.inputs
    if op.name == "select_n":  # jnp.where: only the cases from which it took the nans (or infs)
        which, *cases = op.inputs
        bad = TESTS[kind](np.asarray(op.outputs[0].array))
        taken = np.broadcast_to(np.asarray(which.array).astype(int), bad.shape)[bad]
        inputs = [case for i, case in enumerate(cases) if (taken == i).any()]
    same = [(value, kind) for value in inputs if kind in value.bad]
    return same or [(value, other) for value in inputs for other in value.bad]


def is_foreign(file):
    """Whether a file belongs to JAX or Python, or is op.py, whose wrapper surrounds every layer."""
    if file.endswith("model/layers/op.py") or file.startswith((JAX, "<frozen")):
        return True
    return file.startswith(PYTHON) and "-packages/" not in file
