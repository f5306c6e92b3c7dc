"""Sizes: numbers where they are known, else nodes that compute them from the inputs' shapes."""

import numpy as np

from inference.lowering.dims import evaluate

OPERATIONS = {"neg": "Neg", "add": "Add", "sub": "Sub", "mul": "Mul", "pow": "Pow"}
OPERATIONS |= {"mod": "Mod", "max": "Max", "min": "Min"}


def size(t, dimension):
    """A dimension as a tensor of one number."""
    if is_number(dimension):
        return np.array([dimension], np.int64)
    operations = {name: getattr(t, op) for name, op in OPERATIONS.items()}
    operations["number"] = lambda number: np.array([number], np.int64)
    operations["floordiv"] = lambda a, b: t.Div(t.Sub(a, t.Mod(a, b)), b)  # Div rounds towards 0
    with t.outermost():  # so that subgraphs can read it as well
        return evaluate(dimension, lambda symbol: input_size(t, *t.symbols[symbol]), operations)


def input_size(t, name, axis, factor):
    """What a symbol stands for: the size of an input along an axis, divided by its factor."""
    size = t.Shape(name, start=axis, end=axis + 1)
    return t.Div(size, np.array([factor], np.int64)) if factor > 1 else size


def shape(t, dimensions):
    """A shape as a tensor, or as an array where it is known."""
    if all(map(is_number, dimensions)):
        return np.array(dimensions, np.int64)
    with t.outermost():
        return t.Concat(*(size(t, dimension) for dimension in dimensions), axis=0)


def reshape_argument(t, dimensions):
    """The shape for a Reshape, which infers one unknown dimension."""
    free = [d for d in dimensions if not is_number(d)]
    if len(free) == 1 and not any(map(is_zero, dimensions)):
        return np.array([d if is_number(d) else -1 for d in dimensions], np.int64)
    return shape(t, dimensions)


def is_number(dimension):
    return isinstance(dimension, int | np.integer)


def is_zero(dimension):
    return is_number(dimension) and dimension == 0


def is_same(a, b):
    """Whether two sizes are the same, known or not."""
    return (is_number(a) and is_number(b) and a == b) or str(a) == str(b)


def product(dimensions):
    """The number of elements of a shape, which may be symbolic."""
    total = 1
    for dimension in dimensions:
        total = total * dimension
    return total
