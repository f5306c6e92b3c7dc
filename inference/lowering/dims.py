"""Sizes, which may be symbolic, as JAX writes them, and their values in the numbers of a target."""

import ast
import re

import jax
import numpy as np

BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Pow: "pow"}


def symbols(inputs):
    """{symbol: (name of an input, axis, factor)}: the sizes of the inputs that are free.

    The size along the axis is the symbol times the factor.
    """
    sources = {}
    for name, aval in inputs.items():
        for axis, dimension in enumerate(aval.shape):
            if match := re.fullmatch(r"(?:(\d+)\*)?([A-Za-z_]\w*)", str(dimension)):
                sources.setdefault(match[2], (name, axis, int(match[1] or 1)))
    return sources


def is_positive(dimension):
    """Whether a size is known not to be 0: a free size is at least 1, but one less may be 0."""
    try:
        return bool(dimension >= 1)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def fix_of_size(error, symbols):
    """What to do about the free size that an error of JAX is about."""
    named = [name for name in symbols if re.search(rf"\b{name}\b", str(error))]
    if "batch" in named or not named:
        return "set the batch with --batch N"
    return f"leave out the free size {named[0]}"


def evaluate(dimension, symbol, operations):
    """The value of a size; `symbol(name)` is the value of a symbol.

    `operations` are {name: function} for number, neg, add, sub, mul, pow, floordiv, mod, max, min.
    """

    def value(node):
        match node:
            case ast.Constant(value=number):
                return operations["number"](number)
            case ast.Name(id=name):
                return symbol(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return operations["neg"](value(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return operations[BINARY[type(op)]](value(left), value(right))
            case ast.Call(func=ast.Name(id=name), args=args):
                return operations[name](*map(value, args))
        raise AssertionError(ast.dump(node))

    return value(ast.parse(str(dimension).replace("^", "**"), mode="eval").body)


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
