"""Values of the walk, which are constants or handles of what the target will compute, and their
sizes, which may be symbols of JAX.
"""

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal, Var

Size: TypeAlias = int | Any  # an int, or a symbolic size, whose class is not public in JAX
Shape: TypeAlias = tuple[Size, ...]
Aval: TypeAlias = jax.ShapeDtypeStruct | ShapedArray
Atom: TypeAlias = Var | Literal  # of a jaxpr
Origin: TypeAlias = tuple[JaxprEqn, Sequence["Value"]]
Number = TypeVar("Number")


class Value:
    """An array of the jaxpr: `shape` and `dtype` as the jaxpr has them, symbolic sizes included.

    `data` is an array (a constant) or the target's own handle. Its shape, `data_shape`, may have 1
    where `shape` has more: a broadcast is only carried out where an op needs it.
    """

    def __init__(
        self,
        data: Any,
        shape: Iterable[Size],
        dtype: Any,
        *,
        name: str = "",
        data_shape: Iterable[Size] | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.data, self.shape = data, tuple(shape)
        self.dtype: np.dtype = dtype if is_key(dtype) else np.dtype(dtype)
        self.name = name  # the tree path of a weight
        self.data_shape = self.shape if data_shape is None else tuple(data_shape)
        self.origin = origin  # (the equation that computed it, its operands)
        self.uses = 0  # how many equations read it; a value with other readers is not folded away

    @property
    def constant(self) -> bool:
        is_key_array = isinstance(self.data, jax.Array) and is_key(self.dtype)
        return isinstance(self.data, np.ndarray) or is_key_array

    def __repr__(self) -> str:
        return f"Value({self.name or self.data}, {self.dtype}{list(self.shape)})"


def constant(array: Any, name: str = "") -> Value:
    """A Value for an array that is known now; a weight has a name."""
    array = on_host(array)
    return Value(array, array.shape, array.dtype, name=name)


def aval_of(atom: Atom) -> ShapedArray:
    """The shape and dtype of a variable or number of a jaxpr."""
    return atom.aval  # pyright: ignore[reportReturnType]  # declared as any AbstractValue


def joint_shape(shapes: Iterable[Shape]) -> Shape:
    """The broadcast of shapes of the same rank."""
    return tuple(next((d for d in dims if not is_one(d)), 1) for dims in zip(*shapes, strict=True))


def is_one(dimension: Size) -> bool:
    return isinstance(dimension, int) and dimension == 1


def on_host(array: Any) -> Any:
    """A NumPy array; random keys, which NumPy does not support, stay JAX arrays."""
    return array if is_key(getattr(array, "dtype", None)) else np.asarray(array)


def is_key(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.dtypes.extended)


def broadcast(array: Any, shape: Shape) -> Any:
    """A constant array broadcast to a shape."""
    return (jax.numpy if is_key(array.dtype) else np).broadcast_to(array, shape)


BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Pow: "pow"}


def symbols(inputs: Mapping[str, Aval]) -> dict[str, tuple[str, int, int]]:
    """{symbol: (name of an input, axis, factor)}: the sizes of the inputs that are free.

    The size along the axis is the symbol times the factor.
    """
    sources = {}
    for name, aval in inputs.items():
        for axis, dimension in enumerate(aval.shape):
            if match := re.fullmatch(r"(?:(\d+)\*)?([A-Za-z_]\w*)", str(dimension)):
                sources.setdefault(match[2], (name, axis, int(match[1] or 1)))
    return sources


def is_positive(dimension: Size) -> bool:
    """Whether a size is known not to be 0: a free size is at least 1, but one less may be 0."""
    try:
        return bool(dimension >= 1)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def fix_of_size(error: Exception, symbols: Iterable[str]) -> str:
    """What to do about the free size that an error of JAX is about."""
    named = [name for name in symbols if re.search(rf"\b{name}\b", str(error))]
    if "batch" in named or not named:
        return "set the batch with --batch N"
    return f"leave out the free size {named[0]}"


def evaluate(
    dimension: Size,
    symbol: Callable[[str], Number],
    operations: Mapping[str, Callable[..., Number]],
) -> Number:
    """The value of a size; `symbol(name)` is the value of a symbol.

    `operations` are {name: function} for number, neg, add, sub, mul, pow, floordiv, mod, max, min.
    """

    def value(node: ast.expr) -> Number:
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


def is_number(dimension: Size) -> bool:
    return isinstance(dimension, int | np.integer)


def is_zero(dimension: Size) -> bool:
    return is_number(dimension) and dimension == 0


def is_same(a: Size, b: Size) -> bool:
    """Whether two sizes are the same, known or not."""
    return (is_number(a) and is_number(b) and a == b) or str(a) == str(b)


def product(dimensions: Iterable[Size]) -> Size:
    """The number of elements of a shape, which may be symbolic."""
    total = 1
    for dimension in dimensions:
        total = total * dimension
    return total
