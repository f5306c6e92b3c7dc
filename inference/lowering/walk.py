"""The walk over a jaxpr, the same for every target.

It enters calls, computes constants, delays broadcasts, and looks up every op that remains in the
tables of the target. A target is an object with

- `layers`: {name of an `@op` function: function(target, *arguments) -> the op's results}. An op of
  model/layers has the name of its function. An op of another module has the name of the module in
  front, so that it is never mistaken for one of model/layers;
- `table`: {primitive: function(target, *operands, **params) -> one result, or a list of results};
- `operand(value)`: converts a Value to what the functions of the tables receive;
- `expanded(value)`: a handle of the value's data, broadcast to the value's shape.

The functions in `layers` receive the arguments of the marked function, those in `table` the
operands and then the parameters of the equation. The target that they receive is made for this one
call by `with_results`: its `out` holds the shapes and dtypes of the equation's results, and
`operand_shapes` the shapes of its operands.
"""

import copy
import linecache
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from inference.lowering.complex_numbers import Pair, is_complex, is_complex_type, on_pairs
from inference.lowering.equations import (
    CALLS,
    ELEMENTWISE,
    called,
    can_fold,
    divisor_of_mean,
    fold,
    is_identity,
    needed_equations,
    open_jaxpr,
    passes_operands,
    rewrite,
)
from inference.lowering.value import (
    Aval,
    Shape,
    Value,
    aval_of,
    broadcast,
    constant,
    fix_of_size,
    joint_shape,
)
from model.layers.op import filled, marked_p
from utils import PACKAGE, UserError, first_line

if TYPE_CHECKING:
    from inference.lowering.trace import Traced

# (target, *operands, **params) -> one result, or a list of results
Lowering: TypeAlias = Callable[..., Any]

# The ops of these modules have the name of their function.
OURS = (f"{PACKAGE}model.layers.", f"{PACKAGE}inference.lowering.")


class Missing(UserError):
    """A primitive that the target's table lacks."""

    def __init__(self, primitive: str, place: str) -> None:
        super().__init__(f"{primitive} ({place or 'the model'}{source_line(place)})")
        self.primitive, self.place = primitive, place


def source_line(place: str) -> str:
    """The line of code at a place, since a user may have written `inv` where JAX computes `lu`."""
    match = re.match(r"(.+):(\d+):\d+ ", f"{place} ")
    line = match and linecache.getline(match[1], int(match[2])).strip()
    return f": {line}" if line else ""


class Target:
    """What all targets have in common: `walk` is the walk that computes with the target."""

    layers: Mapping[str, Lowering]
    table: Mapping[str, Lowering]
    symbols: Mapping[str, tuple[str, int, int]]
    walk: "Walk"
    out: Sequence[Aval]  # the results of one call of a table's function
    operand_shapes: Sequence[Shape]
    operand_names: set[str]

    def operand(self, value: Value) -> Any:
        raise NotImplementedError

    def expanded(self, value: Value) -> Any:
        raise NotImplementedError

    def with_results(self, avals: Sequence[Aval], operands: Sequence[Value] = ()) -> Self:
        """The target for one call of a table's function, whose results have these types."""
        target = copy.copy(self)
        target.out = avals
        target.operand_shapes = [value.shape for value in operands]
        target.operand_names = {value.name for value in operands}
        return target

    def refuse(self, name: str, what: str) -> NoReturn:
        """Raise Missing for a variant of a primitive that the table cannot express."""
        raise Missing(f"{name} {what}", self.walk.place)


