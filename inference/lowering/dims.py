"""Symbolic sizes, as JAX writes them, computed in a target's own numbers."""

import ast

BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Pow: "pow"}


def evaluate(dimension, symbol, operations):
    """A size: `symbol(name)` is the number of a symbol, `operations` are {name: function} of

    number, neg, add, sub, mul, pow, floordiv, mod, max, min.
    """

    def found(node):
        match node:
            case ast.Constant(value=number):
                return operations["number"](number)
            case ast.Name(id=name):
                return symbol(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return operations["neg"](found(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return operations[BINARY[type(op)]](found(left), found(right))
            case ast.Call(func=ast.Name(id=name), args=args):
                return operations[name](*map(found, args))
        raise AssertionError(ast.dump(node))

    return found(ast.parse(str(dimension).replace("^", "**"), mode="eval").body)
