"""Evaluates equations of a jaxpr in NumPy, on small arrays of random numbers.

All sizes become small, and `split`, the size of an axis that is split in two, becomes their square.
An axis of size 1 also stands for one along which all numbers are equal, and a sum is the mean times
the size in the jaxpr, so that a formula has the same value for few numbers as for many. Each array
has one more axis, the last one, with the samples. All floats are float64.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.typing import DTypeLike
from numpy.typing import ArrayLike
from scipy import special

from inference.lowering.value import Atom, Size, aval_of, is_one

SMALL = 3
SAMPLES = 48
UNUSUAL = 2  # the first samples, of which one has a nan and one an infinity
SAME = ("add", "exp", "expm1", "log", "log1p", "sign", "sqrt", "square", "tanh")
OPS = {name: getattr(np, name) for name in SAME}
OPS |= {"sub": np.subtract, "mul": np.multiply, "div": np.divide, "pow": np.power}
OPS |= {"neg": np.negative, "abs": np.abs, "max": np.maximum, "min": np.minimum}
OPS |= {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
OPS |= {"eq": np.equal, "ne": np.not_equal, "is_finite": np.isfinite}
OPS |= {"and": np.bitwise_and, "or": np.bitwise_or, "not": np.invert}
OPS |= {"erf": special.erf, "erfc": special.erfc, "logistic": special.expit}
OPS |= {
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
}
REDUCTIONS = {"reduce_sum": np.mean, "reduce_max": np.max, "reduce_min": np.min}
RESHAPES = {"reshape", "squeeze", "expand_dims"}
VIEWS = {"broadcast_in_dim", "transpose", *RESHAPES}
OTHERS = {"integer_pow", "convert_element_type", "iota", "dim_as_value"}
KNOWN = {*OPS, *REDUCTIONS, *VIEWS, *OTHERS}


def evaluate(
    eqns: Iterable[JaxprEqn], arrays: Mapping[Atom, np.ndarray], split: int | None = None
) -> dict[Atom, np.ndarray]:
    """`arrays`, {variable: array}, with the results of these equations."""
    arrays = dict(arrays)
    for eqn in eqns:
        operands = [number(x.val) if isinstance(x, Literal) else arrays[x] for x in eqn.invars]
        arrays[eqn.outvars[0]] = result(eqn, operands, split)
    return arrays


def result(eqn: JaxprEqn, operands: Sequence[np.ndarray], split: int | None) -> np.ndarray:
    name, params, shape = eqn.primitive.name, eqn.params, aval_of(eqn.outvars[0]).shape
    if name in OPS:
        return OPS[name](*operands)
    if name == "dim_as_value":
        return number(small(params["dim"], split))
    if name == "iota":
        along = [-1 if axis == params["dimension"] else 1 for axis in range(len(shape) + 1)]
        return np.arange(small(shape[params["dimension"]], split)).reshape(along)
    (x,) = operands
    if name == "integer_pow":
        return x ** params["y"]
    if name == "convert_element_type":
        return x.astype(np.float64 if is_float(params["new_dtype"]) else params["new_dtype"])
    if name == "transpose":
        return x.transpose(*params["permutation"], x.ndim - 1)
    if name == "broadcast_in_dim":
        wide = np.ones(len(shape) + 1, int)
        wide[[*params["broadcast_dimensions"], -1]] = x.shape
        return x.reshape(wide)
    sizes = aval_of(eqn.invars[0]).shape
    if name in RESHAPES:
        x = np.broadcast_to(x, [*(small(n, split) for n in sizes), x.shape[-1]])
        return x.reshape([*(small(n, split) for n in shape), x.shape[-1]])
    counts = [n if isinstance(n, int) else small(n, split) for n in sizes]
    factor = math.prod(counts[axis] for axis in params["axes"]) if name == "reduce_sum" else 1
    return REDUCTIONS[name](x, tuple(params["axes"])) * factor


def small(size: Size, split: int | None) -> int:
    if is_one(size):
        return 1
    return SMALL**2 if isinstance(size, int) and size == split else SMALL


def number(value: ArrayLike) -> np.ndarray:
    array = np.asarray(value)
    return (array.astype(np.float64) if is_float(array.dtype) else array).reshape(1)


def samples(
    x: Atom, weights: Sequence[Atom], numbers: Iterable[float], split: int | None = None
) -> dict[Atom, np.ndarray]:
    """{variable: random array} for an array x and for weights.

    The samples of x are of many magnitudes: those of `numbers`, too, which may be bounds. Each is
    there with both signs, and one is 0.
    """
    random = np.random.default_rng(0)
    magnitudes = [*np.geomspace(100, 1e-9, SAMPLES), *(2 * abs(n) for n in numbers), 0.0]
    magnitudes = np.array([sign * size for size in magnitudes for sign in (1, -1)])
    x_shape, *shapes = [
        [*(small(n, split) for n in aval_of(var).shape), len(magnitudes)] for var in (x, *weights)
    ]
    array = (random.normal(size=x_shape) + 2) * magnitudes
    array.flat[:UNUSUAL] = np.nan, -np.inf
    return {x: array} | dict(
        zip(weights, [random.normal(size=shape) for shape in shapes], strict=True)
    )


def difference(x: np.ndarray, y: np.ndarray) -> float:
    """The largest difference between two results for `samples`.

    It is relative to the largest number for inputs of the same magnitude.
    """
    if np.any(np.isnan(x) != np.isnan(y)):
        return np.inf
    x, y = np.broadcast_arrays(x, y)
    pairs = (-1, y.shape[-1] // 2, 2)
    size, gap = (np.nan_to_num(np.abs(a)).reshape(pairs).max((0, 2)) for a in (y, x - y))
    return np.max(gap / np.maximum(size, 1e-30))


def is_view(eqn: JaxprEqn) -> bool:
    """Whether an equation only adds, drops, repeats or reorders axes."""
    name = eqn.primitive.name
    if name in RESHAPES:
        shapes = [aval_of(var).shape for var in (*eqn.invars, *eqn.outvars)]
        before, after = ([n for n in shape if not is_one(n)] for shape in shapes)
        return before == after
    return name in VIEWS


def is_float(dtype: DTypeLike) -> bool:
    """Whether a dtype is one of floats, also for bfloat16, which is not one of NumPy's."""
    return jax.numpy.issubdtype(dtype, np.floating)
