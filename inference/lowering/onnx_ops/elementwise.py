"""Elementwise ops: activations, arithmetic, comparisons, bits, conversions and special functions.

Their operands have one dtype and broadcast. The special functions that ONNX lacks are computed with
the polynomials of XLA.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from inference.lowering.approximations import (
    ERF_INV_ABOVE_5,
    ERF_INV_BELOW_5,
    ERFC_ABOVE_2,
    ERFC_BELOW_2,
)
from inference.lowering.onnx_ops.target import (
    Input,
    OnnxTarget,
    Result,
    Tensor,
    stored_type,
    tensor_type,
)
from inference.lowering.value import Value, is_number
from inference.lowering.walk import Lowering, op_name
from model.layers.op import marked_p


def in_result_type(function: Lowering) -> Lowering:
    """The function for operands cast to the dtype of the result: JAX promotes integers."""

    def promoting(t: OnnxTarget, *operands: Any, **params: Any) -> Result:
        def promoted(x: Any) -> Any:
            return t.cast(x, t.out[0].dtype) if isinstance(x, Value) else x

        return function(t, *jax.tree.map(promoted, operands), **params)

    return promoting


def activation(op: str, **attributes: Any) -> Lowering:
    """The function of an activation that is one node."""
    return in_result_type(lambda t, x, **_: t.add(op, x, **attributes))


def gelu(t: OnnxTarget, x: Value) -> Tensor:
    if t.opset >= 20 and x.dtype != np.float64:
        return t.Gelu(x)
    normal = t.Add(erf(t, t.Mul(x, math.sqrt(0.5))), 1.0)
    return t.Mul(t.Mul(x, 0.5), normal)


def gelu_tanh(t: OnnxTarget, x: Value) -> Tensor:
    if t.opset >= 20 and x.dtype != np.float64:
        return t.Gelu(x, approximate="tanh")
    cubic = t.Add(x, t.Mul(t.Mul(t.Mul(x, x), x), 0.044715))
    curve = t.Tanh(t.Mul(cubic, math.sqrt(2 / math.pi)))
    return t.Mul(t.Mul(x, 0.5), t.Add(curve, 1.0))


def erf(t: OnnxTarget, x: Tensor) -> Tensor:
    """ONNX Runtime has Erf only in float32."""
    if t.out[0].dtype != np.float64:
        return t.Erf(x)
    return t.to(t.Erf(t.to(x, np.float32)), np.float64)


def leaky_relu(t: OnnxTarget, x: Value, slope: Value | float) -> Tensor:
    if isinstance(slope, Value):  # a learned slope
        return t.Where(t.GreaterOrEqual(x, 0.0), x, t.Mul(x, slope))
    return t.LeakyRelu(x, alpha=float(slope))


def silu(t: OnnxTarget, x: Value) -> Tensor:
    return t.Mul(x, t.Sigmoid(x))


def logsumexp(t: OnnxTarget, x: Value, axes: Sequence[int]) -> Tensor:
    """The maximum is subtracted first: ONNX Runtime subtracts 0 instead if one number is -inf."""
    along, limits = np.array(axes), np.finfo(stored_type(x.dtype))
    highest = t.ReduceMax(x, along, keepdims=1)
    bound = t.Clip(highest, float(limits.min), float(limits.max))
    result = t.Add(t.ReduceLogSumExp(t.Sub(x, bound), along, keepdims=1), bound)
    return t.Squeeze(result, along)


LAYERS = {
    "relu": activation("Relu"),
    "leaky_relu": in_result_type(leaky_relu),
    "elu": in_result_type(lambda t, x, alpha: t.Elu(x, alpha=float(alpha))),
    "gelu": in_result_type(gelu),
    "gelu_tanh": in_result_type(gelu_tanh),
    "sigmoid": activation("Sigmoid"),
    "silu": in_result_type(silu),
    "hard_sigmoid": activation("HardSigmoid", alpha=1 / 6, beta=0.5),
    "hard_swish": activation("HardSwish"),
    "tanh": activation("Tanh"),
    "softplus": activation("Softplus"),
    "mish": activation("Mish"),
    "softmax": activation("Softmax", axis=-1),
    "log_softmax": activation("LogSoftmax", axis=-1),
    "softmax_along": lambda t, x, axis: t.Softmax(x, axis=axis),
    "log_softmax_along": lambda t, x, axis: t.LogSoftmax(x, axis=axis),
    "relu6": lambda t, x: t.Clip(x, 0.0, 6.0),
    "hard_tanh": lambda t, x: t.Clip(x, -1.0, 1.0),
    "logsumexp": logsumexp,
    "selu": activation("Selu"),
    "soft_sign": activation("Softsign"),
}


# ONNX Runtime does not compute in these dtypes. Operands are cast to the wider one and results are
# cast back, so that an overflow wraps around as in JAX.
WIDER = dict.fromkeys(["int8", "int16", "uint8", "uint16"], np.dtype(np.int32))
WIDER |= dict.fromkeys(["uint32", "uint64"], np.dtype(np.int64))


def node(op: str) -> Lowering:
    """The function of a primitive that is one node."""

    def function(t: OnnxTarget, *operands: Value, **_: object) -> Tensor:
        return wide(t, lambda *xs: t.add(op, *xs), *operands)

    return function


def wide(t: OnnxTarget, compute: Callable[..., Tensor], *operands: Value) -> Tensor:
    """`compute`, applied to operands in a dtype that ONNX Runtime computes in."""
    dtype = WIDER.get(operands[0].dtype.name)
    if dtype is None:
        return compute(*operands)
    result = compute(*(t.cast(x, dtype) for x in operands))
    return result if t.out[0].dtype == bool else t.to(result, t.out[0].dtype)


def where(t: OnnxTarget, condition: Input, x: Value, y: Value) -> Tensor:
    """x or y, which have one dtype, in a dtype for which ONNX Runtime has a Where."""
    dtype = np.dtype(np.int32 if x.dtype == bool else WIDER.get(x.dtype.name, x.dtype))
    result = t.Where(condition, t.cast(x, dtype), t.cast(y, dtype))
    return result if dtype == x.dtype else t.to(result, x.dtype)


def never_in_float64(function: Lowering) -> Lowering:
    """The function in float32 where the result is float64, which ONNX Runtime's node lacks."""

    def narrow(t: OnnxTarget, *operands: Any, **params: Any) -> Tensor:
        if t.out[0].dtype != np.float64:
            return function(t, *operands, **params)
        narrow_t = t.with_results([jax.ShapeDtypeStruct(t.out[0].shape, np.float32)])
        return t.to(function(narrow_t, *operands, **params), np.float64)

    return narrow


