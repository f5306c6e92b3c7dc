"""The walk over a jaxpr, the same for every target: calls are entered, constants computed, broadcasts put off, and each op
that is left is looked up in the target's tables.

A target is an object with

- `layers`: {op under `@op`: function(target, *arguments) -> what the op returns}; an op of model/layers has its name there,
  one of another module that module's name before it, so that it is never taken for ours;
- `table`: {primitive: function(target, *operands, **parameters) -> result, or several};
- `operand(value)`: what the tables' functions receive for a Value;
- `expanded(value)`: a handle of the value's data with its whole shape.

The functions of marked ops receive what the marked function received, those of primitives the operands, then the parameters
of the equation. `target.out` are the shapes and types of the results of the equation at hand, `target.given` the shapes of
its operands, `target.walk` is this walk.
"""

from collections import Counter

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Literal

from inference.lowering.value import Value, constant, joined, known, spread
from model.layers.op import filled, marked_p
from utils import UserError

# Primitives that are nothing but a call, and the parameter that holds what is called.
CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "composite": "jaxpr",
}
IDENTITIES = {
    "copy",
    "copy_p",
    "stop_gradient",
    "optimization_barrier",
    "name",
    "sharding_constraint",
    "device_put",
}

# Primitives whose operands may have 1 where the result has more.
ELEMENTWISE = {
    *(
        "add",
        "sub",
        "mul",
        "div",
        "rem",
        "pow",
        "integer_pow",
        "max",
        "min",
        "clamp",
        "select_n",
        "convert_element_type",
    ),
    *(
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "eq_to",
        "lt_to",
        "le_to",
        "and",
        "or",
        "xor",
        "not",
        "is_finite",
    ),
    *("sign", "abs", "neg", "square", "nextafter", "reduce_precision"),
    *(
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "sqrt",
        "rsqrt",
        "cbrt",
        "erf",
        "erfc",
        "erf_inv",
        "lgamma",
        "digamma",
        "logistic",
    ),
    *(
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "atan2",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "acosh",
        "atanh",
    ),
    *(
        "ceil",
        "floor",
        "round",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "population_count",
    ),
}
OURS = "model.layers."  # the package whose ops the tables have by their names alone
LARGE = 2**20  # numbers; a larger constant is computed by the target, unless it is made of as many


class Missing(UserError):
    """A primitive that the target's table lacks."""

    def __init__(self, primitive, place):
        super().__init__(f"{primitive} ({place})")
        self.primitive, self.place = primitive, place


