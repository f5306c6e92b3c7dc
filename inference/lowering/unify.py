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

import numpy as np
from jax.extend.core import Literal

from inference.lowering.equations import ELEMENTWISE
from inference.lowering.steps import is_commutative, is_float, is_one

REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}


class Comparison:
    """Compares one formula with a model; `holes` are {number in the formula: its name}.

    Where the formula has such a number, the model may have any.
    """

    def __init__(self, pattern, inputs, model, holes):
        self.pattern, self.inputs, self.model, self.holes = pattern, set(inputs), model, holes
        self.labels = itertools.count()

    def match(self, formula, found):
        """How an array of the model computes a result of the formula, {input of the formula: (atom,
        the formula's axis for each of its axes)}, or None if it does not."""
        if formula.aval.shape != found.aval.shape:
            return None
        labels = self.fresh(found.aval.shape)
        return next(self.equal((formula, labels), (found, labels), {}), None)

    def fresh(self, sizes):
        return tuple(None if is_one(n) else next(self.labels) for n in sizes)

    def equal(self, formula, found, bound):
        """All ways in which two arrays are equal, each as `bound` with the formula's inputs."""
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
        """`bound` with this array as the input `var` of the formula, unless it has another one."""
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
        """The operands of any other equation, whose parameters and axes must be the same."""
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
    if is_float(x.dtype):
        x, y = x.astype(np.float64), y.astype(np.float64)
        return np.allclose(x, y, rtol=1e-6, atol=0, equal_nan=True)
    return np.array_equal(x, y)


def are_equal(x, y):
    """Whether two dicts of an equation's parameters are equal."""
    return x.keys() == y.keys() and all(bool(np.all(x[key] == y[key])) for key in x)