def never_of_uint64(name: str, function: Lowering) -> Lowering:
    """The function of a primitive, refused for operands in uint64."""

    def refusing(t: OnnxTarget, *operands: Value, **params: Any) -> Result:
        if any(x.dtype == np.uint64 for x in operands):
            t.refuse(name, "of uint64")
        return function(t, *operands, **params)

    return refusing


def extreme(op: str) -> Lowering:
    """The larger or smaller of two numbers."""
    compare = {"Max": "Greater", "Min": "Less"}[op]

    def function(t: OnnxTarget, x: Value, y: Value) -> Tensor:
        if x.dtype != np.int64:
            return t.add(op, x, y)
        # ONNX Runtime's Max compares the lower halves of int64 as if they had signs.
        return t.Where(t.add(compare, x, y), x, y)

    return lambda t, x, y, **_: wide(t, lambda a, b: function(t, a, b), x, y)


def comparison(op: str) -> Lowering:
    """A comparison; booleans are compared as integers."""

    def function(t: OnnxTarget, x: Value, y: Value, **_: object) -> Tensor:
        if x.dtype == bool and op != "Equal":
            x, y = t.cast(x, np.int32), t.cast(y, np.int32)
        return wide(t, lambda a, b: t.add(op, a, b), x, y)

    return function


def different(t: OnnxTarget, x: Value, y: Value, **_: object) -> Tensor:
    return t.Not(PRIMITIVES["eq"](t, x, y))


def divide(t: OnnxTarget, x: Value, y: Value, **_: object) -> Tensor:
    """A division; an integer divided by 0 is -1, as in XLA."""
    if is_safe_divisor(y):
        return wide(t, t.Div, x, y)
    a, b, is_zero = safe_operands(t, x, y)
    result = quotient(t, a, b) if x.dtype == np.int64 else t.Div(a, b)
    return t.to(t.Where(is_zero, np.int64(-1), result), x.dtype)