class Walk:
    """Walks jaxprs for a target, which computes what is not known yet."""

    def __init__(self, target):
        self.target = target
        self.place = ""  # where in the user's code the equation at hand is; of one inside of JAX: its caller's
        target.walk = self

    def outputs(self, traced, inputs):
        """{name: Value} of what was traced, for these handles of its inputs."""
        weights = [constant(array, name) for name, array in traced.weights.items()]
        given = [
            Value(inputs[name], aval.shape, aval.dtype, name=name)
            for name, aval in traced.inputs.items()
        ]
        return dict(zip(traced.outputs, self.jaxpr(traced.jaxpr, [*weights, *given]), strict=True))

    def call(self, jaxpr, *operands):
        """What the table's functions call for a jaxpr within theirs; operands and results are as theirs are."""
        values = [
            self.value(x, var.aval)
            for x, var in zip(operands, open_jaxpr(jaxpr).invars, strict=True)
        ]
        return [self.whole(value) for value in self.jaxpr(jaxpr, values)]

    def value(self, result, aval, **about):
        """A Value of what a function of the table, or its caller, has in hand."""
        if isinstance(result, Value):
            return result
        if isinstance(result, np.ndarray | np.generic):
            return constant(np.asarray(result, aval.dtype))
        return Value(result, aval.shape, aval.dtype, **about)

    def jaxpr(self, jaxpr, values):
        """The results of a jaxpr, open or closed, for these values of its arguments."""
        consts, jaxpr = getattr(jaxpr, "consts", ()), open_jaxpr(jaxpr)
        found = dict(zip(jaxpr.constvars, map(constant, consts), strict=True))
        found |= dict(zip(jaxpr.invars, values, strict=True))
        equations = needed(jaxpr)
        uses = Counter(
            atom
            for eqn in equations
            if not passes(eqn)
            for atom in eqn.invars
            if not isinstance(atom, Literal)
        )
        for var, value in found.items():
            value.uses += uses[var]

        def read(atom):
            return (
                constant(np.asarray(atom.val, atom.aval.dtype))
                if isinstance(atom, Literal)
                else found[atom]
            )

        outer = self.place
        for eqn in equations:
            self.place = source_info_util.summarize(eqn.source_info) or outer
            results = self.equation(eqn, [read(atom) for atom in eqn.invars])
            for var, value in zip(eqn.outvars, results, strict=True):
                value.uses += uses[var]
            found |= dict(zip(eqn.outvars, results, strict=True))
        self.place = outer
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn, operands):
        """The results of one equation."""
        name = eqn.primitive.name
        if name in CALLS:
            return self.jaxpr(eqn.params[CALLS[name]], operands)
        if is_identity(eqn):
            return operands
        if name == "platform_index":  # of a choice by platform: the one for any
            return [constant(np.int32(eqn.params["platforms"].index(None)))]
        if name == "cond" and operands[0].constant:
            branches = eqn.params["branches"]
            return self.jaxpr(
                branches[np.clip(int(operands[0].data), 0, len(branches) - 1)], operands[1:]
            )
        if name == "broadcast_in_dim":
            return [self.broadcast(eqn, operands[0])]
        if all(value.constant for value in operands) and folds(eqn, operands):
            return folded(eqn, operands)
        if eqn.primitive is marked_p:
            return self.marked(eqn, operands)
        if name == "div" and (mean := self.mean(eqn, *operands)):
            return [mean]
        return self.primitive(eqn, operands)

    def marked(self, eqn, operands):
        """A function under `@op`, whole where the target has it."""
        params = eqn.params
        function = self.target.layers.get(key(params["function"]))
        if function is None:
            return self.jaxpr(params["jaxpr"], operands)
        args, kwargs = filled(params["tree"], params["attributes"], map(self.whole, operands))
        return self.results(
            eqn, operands, lambda: jax.tree.leaves(function(self.target, *args, **kwargs))
        )

    def primitive(self, eqn, operands):
        """A primitive that the table has."""
        name = eqn.primitive.name
        function = self.target.table.get(name)
        if function is None:
            raise Missing(name, self.place)
        if name not in ELEMENTWISE:
            given = list(map(self.whole, operands))
            return self.results(eqn, operands, lambda: function(self.target, *given, **eqn.params))
        rank = max(len(value.held) for value in operands)
        held = joined([value.held or (1,) * rank for value in operands])
        given = [self.target.operand(value) for value in operands]
        return self.results(
            eqn, operands, lambda: function(self.target, *given, **eqn.params), held
        )

    def results(self, eqn, operands, compute, held=None):
        """What a function of the table answered, as values."""
        self.target.out = [var.aval for var in eqn.outvars]
        self.target.given = [value.shape for value in operands]
        found = compute()
        found = found if eqn.primitive.multiple_results else [found]
        about = {"held": held, "origin": (eqn, operands)}
        return [
            self.value(result, var.aval, **about)
            for result, var in zip(found, eqn.outvars, strict=True)
        ]

    def whole(self, value):
        """A value as the table's functions receive it, with nothing left to broadcast."""
        if value.held == value.shape:
            return self.target.operand(value)
        if value.constant and all(isinstance(d, int) for d in value.shape):
            data = spread(value.data, value.shape)
        else:
            data = self.target.expanded(value)
        return self.target.operand(
            Value(data, value.shape, value.dtype, name=value.name, origin=value.origin)
        )

    def broadcast(self, eqn, value, **_):
        """1 for each new axis; what is left of it is put off."""
        shape, axes = eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]
        held = [1] * len(shape)
        for axis, size in zip(axes, value.held, strict=True):
            held[axis] = size
        return self.reshaped(value, held, shape)

    def reshaped(self, value, held, shape):
        """The same numbers, held in another shape."""
        data = value.data
        if tuple(held) != value.held:
            self.target.out = [jax.ShapeDtypeStruct(tuple(held), value.dtype)]
            operand = self.target.operand(Value(data, value.held, value.dtype, name=value.name))
            is_known = value.constant
            data = (
                data.reshape(held)
                if is_known
                else self.target.table["reshape"](self.target, operand, new_sizes=tuple(held))
            )
        return Value(data, shape, value.dtype, name=value.name, held=held, origin=value.origin)

    def mean(self, eqn, value, count):
        """A sum that is divided by the number of its terms is a mean; None where it is not."""
        if (
            "mean" not in self.target.table
            or not value.origin
            or not count.constant
            or count.data.size != 1
        ):
            return None
        made, operands = value.origin
        if made.primitive.name != "reduce_sum":
            return None
        axes, source = made.params["axes"], operands[0]
        if (
            not all(isinstance(source.shape[a], int) for a in axes)
            or np.prod([source.shape[a] for a in axes]) != count.data
        ):
            return None
        self.target.out = [made.outvars[0].aval]
        result = self.value(
            self.target.table["mean"](self.target, self.whole(source), axes=axes),
            made.outvars[0].aval,
        )
        return self.reshaped(result, value.held, value.shape)


