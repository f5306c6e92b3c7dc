"""Sizes: numbers where they are known, else computed from the shapes of the model's inputs while it runs."""

import numpy as np

from inference.lowering.dims import evaluate

OPERATIONS = {"neg": "Neg", "add": "Add", "sub": "Sub", "mul": "Mul", "pow": "Pow"}
OPERATIONS |= {"floordiv": "Div", "mod": "Mod", "max": "Max", "min": "Min"}


def symbols(inputs):
    """{symbol: (name of an input, axis)}: where to read the size that a symbol stands for."""
    places = {}
    for name, aval in inputs.items():
        for axis, dimension in enumerate(aval.shape):
            if str(dimension).isidentifier():
                places.setdefault(str(dimension), (name, axis))
    return places


def size(t, dimension):
    """A dimension as a tensor of one number."""
    if is_number(dimension):
        return np.array([dimension], np.int64)
    operations = {name: getattr(t, op) for name, op in OPERATIONS.items()}
    operations["number"] = lambda number: np.array([number], np.int64)
    with t.outermost():  # subgraphs see it, too
        return evaluate(dimension, lambda symbol: of_input(t, *t.symbols[symbol]), operations)


def of_input(t, name, axis):
    """The size of an input along an axis."""
    return t.Shape(name, start=axis, end=axis + 1)


def shape(t, dimensions):
    """A shape as a tensor; as an array where it is known."""
    if all(map(is_number, dimensions)):
        return np.array(dimensions, np.int64)
    with t.outermost():
        return t.Concat(*(size(t, dimension) for dimension in dimensions), axis=0)


def reshaping(t, dimensions):
    """A shape for Reshape, which finds one dimension by itself."""
    free = [d for d in dimensions if not is_number(d)]
    if len(free) == 1 and 0 not in [d for d in dimensions if is_number(d)]:
        return np.array([d if is_number(d) else -1 for d in dimensions], np.int64)
    return shape(t, dimensions)


def is_number(dimension):
    return isinstance(dimension, int | np.integer)