def remainder(t: OnnxTarget, x: Value, y: Value, **_: object) -> Tensor:
    """The remainder with the sign of the dividend; for integers, that by 0 is the dividend."""
    if x.dtype == np.int64:  # Mod is computed in float64
        return t.Sub(x, t.Mul(divide(t, x, y), y))
    if is_safe_divisor(y):
        return wide(t, lambda a, b: t.Mod(a, b, fmod=1), x, y)
    a, b, is_zero = safe_operands(t, x, y)
    return t.to(t.Where(is_zero, a, t.Mod(a, b, fmod=1)), x.dtype)


def quotient(t: OnnxTarget, a: Input, b: Input) -> Tensor:
    """a / b in int64; ONNX Runtime does not return from the lowest number by -1."""
    is_minus_one = t.Equal(b, np.int64(-1))
    return t.Where(is_minus_one, t.Neg(a), t.Div(a, t.Where(is_minus_one, np.int64(1), b)))


def is_safe_divisor(y: Value) -> bool:
    """Whether ONNX Runtime divides by y; it does not return where an integer is divided by 0, or
    the lowest integer by -1."""
    return y.dtype.kind not in "iu" or (y.constant and not np.isin(y.data, [0, -1]).any())


def safe_operands(t: OnnxTarget, x: Value, y: Value) -> tuple[Value, Tensor, Tensor]:
    """(x, y, whether y is 0) in int64, which holds the quotient of narrower integers, with 1 in
    place of 0."""
    is_zero = t.Equal(t.cast(y, np.int64), np.int64(0))
    return t.cast(x, np.int64), t.Where(is_zero, np.int64(1), t.cast(y, np.int64)), is_zero


def in_total_order(op: str) -> Lowering:
    """A comparison in which nan is the largest number and equal to itself."""

    def function(t: OnnxTarget, x: Value, y: Value, **_: object) -> Tensor:
        result = comparison(op)(t, x, y)
        if x.dtype.kind in "biu" or (y.constant and not np.isnan(y.data).any()):
            return result
        with_nan_y = {  # the result where y is nan
            "Less": lambda: t.Not(t.IsNaN(x)),
            "Equal": lambda: t.IsNaN(x),
            "LessOrEqual": lambda: np.True_,
        }
        return t.Or(result, t.And(t.IsNaN(y), with_nan_y[op]()))

    return function


def integer_pow(t: OnnxTarget, x: Value, *, y: int, **_: object) -> Tensor:
    if abs(y) in (2, 3):
        power = square(t, x) if abs(y) == 2 else wide(t, lambda a: t.Mul(t.Mul(a, a), a), x)
        return t.Reciprocal(power) if y < 0 else power
    if y == -1:
        return t.Reciprocal(x)
    if x.dtype.kind in "iu":  # Pow does not wrap
        return wide(t, lambda a: multiplied(t, a, y), x)
    return wide(t, lambda a: t.Pow(a, np.asarray(y, a.dtype)), x)


