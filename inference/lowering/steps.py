"""A flat jaxpr, read from its results to its inputs; what has many forms is shown in one."""

from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal, Var

from inference.lowering.equations import is_identity

COMMUTATIVE = {"add", "add_any", "mul", "max", "min", "and", "or", "eq", "ne"}
UNCOMPARED = {"sharding", "out_sharding", "precision", "accuracy", "weak_type"}
UNCOMPARED |= {"preferred_element_type", "out_dtype"}  # the types of all results are compared
VIEWS = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"}


class Step(NamedTuple):
    """An equation; the operands of an elementwise one have labels, as its result has."""

    name: str
    params: dict
    operands: list  # (atom, labels)


class Graph:
    """A flat jaxpr, read from its results to its inputs."""

    def __init__(self, closed):
        jaxpr = closed.jaxpr
        self.makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self.inverses = {}  # {root: a variable for one over it}
        self.under_root = {}  # {that variable: the array under the root}
        self.parts = {}  # {variable: (name of its step, its operands)}
        self.compared = {}  # {(outline, variable): whether the variable has it}

    def maker(self, atom):
        return None if isinstance(atom, Literal) else self.makers.get(atom)

    def is_computed(self, atom):
        return self.maker(atom) is not None or (
            not isinstance(atom, Literal) and atom in self.under_root
        )

    def constant(self, atom):
        """The array of a constant; None for anything that is computed."""
        if isinstance(atom, Literal):
            return np.asarray(atom.val, atom.aval.dtype)
        if atom in self.constants and hasattr(self.constants[atom], "shape"):
            return np.asarray(self.constants[atom])
        return None

    def number(self, atom):
        """The number of a constant that is a single one, broadcast or not; else None."""
        array = self.constant(self.settled(atom, labels_of(atom))[0])
        return array.item() if array is not None and array.size == 1 else None

    def settled(self, atom, labels):
        """The array behind views and no-ops, with the labels of its axes; None for size 1."""
        while (eqn := self.maker(atom)) is not None:
            source = self.source(eqn, labels)
            if source is None:
                break
            atom, labels = source
        sizes = atom.aval.shape
        return atom, tuple(None if is_one(n) else k for n, k in zip(sizes, labels, strict=True))

    def source(self, eqn, labels):
        """(operand, labels) of an equation that only changes the form; None for another one."""
        name, x = eqn.primitive.name, (eqn.invars or [None])[0]
        if name in VIEWS:
            labels = labels_before(eqn, labels)
            return None if labels is None else (x, labels)
        if is_identity(eqn):
            return x, labels
        if name == "select_n" and (which := self.number(x)) is not None:
            x = eqn.invars[1 + int(which)]
            return x, labels if x.aval.shape else ()
        neutral = {"and": True, "max": -np.inf, "sub": 0.0}.get(name)
        dtype = eqn.outvars[0].aval.dtype
        if neutral is None or not (is_float(dtype) or str(dtype) == "bool"):
            return None
        for x, other in (eqn.invars, eqn.invars[::-1] if name != "sub" else eqn.invars):
            if x.aval.shape and self.number(other) == neutral:
                return x, labels
        return None

    def step(self, atom, labels):
        """The equation that computes a settled atom, in its common form."""
        if atom in self.under_root:
            return Step("rsqrt", {}, [(self.under_root[atom], labels)])
        eqn = self.maker(atom)
        name, params = eqn.primitive.name, eqn.params
        operands = [(x, labels if x.aval.shape else ()) for x in eqn.invars]
        if name == "square" or (name == "integer_pow" and params["y"] == 2):
            return Step("mul", {}, operands * 2)
        if name == "pow" and (power := self.number(eqn.invars[1])) in (-0.5, 0.5, 2.0):
            named = {-0.5: ("rsqrt", 1), 0.5: ("sqrt", 1), 2.0: ("mul", 2)}[power]
            return Step(named[0], {}, operands[:1] * named[1])
        if name == "div" and is_float(eqn.outvars[0].aval.dtype):
            return self.quotient(*operands)
        params = {k: v for k, v in params.items() if k not in UNCOMPARED and v is not None}
        return Step("add" if name == "add_any" else name, params, operands)

    def quotient(self, x, y):
        """A division by a number or by a root is a multiplication."""
        number, (below, labels) = self.number(y[0]), self.settled(*y)
        if number:
            inverse = np.asarray(1 / number, y[0].aval.dtype)
            return Step("mul", {}, [x, (Literal(inverse, y[0].aval.update(shape=())), ())])
        maker = self.maker(below)
        if maker is None or maker.primitive.name != "sqrt":
            return Step("div", {}, [x, y])
        if self.number(x[0]) == 1:
            return Step("rsqrt", {}, [(maker.invars[0], labels)])
        inverse = self.inverses.setdefault(below, Var(below.aval))
        self.under_root[inverse] = maker.invars[0]
        return Step("mul", {}, [x, (inverse, labels)])

    def outline(self, atom, inputs, depth):
        """The names of the steps before an array, as a tree; None where it may be anything."""
        atom, labels = self.settled(atom, labels_of(atom))
        if not depth or not self.is_computed(atom) or atom in inputs:
            return None
        step = self.step(atom, labels)
        return step.name, [self.outline(x, inputs, depth - 1) for x, _ in step.operands]

    def has(self, outline, atom):
        """Whether an array can have this outline."""
        if outline is None:
            return True
        if isinstance(atom, Literal):
            return False
        key = (id(outline), atom)
        if key not in self.compared:
            self.compared[key] = self.compare(outline, atom)
        return self.compared[key]

    def compare(self, outline, atom):
        if atom not in self.parts:
            source, labels = self.settled(atom, labels_of(atom))
            step = self.step(source, labels) if self.is_computed(source) else Step("", {}, [])
            self.parts[atom] = step.name, [x for x, _ in step.operands]
        (name, outlines), (found, operands) = outline, self.parts[atom]
        if name != found or len(outlines) != len(operands):
            return False
        orders = [operands, operands[::-1]] if is_commutative(name) else [operands]
        return any(all(map(self.has, outlines, order)) for order in orders)


def is_commutative(name):
    return name in COMMUTATIVE or name == "dot_general"


def is_float(dtype):
    """Whether a dtype is one of floats, also for bfloat16, which is not one of NumPy's."""
    return jax.dtypes.issubdtype(dtype, np.floating)


def labels_of(atom):
    return tuple(range(len(atom.aval.shape)))


def is_one(size):
    return isinstance(size, int) and size == 1


def labels_before(eqn, labels):
    """The labels of a view's operand; None where it does more than add or drop axes of size 1."""
    shape, name = eqn.invars[0].aval.shape, eqn.primitive.name
    if name == "broadcast_in_dim":
        return tuple(labels[axis] for axis in eqn.params["broadcast_dimensions"])
    if name == "transpose":
        order = eqn.params["permutation"]
        return tuple(labels[list(order).index(axis)] for axis in range(len(order)))
    sizes = eqn.outvars[0].aval.shape
    if [n for n in shape if not is_one(n)] != [n for n in sizes if not is_one(n)]:
        return None
    left = iter([label for label, n in zip(labels, sizes, strict=True) if not is_one(n)])
    return tuple(None if is_one(n) else next(left) for n in shape)