class Walk:
    """Walks jaxprs and has the target compute everything that is not constant."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.place = ""  # the user's line for the current equation; JAX's own code has its caller's
        self.fixed_place = ""  # the user's line during equations that this project adds
        target.walk = self

    def outputs(self, traced: "Traced", inputs: Mapping[str, Any]) -> dict[str, Value]:
        """{name: Value} for each output of a traced function; `inputs` are {name: handle}."""
        weights = [constant(array, name) for name, array in traced.weights.items()]
        values = [
            Value(inputs[name], aval.shape, aval.dtype, name=name)
            for name, aval in traced.inputs.items()
        ]
        results = self.jaxpr(traced.jaxpr, [*weights, *values])
        for name, value in zip(traced.outputs, results, strict=True):
            if is_complex_type(value.dtype) and value.origin:
                place = source_info_util.summarize(value.origin[0].source_info)
                raise Missing(f"{value.dtype} numbers as the output {name!r}", place)
        return dict(zip(traced.outputs, results, strict=True))

    def call(self, jaxpr: Jaxpr | ClosedJaxpr, *operands: Any) -> list[Any]:
        """Runs a jaxpr from within a table's function: same form of operands and results."""
        params = open_jaxpr(jaxpr).invars
        values = [self.value(x, aval_of(var)) for x, var in zip(operands, params, strict=True)]
        return [self.whole(value) for value in self.jaxpr(jaxpr, values)]

    def value(self, result: Any, aval: Aval | Value, **attributes: Any) -> Value:
        """A Value of a table function's result, or operand."""
        if isinstance(result, Value):
            return result
        if isinstance(result, np.ndarray | np.generic):
            result = np.asarray(result, aval.dtype)
            attributes["data_shape"] = result.shape
        return Value(result, aval.shape, aval.dtype, **attributes)

    def jaxpr(self, jaxpr: Jaxpr | ClosedJaxpr, values: Sequence[Value]) -> list[Value]:
        """The results of a jaxpr, open or closed, for these values of its arguments."""
        consts, jaxpr = getattr(jaxpr, "consts", ()), open_jaxpr(jaxpr)
        env = dict(zip(jaxpr.constvars, map(constant, consts), strict=True))
        env |= dict(zip(jaxpr.invars, values, strict=True))
        equations = needed_equations(jaxpr)
        readers = [eqn for eqn in equations if not passes_operands(eqn)]
        uses = Counter(
            atom for eqn in readers for atom in eqn.invars if not isinstance(atom, Literal)
        )
        for var, value in env.items():
            value.uses += uses[var]

        def read(atom: Var | Literal) -> Value:
            if isinstance(atom, Literal):
                return constant(np.asarray(atom.val, aval_of(atom).dtype))
            return env[atom]

        outer_place = self.place
        for eqn in equations:
            place = self.fixed_place or source_info_util.summarize(eqn.source_info)
            self.place = place or outer_place
            results = self.equation(eqn, [read(atom) for atom in eqn.invars])
            for var, value in zip(eqn.outvars, results, strict=True):
                value.uses += uses[var]
                env[var] = value
        self.place = outer_place
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        """The results of one equation."""
        name = eqn.primitive.name
        if name in CALLS:
            return self.jaxpr(called(eqn), operands)
        if is_identity(eqn):
            return operands
        if name == "platform_index":  # a choice by platform: take the branch for any platform
            return [constant(np.int32(eqn.params["platforms"].index(None)))]
        if name == "cond" and operands[0].constant:
            branches = eqn.params["branches"]
            index = np.clip(int(operands[0].data), 0, len(branches) - 1)
            return self.jaxpr(branches[index], operands[1:])
        if is_complex(eqn):
            return self.complex_equation(eqn, operands)
        if name == "broadcast_in_dim":
            return [self.broadcast_in_dim(eqn, operands[0])]
        if can_fold(eqn, operands):
            return fold(eqn, operands)
        if eqn.primitive is marked_p:
            return self.marked(eqn, operands)
        if name == "div" and (mean := self.mean(*operands)):
            return [mean]
        if (function := rewrite(eqn)) is not None:
            return self.rewritten(name, function, operands)
        return self.primitive(eqn, operands)

    def marked(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """An `@op` function, as one op where the target has it."""
        params = eqn.params
        function = self.target.layers.get(op_name(params["function"]))
        if function is None:
            return self.jaxpr(params["jaxpr"], operands)
        args, kwargs = filled(params["tree"], params["attributes"], map(self.whole, operands))
        results = function(self.target_of(eqn, operands), *args, **kwargs)
        return self.results(eqn, operands, jax.tree.leaves(results))

    def primitive(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """A primitive, computed by the function of the table."""
        name = eqn.primitive.name
        function = self.target.table.get(name)
        if function is None:
            raise Missing(name, self.place)
        data_shape = None
        if name in ELEMENTWISE:
            rank = max(len(value.data_shape) for value in operands)
            data_shape = joint_shape([value.data_shape or (1,) * rank for value in operands])
            args = [self.target.operand(value) for value in operands]
        else:
            args = [self.whole(value) for value in operands]
        results = function(self.target_of(eqn, operands), *args, **eqn.params)
        results = results if eqn.primitive.multiple_results else [results]
        return self.results(eqn, operands, results, data_shape)

    def target_of(self, eqn: JaxprEqn, operands: Sequence[Value]) -> Target:
        """The target for the table's function of an equation."""
        return self.target.with_results([aval_of(var) for var in eqn.outvars], operands)

    def results(
        self,
        eqn: JaxprEqn,
        operands: Sequence[Value],
        results: Sequence[Any],
        data_shape: Shape | None = None,
    ) -> list[Value]:
        """The results of a table's function, as Values."""
        attributes = {"data_shape": data_shape, "origin": (eqn, operands)}
        return [
            self.value(result, aval_of(var), **attributes)
            for result, var in zip(results, eqn.outvars, strict=True)
        ]

    def complex_equation(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """The results of an equation with complex numbers, each of which is a Pair of Values."""
        if can_fold(eqn, operands):
            return fold(eqn, operands)
        if eqn.primitive is marked_p:
            return self.jaxpr(eqn.params["jaxpr"], operands)
        function = on_pairs(eqn)
        name = eqn.primitive.name
        if function is None:
            raise Missing(f"{name} of complex numbers", self.place)
        leaves, tree = jax.tree.flatten([self.parts(value) for value in operands])
        results = self.rewritten(name, lambda *xs: function(*jax.tree.unflatten(tree, xs)), leaves)
        aval = aval_of(eqn.outvars[0])
        if not is_complex_type(aval.dtype):
            return results
        return [Value(Pair(*results), aval.shape, aval.dtype, origin=(eqn, operands))]

    def parts(self, value: Value) -> Value | Pair:
        """A complex Value as a Pair of real ones; a real one is returned unchanged."""
        if not is_complex_type(value.dtype):
            return value
        if not value.constant:
            return value.data
        return Pair(constant(np.real(value.data)), constant(np.imag(value.data)))

    def rewritten(
        self, name: str, function: Callable[..., Any], operands: Sequence[Value]
    ) -> list[Value]:
        """The results of a primitive as those of a function in JAX of these Values."""
        avals = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in operands]
        try:
            jaxpr = jax.make_jaxpr(function)(*avals)
        except jax.errors.InconclusiveDimensionOperation as error:
            what = f"{name} of a free size; {fix_of_size(error, self.target.symbols)}"
            raise Missing(what, self.place) from error
        outer, self.fixed_place = self.fixed_place, self.fixed_place or self.place
        results = self.jaxpr(jaxpr, list(operands))
        self.fixed_place = outer
        return results

    def whole(self, value: Value) -> Any:
        """An operand for a table's function, with every delayed broadcast carried out."""
        if value.data_shape == value.shape:
            return self.target.operand(value)
        if value.constant and all(isinstance(d, int) for d in value.shape):
            data = broadcast(value.data, value.shape)
        else:
            data = self.target.expanded(value)
        value = Value(data, value.shape, value.dtype, name=value.name, origin=value.origin)
        return self.target.operand(value)

    def broadcast_in_dim(self, eqn: JaxprEqn, value: Value) -> Value:
        """Adds an axis of size 1 for each new axis, and delays the rest of the broadcast."""
        shape, axes = aval_of(eqn.outvars[0]).shape, eqn.params["broadcast_dimensions"]
        data_shape = [1] * len(shape)
        for axis, size in zip(axes, value.data_shape, strict=True):
            data_shape[axis] = size
        return self.reshaped(value, tuple(data_shape), shape)

    def reshaped(self, value: Value, data_shape: Shape, shape: Shape) -> Value:
        """The value with its data in another shape."""
        data = value.data
        if data_shape != value.data_shape and value.constant:
            data = data.reshape(data_shape)
        elif data_shape != value.data_shape:
            operand = Value(data, value.data_shape, value.dtype, name=value.name)
            target = self.target.with_results(
                [jax.ShapeDtypeStruct(data_shape, value.dtype)], [operand]
            )
            data = target.table["reshape"](target, target.operand(operand), new_sizes=data_shape)
        attributes = {"name": value.name, "data_shape": data_shape, "origin": value.origin}
        return Value(data, shape, value.dtype, **attributes)

    def mean(self, total: Value, count: Value) -> Value | None:
        """A sum divided by the number of its terms, as a mean; None where it is something else."""
        if "mean" not in self.target.table or not total.origin:
            return None
        eqn, operands = total.origin
        if not divisor_of_mean(eqn, operands, count):
            return None
        aval = aval_of(eqn.outvars[0])
        operand = self.whole(operands[0])
        target = self.target_of(eqn, operands)
        mean = target.table["mean"](target, operand, axes=eqn.params["axes"])
        return self.reshaped(self.value(mean, aval), total.data_shape, total.shape)


@contextmanager
def located(walk: Walk) -> Iterator[None]:
    """Name the user's line in an error of a table's function that is not made for users."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a combination of operands that the table does not handle
        *_, frame = traceback.extract_tb(error.__traceback__)
        reason = f"{type(error).__name__}: {first_line(error)}"
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        # JAX has two classes of this name, of which one is public.
        is_free = type(error).__name__ == "InconclusiveDimensionOperation"
        fix = f"; {fix_of_size(error, walk.target.symbols)}" if is_free else ""
        message = f"cannot convert {walk.place or 'the model'}: {reason} ({where}){fix}"
        raise UserError(message) from error


def op_name(function: Callable[..., Any]) -> str:
    """The name of an `@op` function in `layers`."""
    module, name = function.__module__, function.__name__
    return name if str(module).startswith(OURS) else f"{module}.{name}"
