"""Sizes: numbers where they are known, else computed from the shapes of the model's inputs while it runs."""

import ast

import numpy as np

BINARY = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.Pow: "Pow"}
CALLS = {"floordiv": "Div", "mod": "Mod", "max": "Max", "min": "Min"}


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
    with t.outermost():  # subgraphs see it, too
        return evaluate(t, ast.parse(str(dimension).replace("^", "**"), mode="eval").body)


def evaluate(t, expression):
    match expression:
        case ast.Constant(value=number):
            return np.array([number], np.int64)
        case ast.Name(id=symbol):
            name, axis = t.symbols[symbol]
            return t.Shape(name, start=axis, end=axis + 1)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return t.Neg(evaluate(t, operand))
        case ast.BinOp(left=left, op=op, right=right):
            return t.add(BINARY[type(op)], evaluate(t, left), evaluate(t, right))
        case ast.Call(func=ast.Name(id=name), args=args):
            return t.add(CALLS[name], *(evaluate(t, arg) for arg in args))
    raise AssertionError(ast.dump(expression))


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