def key(function):
    """What a function under `@op` is called in `layers`."""
    module, name = function.__module__, function.__name__
    return name if str(module).startswith(OURS) else f"{module}.{name}"


def passes(eqn):
    """Whether the equation hands its operands on as they are."""
    return eqn.primitive.name in CALLS or is_identity(eqn)


def is_identity(eqn):
    name, params = eqn.primitive.name, eqn.params
    if name == "convert_element_type":
        return params["new_dtype"] == eqn.invars[0].aval.dtype
    if name == "reduce_precision":
        whole = jax.numpy.finfo(eqn.invars[0].aval.dtype)
        return params["exponent_bits"] >= whole.nexp and params["mantissa_bits"] >= whole.nmant
    return name in IDENTITIES


def open_jaxpr(jaxpr):
    return getattr(jaxpr, "jaxpr", jaxpr)


def needed(jaxpr):
    """The equations that the results depend on, in order."""
    wanted, chosen = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}, []
    for eqn in reversed(jaxpr.eqns):
        if not wanted.isdisjoint(eqn.outvars):
            chosen.append(eqn)
            wanted |= {atom for atom in eqn.invars if not isinstance(atom, Literal)}
    return chosen[::-1]


def folds(eqn, operands):
    """Whether the results are constants of a size that is known, and not much larger than what they are made of."""
    if (
        not all(isinstance(d, int) for var in eqn.outvars for d in var.aval.shape)
        or eqn.primitive.name == "dim_as_value"
    ):
        return False
    size = sum(var.aval.size for var in eqn.outvars)
    return size <= max(LARGE, 2 * sum(value.data.size for value in operands))


def folded(eqn, operands):
    """The results of an equation of constants; what is made of one weight keeps its name."""
    name = eqn.primitive.name
    held = None
    if name in ELEMENTWISE and any(value.held != value.shape for value in operands):
        held = joined([value.held for value in operands if value.held])
    with jax.ensure_compile_time_eval():  # the walk itself may be traced
        arrays = [
            spread(value.data, held if held and value.held else value.shape) for value in operands
        ]
        made = eqn.primitive.bind(*arrays, **eqn.params)
    made = made if eqn.primitive.multiple_results else [made]
    names = {value.name for value in operands} - {""}
    about = {"name": names.pop() if len(names) == 1 else "", "held": held}
    return [
        Value(known(a), var.aval.shape, var.aval.dtype, **about)
        for a, var in zip(made, eqn.outvars, strict=True)
    ]