def multiplied(t: OnnxTarget, x: Tensor, exponent: int) -> Tensor:
    """A power by repeated squaring."""
    if exponent == 1:
        return x
    rest = multiplied(t, t.Mul(x, x), exponent // 2)
    return t.Mul(x, rest) if exponent % 2 else rest


def power(t: OnnxTarget, x: Value, y: Value, **_: object) -> Tensor:
    return t.Pow(x, y)


def square(t: OnnxTarget, x: Value, **_: object) -> Tensor:
    return wide(t, lambda a: t.Mul(a, a), x)


def clamp(t: OnnxTarget, low: Value, x: Value, high: Value, **_: object) -> Tensor:
    above = Value(extreme("Max")(t, x, low), t.out[0].shape, x.dtype)
    return extreme("Min")(t, above, high)


def select(t: OnnxTarget, which: Value, *cases: Value, **_: object) -> Tensor:
    """The case that a number, or a boolean, selects."""
    if which.dtype == bool:
        return where(t, which, cases[1], cases[0])
    chosen = cases[-1]
    for i in reversed(range(len(cases) - 1)):
        result = where(t, t.LessOrEqual(which, np.int32(i)), cases[i], chosen)
        chosen = Value(result, t.out[0].shape, chosen.dtype)
    return chosen


def is_finite(t: OnnxTarget, x: Value, **_: object) -> Tensor:
    """Whether x - x is 0: inf - inf and nan - nan are nan."""
    return t.Equal(t.Sub(x, x), np.zeros((), stored_type(x.dtype)))


def rounded(t: OnnxTarget, x: Value, *, rounding_method: lax.RoundingMethod, **_: object) -> Tensor:
    if int(rounding_method) == 1:
        return t.Round(x)  # half to even
    whole = t.Mul(t.Sign(x), t.Floor(t.Abs(x)))  # adding 0.5 first would round large numbers
    is_near = t.Less(t.Abs(t.Sub(x, whole)), 0.5)
    return t.Where(is_near, whole, t.Add(whole, t.Sign(x)))


def log(t: OnnxTarget, x: Value, **_: object) -> Tensor:
    """log(x); log(sigmoid(x)) is -softplus(-x), since ONNX Runtime's Sigmoid is 0 below -18."""
    if x.dtype == np.float32 and x.origin and is_sigmoid(x.origin[0]):
        (operand,) = x.origin[1]
        if operand.data_shape == x.data_shape:
            return t.Neg(t.Softplus(t.Neg(operand)))
    return t.Log(x)


def is_sigmoid(eqn: JaxprEqn) -> bool:
    if eqn.primitive is marked_p:
        return op_name(eqn.params["function"]) == "sigmoid"
    return eqn.primitive.name == "logistic"


def log1p(t: OnnxTarget, x: Value, **_: object) -> Tensor:
    """2 atanh(x / (2 + x)) near 0, where 1 + x would round x away."""
    near = t.Mul(t.Atanh(t.Div(x, t.Add(x, 2.0))), 2.0)
    return t.Where(t.Less(t.Abs(x), 0.5), near, t.Log(t.Add(x, 1.0)))


def expm1(t: OnnxTarget, x: Value, **_: object) -> Tensor:
    """2 h / (1 - h) with h = tanh(x / 2) near 0, where exp(x) - 1 would round x away."""
    half = t.Tanh(t.Mul(x, 0.5))
    near = t.Div(t.Add(half, half), t.Sub(1.0, half))
    return t.Where(t.Less(t.Abs(x), 0.5), near, t.Sub(t.Exp(x), 1.0))


def cube_root(t: OnnxTarget, x: Value, **_: object) -> Tensor:
    return t.Mul(t.Sign(x), t.Pow(t.Abs(x), 1 / 3))


def atan2(t: OnnxTarget, y: Value, x: Value, **_: object) -> Tensor:
    """The angle of the point (|x|, |y|), reflected to the quadrant of (x, y)."""
    rise, run = t.Abs(y), t.Abs(x)
    slope = t.Where(t.Equal(rise, run), 1.0, t.Div(rise, run))  # inf / inf would be nan
    is_origin = t.Equal(t.Add(rise, run), 0.0)
    angle = t.Atan(t.Where(is_origin, 0.0, slope))
    angle = t.Where(has_minus(t, x), t.Sub(math.pi, angle), angle)
    return t.Where(has_minus(t, y), t.Neg(angle), angle)


def has_minus(t: OnnxTarget, x: Value) -> Tensor:
    """Whether x is less than 0, or -0."""
    return t.Less(t.Where(t.Equal(x, 0.0), t.Reciprocal(x), x), 0.0)


# primitives that are one node of the same name
SAME_NAME = """
    add sub mul abs neg sign exp sqrt
    sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh ceil floor
"""


def bitwise(logical: str, op: str) -> Lowering:
    """`logical` for booleans, `op` for integers."""

    def function(t: OnnxTarget, *operands: Value, **_: object) -> Tensor:
        return t.add(logical if operands[0].dtype == bool else op, *operands)

    return function


def shift(direction: str) -> Lowering:
    """ONNX shifts unsigned integers only."""

    def function(t: OnnxTarget, x: Value, count: Value, **_: object) -> Tensor:
        unsigned = np.dtype(f"uint{max(32, 8 * x.dtype.itemsize)}")
        same_size = np.dtype(f"uint{8 * x.dtype.itemsize}")
        bits = t.cast(t.cast(x, same_size), unsigned)
        return t.to(t.BitShift(bits, t.cast(count, unsigned), direction=direction), t.out[0].dtype)

    return function


def shift_right_arithmetic(t: OnnxTarget, x: Value, count: Value, **_: object) -> Tensor:
    """Shifts the complement of a negative number, so that it keeps its sign."""
    if x.dtype.kind == "u":
        return shift("RIGHT")(t, x, count)
    wider = t.cast(x, np.int64)
    is_negative = t.Less(wider, np.int64(0))
    positive = t.Where(is_negative, t.BitwiseNot(wider), wider)
    bits = t.to(positive, np.uint64)
    shifted = t.to(t.BitShift(bits, t.cast(count, np.uint64), direction="RIGHT"), np.int64)
    return t.to(t.Where(is_negative, t.BitwiseNot(shifted), shifted), t.out[0].dtype)


def population_count(t: OnnxTarget, x: Value, **_: object) -> Tensor:
    """The sum of all bits, each shifted to the lowest position."""
    size = 8 * x.dtype.itemsize
    bits = t.to(t.cast(x, np.dtype(f"uint{size}")), np.uint64)
    bits = t.Unsqueeze(bits, np.array([-1]))
    shifted = t.BitShift(bits, np.arange(size, dtype=np.uint64), direction="RIGHT")
    ones = t.to(t.BitwiseAnd(shifted, np.uint64(1)), np.int64)
    return t.to(t.ReduceSum(ones, np.array([-1]), keepdims=0), t.out[0].dtype)


def convert(t: OnnxTarget, x: Value, *, new_dtype: np.dtype, **_: object) -> Tensor:
    dtype = np.dtype(t.checked(new_dtype))
    if dtype.kind == "b":
        return t.Not(t.Equal(x, np.zeros((), stored_type(x.dtype))))
    if dtype.kind in "iu" and x.dtype.kind not in "biu":
        return to_integer(t, x, dtype)
    return t.cast(x, dtype)


def to_integer(t: OnnxTarget, x: Value, dtype: np.dtype) -> Tensor:
    """Clamps to the range of the integer, and nan to 0; Cast leaves both undefined."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    exact = np.dtype(np.float32 if dtype.itemsize < 4 else np.float64)
    x = t.cast(x, exact)
    number = t.Where(t.IsNaN(x), np.zeros((), exact), x)
    if dtype.itemsize < 8:
        return t.to(t.Min(t.Max(number, exact.type(low)), exact.type(high)), dtype)
    end = exact.type(2.0 ** (63 if dtype.kind == "i" else 64))  # high + 1: high is not a float64
    inside = t.to(t.Min(t.Max(number, exact.type(low)), np.nextafter(end, 0)), dtype)
    # Where is computed in int64, which it supports
    highest = np.asarray(high, dtype).astype(np.int64)
    return t.to(t.Where(t.GreaterOrEqual(number, end), highest, t.to(inside, np.int64)), dtype)


def reduce_precision(t: OnnxTarget, x: Value, *, exponent_bits: int, mantissa_bits: int) -> Tensor:
    """Casts to a dtype with these bits and back; subnormal numbers become 0, as in JAX."""
    narrow = {(5, 10): np.float16, (8, 7): jax.numpy.bfloat16}.get((exponent_bits, mantissa_bits))
    if narrow is None:
        t.refuse("reduce_precision", f"to {exponent_bits} and {mantissa_bits} bits")
    rounded = t.to(t.add("Cast", x, to=tensor_type(narrow)), x.dtype)
    if exponent_bits == 8:
        return rounded
    smallest = np.asarray(np.finfo(narrow).tiny, stored_type(x.dtype))
    is_normal = t.GreaterOrEqual(t.Abs(rounded), smallest)
    return t.Where(t.Or(is_normal, t.IsNaN(rounded)), rounded, t.Mul(x, 0.0))


def polynomial(t: OnnxTarget, x: Input, coefficients: Sequence[float]) -> Input:
    """Horner's rule; the highest power comes first."""
    total: Input = coefficients[0]
    for coefficient in coefficients[1:]:
        total = t.Add(t.Mul(total, x), coefficient)
    return total


def erfc(t: OnnxTarget, x: Value, **_: object) -> Tensor:
    """Not computed as 1 - erf(x) for a large x, where the difference would be rounded to 0."""
    size = t.Max(t.Abs(x), 1.0)
    inverse = t.Reciprocal(size)
    y = t.Mul(inverse, inverse)
    series = t.Where(
        t.Less(size, 2.0), polynomial(t, y, ERFC_BELOW_2), polynomial(t, y, ERFC_ABOVE_2)
    )
    tail = t.Mul(t.Mul(t.Exp(t.Neg(t.Mul(size, size))), inverse), series)
    far = t.Where(t.Less(x, 0.0), t.Sub(2.0, tail), tail)
    return t.Where(t.Less(t.Abs(x), 1.0), t.Sub(1.0, t.Erf(x)), far)


def erf_inv(t: OnnxTarget, x: Value, **_: object) -> Tensor:
    w = t.Neg(t.Log(t.Mul(t.Sub(1.0, x), t.Add(1.0, x))))
    below = polynomial(t, t.Sub(w, 2.5), ERF_INV_BELOW_5)
    above = polynomial(t, t.Sub(t.Sqrt(t.Max(w, 5.0)), 3.0), ERF_INV_ABOVE_5)
    result = t.Mul(x, t.Where(t.Less(w, 5.0), below, above))
    return t.Where(t.Equal(t.Abs(x), 1.0), t.Mul(x, np.inf), result)


def real_dft(t: OnnxTarget, x: Value, **_: object) -> Tensor:
    """A DFT node, whose numbers have their two parts in the last axis and at least one axis before
    the one that it transforms."""
    if not is_number(x.shape[-1]):
        t.refuse("fft", "over a free axis")
    axes = np.array([0, -1] if len(x.shape) == 1 else [-1], np.int64)
    numbers = t.Unsqueeze(x, axes)
    if t.opset >= 20:
        y = t.DFT(numbers, None, np.int64(-2), onesided=1)
    else:
        y = t.DFT(numbers, axis=max(len(x.shape) - 1, 1), onesided=1)
    return t.Squeeze(y, axes[:1]) if len(x.shape) == 1 else y


PRIMITIVES = {
    **{name: node(name.capitalize()) for name in SAME_NAME.split()},
    "add_any": node("Add"),
    "max": extreme("Max"),
    "min": extreme("Min"),
    "eq_to": in_total_order("Equal"),
    "lt_to": in_total_order("Less"),
    "le_to": in_total_order("LessOrEqual"),
    "logistic": node("Sigmoid"),
    "eq": comparison("Equal"),
    "ne": different,
    "lt": comparison("Less"),
    "le": comparison("LessOrEqual"),
    "gt": comparison("Greater"),
    "ge": comparison("GreaterOrEqual"),
    "div": divide,
    "rem": remainder,
    "pow": power,
    "integer_pow": integer_pow,
    "square": square,
    "clamp": clamp,
    "select_n": select,
    "is_finite": is_finite,
    "round": rounded,
    "rsqrt": lambda t, x, **_: t.Reciprocal(t.Sqrt(x)),
    "exp2": lambda t, x, **_: t.Pow(2.0, x),
    "erf": lambda t, x, **_: erf(t, x),
    "log": log,
    "log1p": log1p,
    "expm1": expm1,
    "cbrt": cube_root,
    "atan2": atan2,
    "and": bitwise("And", "BitwiseAnd"),
    "or": bitwise("Or", "BitwiseOr"),
    "xor": bitwise("Xor", "BitwiseXor"),
    "not": bitwise("Not", "BitwiseNot"),
    "shift_left": shift("LEFT"),
    "shift_right_logical": shift("RIGHT"),
    "shift_right_arithmetic": shift_right_arithmetic,
    "population_count": population_count,
    "convert_element_type": convert,
    "reduce_precision": reduce_precision,
    "erfc": erfc,
    "erf_inv": erf_inv,
    "real_dft": never_in_float64(real_dft),
}
