"""Traces a function to a jaxpr whose layers are single ops, for a batch of any size."""

import operator
import sys
import traceback
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import jax
import numpy as np
from jax import export
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import PyTree

from inference.lowering.recognize import Recognition
from inference.lowering.value import Size, aval_of, evaluate, is_key
from model.layers.op import marks_shown
from utils import UserError, first_line, named_leaves

Comparison: TypeAlias = tuple[Size, Size, str]

UNBATCHED = -1  # in place of a batch size: the inputs have no batch axis
LARGE = 4096  # a lower bound of sizes that decides comparisons with smaller numbers
HIDDEN = (str(Path(jax.__file__).parent), __file__)  # files whose frames are not the user's code


class Traced(NamedTuple):
    """A jaxpr over the leaves of `weights`, then of `inputs`; each dict is in the jaxpr's order."""

    jaxpr: ClosedJaxpr
    weights: dict[str, Any]  # {name: array on the host}
    inputs: dict[str, jax.ShapeDtypeStruct]
    outputs: dict[str, jax.ShapeDtypeStruct]
    precision: str  # the narrowest float type in the jaxpr: float32, float16 or bfloat16
    compared: tuple[
        Comparison, ...
    ] = ()  # the comparisons of a free batch with other sizes; see `comparisons`


def trace(
    function: Callable[[PyTree, PyTree], PyTree],
    weights: PyTree,
    inputs: PyTree,
    batch: int | None = None,
) -> Traced:
    """Trace `function(weights, inputs) -> outputs`; `inputs` is the tree of one example's shapes.

    `weights` is {"params": ..., "state": ...}; the names of params omit "params/". A batch of None
    is left free, as are sizes in `inputs` that are symbols. An input that is a single array is
    named "input", such an output "output". An output with the name of an input is prefixed with
    "output/".
    """
    size = symbol(inputs) if batch is None else batch
    shapes = of_batch(inputs, size)
    try:
        with nullcontext(()) if batch else comparisons(size) as compared:
            traced = traced_once(function, weights, shapes)
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UserError(refusal(error, function, weights, inputs, batch)) from error
    arrays = {
        name.removeprefix("params/"): in_type_of_jax(leaf)
        for name, leaf in named_leaves(weights).items()
    }
    in_shapes = named(shapes, "input")
    out_shapes = named(traced.out_info, "output", in_shapes)
    if not out_shapes:
        raise UserError("the model has no outputs: it returns None or an empty tree; return arrays")
    weight_count = len(jax.tree.leaves(weights))
    is_weight = [i < weight_count for i in range(len(traced.jaxpr.in_avals))]
    with marks_shown():
        jaxpr = Recognition().jaxpr(traced.jaxpr, is_weight)
    narrowest = precision(traced.jaxpr)
    return Traced(jaxpr, arrays, in_shapes, out_shapes, narrowest, tuple(compared))


class Scalar(jax.ShapeDtypeStruct):
    """An input that is one number for a whole batch, such as a temperature."""


