"""Compares a formula with a part of a model, equation by equation.

Both are flat jaxprs. They are followed from their results to their inputs, side by side. Two parts
are equal if they compute the same in the same way, but for

- the order of the operands of commutative ops;
- broadcasts, transpositions and axes of size 1: each axis has a label, and two arrays are equal if
  their axes with the same label are;
- products of arrays, which are compared as sums over labels;
- ways to write one thing: x * x and x ** 2, x / sqrt(y) and x * rsqrt(y), x / 4 and x * 0.25.

So nothing is found that computes something else.
"""

import itertools
from typing import NamedTuple

import numpy as np
from jax.extend.core import Literal, Var

from inference.lowering.equations import ELEMENTWISE, is_identity

COMMUTATIVE = {"add", "add_any", "mul", "max", "min", "and", "or", "eq", "ne"}
REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}
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
        if neutral is None or eqn.outvars[0].aval.dtype.kind not in "fb":
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
        if name == "div" and eqn.outvars[0].aval.dtype.kind == "f":
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


class Comparison:
    """Compares one formula with a model; `holes` are {number in the formula: its name}.

    Where the formula has such a number, the model may have any.
    """

    def __init__(self, pattern, inputs, model, holes):
        self.pattern, self.inputs, self.model, self.holes = pattern, set(inputs), model, holes
        self.labels = itertools.count()

    def of_results(self, formula, found):
        """{input of the formula: (atom, the formula's axis for each of its axes)}, or None."""
        if formula.aval.shape != found.aval.shape:
            return None
        labels = self.fresh(found.aval.shape)
        return next(self.equal((formula, labels), (found, labels), {}), None)

    def fresh(self, sizes):
        return tuple(None if is_one(n) else next(self.labels) for n in sizes)

    def equal(self, formula, found, bound):
        """All ways in which two arrays are equal; each is what the inputs are then."""
        formula, found = self.pattern.settled(*formula), self.model.settled(*found)
        atom, found_atom = formula[0], found[0]
        if atom.aval.dtype != found_atom.aval.dtype:
            return
        if not isinstance(atom, Literal) and atom in self.inputs:
            yield from self.bind(*formula, *found, bound)
        elif (constant := self.pattern.constant(atom)) is not None:
            yield from self.equal_constants(constant, formula[1], found, bound)
        elif self.pattern.is_computed(atom) and self.model.is_computed(found_atom):
            yield from self.equal_steps(formula, found, bound)

    def bind(self, var, labels, found, found_labels, bound):
        """The input of the formula is this array."""
        if any(label is not None and label not in labels for label in found_labels):
            return
        axes = tuple(None if label is None else labels.index(label) for label in found_labels)
        if var not in bound:
            yield bound | {var: (found, axes)}
        elif bound[var][1] == axes and is_same(bound[var][0], found):
            yield bound

    def equal_constants(self, constant, labels, found, bound):
        array = self.model.constant(found[0])
        if array is None:
            return
        hole = self.holes.get(constant.item()) if constant.size == 1 else None
        if hole and array.size == 1:
            if bound.get(hole, array) == array:
                yield bound | {hole: array}
        elif (array.size == constant.size == 1 or labels == found[1]) and are_close(
            array.reshape(-1), constant.reshape(-1)
        ):
            yield bound

    def equal_steps(self, formula, found, bound):
        ours, theirs = self.pattern.step(*formula), self.model.step(*found)
        if ours.name != theirs.name or len(ours.operands) != len(theirs.operands):
            return
        if ours.name in REDUCTIONS:
            pairs = self.reduced(formula, found, ours, theirs)
        elif ours.name == "dot_general":
            pairs = self.summed(formula, found, ours, theirs)
        elif ours.name == "iota":
            pairs = [] if self.is_same_iota(formula, found, ours, theirs) else None
        elif ours.name in ELEMENTWISE:
            pairs = list(zip(ours.operands, theirs.operands, strict=True))
            pairs = pairs if are_equal(ours.params, theirs.params) else None
        else:
            pairs = self.other(formula, found, ours, theirs)
        if pairs is None:
            return
        yield from self.all_equal(pairs, bound)
        if is_commutative(ours.name):
            (a, x), (b, y) = pairs
            yield from self.all_equal([(a, y), (b, x)], bound)

    def all_equal(self, pairs, bound):
        if not pairs:
            yield bound
            return
        for more in self.equal(*pairs[0], bound):
            yield from self.all_equal(pairs[1:], more)

    def reduced(self, formula, found, ours, theirs):
        """The operands of two reductions."""
        axes, found_axes = sorted(ours.params["axes"]), sorted(theirs.params["axes"])
        (x, _), (y, _) = ours.operands[0], theirs.operands[0]
        sizes = [x.aval.shape[axis] for axis in axes]
        if sizes != [y.aval.shape[axis] for axis in found_axes]:
            return None
        fresh = self.fresh(sizes)
        return [
            ((x, inserted(formula[1], axes, fresh)), (y, inserted(found[1], found_axes, fresh)))
        ]

    def summed(self, formula, found, ours, theirs):
        """The operands of two products of arrays."""
        sizes = [contracted_sizes(step) for step in (ours, theirs)]
        if sizes[0] != sizes[1]:
            return None
        fresh = self.fresh(sizes[0])
        sides = [
            factors(step, labels, fresh)
            for step, labels in ((ours, formula[1]), (theirs, found[1]))
        ]
        return list(zip(*sides, strict=True))

    def is_same_iota(self, formula, found, ours, theirs):
        axis, found_axis = ours.params["dimension"], theirs.params["dimension"]
        return formula[1][axis] == found[1][found_axis]

    def other(self, formula, found, ours, theirs):
        """The operands of an equation whose axes have a meaning: it must be the very same."""
        shapes = [atom.aval.shape for atom, _ in (formula, found)]
        if formula[1] != found[1] or shapes[0] != shapes[1]:
            return None
        if not are_equal(ours.params, theirs.params):
            return None
        pairs = []
        for (x, _), (y, _) in zip(ours.operands, theirs.operands, strict=True):
            if x.aval.shape != y.aval.shape:
                return None
            labels = self.fresh(x.aval.shape)
            pairs.append(((x, labels), (y, labels)))
        return pairs


def inserted(labels, axes, fresh):
    """Labels with those of the reduced axes."""
    labels = list(labels)
    for axis, label in zip(axes, fresh, strict=True):
        labels.insert(axis, label)
    return tuple(labels)


def contracted_sizes(step):
    (axes, _), _ = step.params["dimension_numbers"]
    return [step.operands[0][0].aval.shape[axis] for axis in axes]


def factors(step, labels, fresh):
    """The operands of a product of arrays with their labels."""
    summed, shared = step.params["dimension_numbers"]
    free = iter(labels[len(shared[0]) :])
    sides = []
    for (x, _), sums, batch in zip(step.operands, summed, shared, strict=True):
        known = dict(zip(batch, labels, strict=False)) | dict(zip(sums, fresh, strict=True))
        axes = range(len(x.aval.shape))
        sides.append((x, tuple(known[a] if a in known else next(free) for a in axes)))
    return sides


def is_same(x, y):
    if isinstance(x, Literal) and isinstance(y, Literal):
        return bool(x.val == y.val)
    return x is y


def are_close(x, y):
    if x.dtype.kind == "f":
        return np.allclose(x, y, rtol=1e-6, atol=0, equal_nan=True)
    return np.array_equal(x, y)


def are_equal(x, y):
    """Whether two dicts of an equation's parameters are equal."""
    return x.keys() == y.keys() and all(bool(np.all(x[key] == y[key])) for key in x)