def of_batch(inputs: PyTree, size: Size) -> PyTree:
    """The shapes of a batch, from those of one example."""
    if isinstance(size, int) and size == UNBATCHED:
        return inputs

    def with_batch(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (size, *leaf.shape)
        return leaf if isinstance(leaf, Scalar) else jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(with_batch, inputs)


def traced_once(
    function: Callable[[PyTree, PyTree], PyTree], weights: PyTree, shapes: PyTree
) -> jax.stages.Traced:
    with marks_shown():
        return jax.jit(function).trace(jax.tree.map(shape_of, weights), shapes)


def refusal(
    error: Exception,
    function: Callable[[PyTree, PyTree], PyTree],
    weights: PyTree,
    inputs: PyTree,
    batch: int | None,
) -> str:
    """The message for a failed trace; it blames the free batch if a batch of 2 can be traced."""
    cause = f"{first_line(error) or type(error).__name__} ({place(error)})"
    names = ", ".join(map(str, free_sizes(inputs)))
    is_size = isinstance(error, jax.errors.InconclusiveDimensionOperation)
    if isinstance(error, TypeError) and "_DimExpr" in str(error) and "len(" in line(error):
        used = "a size that is free" if names else "the size of its batch"
        fix = "len() cannot return a size that is free; write x.shape[0] instead"
        return f"the model uses {used}: {fix} ({place(error)})"
    if batch is None and ((is_size and not names) or can_trace(function, weights, inputs, 2)):
        return (
            f"the model uses the size of its batch, which is free: {cause}; set it with --batch N"
        )
    if names:
        fix = "leave out --free"
        if changes_with_range(error, function, weights, inputs, batch):
            fix = f"give the range of a free size, as in --free 1:length:8-512, or {fix}"
        return f"the model does not work with any size of {names}: {cause}; {fix}"
    return f"the model cannot be traced: {type(error).__name__}: {cause}"


def changes_with_range(
    error: Exception,
    function: Callable[[PyTree, PyTree], PyTree],
    weights: PyTree,
    inputs: PyTree,
    batch: int | None,
) -> bool:
    """Whether the model can be traced, or fails with another error, if all free sizes are large."""
    sizes = list(map(str, free_sizes(inputs)))
    scope = export.SymbolicScope([f"{size} >= {LARGE}" for size in sizes])
    bounded = dict(zip(sizes, export.symbolic_shape(", ".join(sizes), scope=scope), strict=True))

    def with_bounds(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return leaf.update(shape=tuple(bounded.get(str(size), size) for size in leaf.shape))

    inputs = jax.tree.map(with_bounds, inputs)
    try:
        traced_once(function, weights, of_batch(inputs, symbol(inputs) if batch is None else batch))
    except Exception as other:
        return first_line(other) != first_line(error)
    return True


def can_trace(
    function: Callable[[PyTree, PyTree], PyTree], weights: PyTree, inputs: PyTree, batch: int
) -> bool:
    try:
        traced_once(function, weights, of_batch(inputs, batch))
    except Exception:
        return False
    return True


def place(error: Exception) -> str:
    """File and line of the innermost frame of an error that is in the user's code."""
    frame = user_frame(error)
    return f"{frame.filename}:{frame.lineno}" if frame else "the model"


def describe(error: Exception) -> str:
    """An error in the user's code, with its location."""
    return f"{type(error).__name__}: {first_line(error)} ({place(error)})"


def line(error: Exception) -> str:
    """The source line of that frame."""
    frame = user_frame(error)
    return frame.line or "" if frame else ""


def user_frame(error: Exception) -> traceback.FrameSummary | None:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(HIDDEN)
    ]
    return frames[-1] if frames else None


def precision(jaxpr: Jaxpr | ClosedJaxpr) -> str:
    """The narrowest float type in a jaxpr, from the bits of its mantissa."""
    bits = min(mantissas(jaxpr), default=23)
    return "float32" if bits > 10 else "float16" if bits > 7 else "bfloat16"


def mantissas(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[int]:
    """The mantissa bits of all floats in a jaxpr and in the jaxprs within it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    results = [var for eqn in jaxpr.eqns for var in eqn.outvars]
    for var in (*jaxpr.constvars, *jaxpr.invars, *results):
        if jax.numpy.issubdtype(getattr(var.aval, "dtype", bool), np.floating):
            yield jax.numpy.finfo(aval_of(var).dtype).nmant
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "reduce_precision":
            yield eqn.params["mantissa_bits"]
        for param in eqn.params.values():
            for inner in param if isinstance(param, tuple | list) else [param]:
                if isinstance(inner, Jaxpr | ClosedJaxpr):
                    yield from mantissas(inner)


def symbol(inputs: PyTree = ()) -> Size:
    """The size of a free batch; all that is known about it is that it is at least 1.

    It can be compared with the free sizes of `inputs`.
    """
    if others := free_sizes(inputs):
        return export.symbolic_shape("batch", scope=others[0].scope)[0]
    return export.symbolic_shape("batch", constraints=["batch >= 1"])[0]


def free_sizes(tree: PyTree) -> list[Any]:
    """The symbols among the sizes of a tree of shapes."""
    sizes = [size for leaf in jax.tree.leaves(tree) for size in leaf.shape]
    free = [size for size in sizes if not isinstance(size, int | np.integer)]
    return list(dict.fromkeys(free))


def in_type_of_jax(leaf: Any) -> Any:
    """A weight on the host, in the type in which JAX computes: float32 for NumPy's float64."""
    if is_key(leaf.dtype):
        return leaf
    return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)


def named(tree: PyTree, default: str, taken: Container[str] = ()) -> dict[str, Any]:
    """{path: leaf}; `default` names a tree of one leaf and is put in front of taken names."""
    leaves = {}
    for path, leaf in named_leaves(tree).items():
        name = path or default
        while name in taken or name in leaves:
            name = f"{default}/{name}"
        leaves[name] = leaf
    return leaves


LARGEST = 4096  # the largest batch that is searched for
NUMBERS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "pow": operator.pow}
NUMBERS |= {"number": int, "neg": operator.neg, "max": max, "min": min}
NUMBERS |= {"floordiv": operator.floordiv, "mod": operator.mod}


@contextmanager
def comparisons(symbol: Size) -> Iterator[list[Comparison]]:
    """A list of (size, what it is compared with, place) where the user's code compares a free size.

    JAX treats such a comparison as unequal, and traces only what the model does in that case.
    """
    kind, found = type(symbol), []
    equal: Any = kind.__eq__

    def noted(self: Any, other: Any) -> bool:
        result = equal(self, other)
        if not result and isinstance(other, kind | int):
            frame: Any = sys._getframe(1)
            while frame.f_code.co_name == "__ne__":
                frame = frame.f_back
            if not frame.f_code.co_filename.startswith(HIDDEN):
                found.append((self, other, f"{frame.f_code.co_filename}:{frame.f_lineno}"))
        return result

    with mock.patch.object(kind, "__eq__", noted):
        yield found


def equal_sizes(compared: Iterable[Comparison]) -> dict[int, str]:
    """{the smallest batch for which a comparison holds: its place}"""
    sizes = {}
    for size, other, place in compared:
        for batch in range(1, LARGEST + 1):
            try:
                if value(size, batch) == value(other, batch):
                    sizes.setdefault(batch, place)
                    break
            except (KeyError, ZeroDivisionError):  # another size that is free
                break
    return sizes


def value(size: Size, batch: int) -> int:
    """The value of a size for a batch of this size."""
    return size if isinstance(size, int) else evaluate(size, {"batch": batch}.__getitem__, NUMBERS)
