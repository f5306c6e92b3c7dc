"""Complex numbers as pairs of real arrays, since neither format computes with them.

Each primitive on complex numbers is written in JAX on such pairs, and a Fourier transform in terms
of `real_dft`, the only one that a target needs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive
from jax.lax import FftType
from jax.typing import DTypeLike
from jaxtyping import Array

from inference.lowering.value import aval_of


class Pair(NamedTuple):
    real: Any  # an array, or a Value of one
    imag: Any


Numbers: TypeAlias = Array | Pair


def is_complex(eqn: JaxprEqn) -> bool:
    return any(is_complex_type(aval_of(atom).dtype) for atom in (*eqn.invars, *eqn.outvars))


def is_complex_type(dtype: DTypeLike) -> bool:
    return jax.numpy.issubdtype(dtype, np.complexfloating)


# real_dft(x), (..., n) -> (..., n // 2 + 1, 2): the first half of the transform of real numbers,
# with real and imaginary parts in the last axis

real_dft_p = Primitive("real_dft")


@real_dft_p.def_impl
def computed_dft(x: Array) -> Array:
    y = jnp.fft.rfft(x)
    return jnp.stack([y.real, y.imag], -1)


@real_dft_p.def_abstract_eval
def shape_of_dft(x: ShapedArray) -> ShapedArray:
    return ShapedArray((*x.shape[:-1], x.shape[-1] // 2 + 1, 2), x.dtype)


def dft_matrix(count: int) -> np.ndarray:
    """The weights of `real_dft` as (n, 2 * (n // 2 + 1)): the cosines, then the negative sines."""
    angles = 2 * np.pi * (np.outer(np.arange(count), np.arange(count // 2 + 1)) % count) / count
    return np.concatenate([np.cos(angles), -np.sin(angles)], 1).astype(np.float32)


def half_transform(x: Array) -> Pair:
    y = real_dft_p.bind(x)
    return Pair(y[..., 0], y[..., 1])


def completed(half: Pair, count: int) -> Pair:
    """All `count` numbers of a transform of real numbers; the others are conjugates of the half."""
    others = slice(1, (count + 1) // 2)
    real, imag = half
    return Pair(
        jnp.concatenate([real, real[..., others][..., ::-1]], -1),
        jnp.concatenate([imag, -imag[..., others][..., ::-1]], -1),
    )


def transform(x: Pair) -> Pair:
    """The Fourier transform of the last axis, from those of the real and the imaginary part."""
    count = x.real.shape[-1]
    a, b = (completed(half_transform(part), count) for part in x)
    return Pair(a.real - b.imag, a.imag + b.real)


def inverse(x: Pair) -> Pair:
    """The conjugate of the transform of the conjugate, divided by the number of numbers."""
    count = x.real.shape[-1]
    y = transform(Pair(x.real, -x.imag))
    return Pair(y.real / count, -y.imag / count)


def along(axis: int, function: Callable[[Pair], Pair], x: Pair) -> Pair:
    """A function of the last axis, applied to another one."""
    y = function(jax.tree.map(lambda part: jnp.moveaxis(part, axis, -1), x))
    return jax.tree.map(lambda part: jnp.moveaxis(part, -1, axis), y)


def fft(x: Any, *, fft_type: FftType, fft_lengths: Sequence[int]) -> Numbers:
    kind, rank = fft_type.name, len(fft_lengths)
    others = range(-rank, -1)  # the axes before the last one
    if kind == "RFFT":
        x = half_transform(x)
        return functools.reduce(lambda x, axis: along(axis, transform, x), others, x)
    step = transform if kind == "FFT" else inverse
    if kind != "IRFFT":
        return functools.reduce(lambda x, axis: along(axis, step, x), range(-rank, 0), x)
    x = functools.reduce(lambda x, axis: along(axis, inverse, x), others, x)
    return inverse(completed(x, fft_lengths[-1])).real


def product(x: Numbers, y: Numbers, multiply: Callable[[Array, Array], Array]) -> Pair:
    """A product of two arrays of which at least one is complex."""
    if not isinstance(x, Pair):
        return Pair(multiply(x, y.real), multiply(x, y.imag))
    if not isinstance(y, Pair):
        return Pair(multiply(x.real, y), multiply(x.imag, y))
    return Pair(
        multiply(x.real, y.real) - multiply(x.imag, y.imag),
        multiply(x.real, y.imag) + multiply(x.imag, y.real),
    )


def quotient(x: Pair, y: Numbers, **_: object) -> Pair:
    if not isinstance(y, Pair):
        return Pair(x.real / y, x.imag / y)
    size = y.real * y.real + y.imag * y.imag
    return product(x, Pair(y.real / size, -y.imag / size), jnp.multiply)


def power(x: Pair, *, y: int, **_: object) -> Pair:
    result = functools.reduce(lambda a, b: product(a, b, jnp.multiply), [x] * abs(y))
    one = Pair(jnp.ones_like(x.real), jnp.zeros_like(x.real))
    return quotient(one, result) if y < 0 else result


def exponential(x: Pair, **_: object) -> Pair:
    return Pair(jnp.exp(x.real) * jnp.cos(x.imag), jnp.exp(x.real) * jnp.sin(x.imag))


def convert(x: Numbers, *, new_dtype: DTypeLike, **_: object) -> Numbers:
    if not isinstance(x, Pair):
        real = x.astype(jnp.zeros((), new_dtype).real.dtype)
        return Pair(real, jnp.zeros_like(real))
    return x if is_complex_type(new_dtype) else x.real.astype(new_dtype)


def conjugate(x: Numbers, **_: object) -> Pair:
    return Pair(x.real, -x.imag) if isinstance(x, Pair) else Pair(x, jnp.zeros_like(x))


def dot_general(
    x: Numbers, y: Numbers, *, preferred_element_type: DTypeLike | None, **params: Any
) -> Pair:
    return product(x, y, functools.partial(lax.dot_general, **params))


# {primitive: function of arrays and Pairs, which takes the primitive's parameters}
RULES = {
    "complex": lambda real, imag, **_: Pair(real, imag),
    "real": lambda x, **_: x.real,
    "imag": lambda x, **_: x.imag,
    "conj": conjugate,
    "abs": lambda x, **_: jnp.sqrt(x.real * x.real + x.imag * x.imag),
    "mul": lambda x, y, **_: product(x, y, jnp.multiply),
    "square": lambda x, **_: power(x, y=2),
    "integer_pow": power,
    "div": quotient,
    "exp": exponential,
    "eq": lambda x, y, **_: (x.real == y.real) & (x.imag == y.imag),
    "ne": lambda x, y, **_: (x.real != y.real) | (x.imag != y.imag),
    "convert_element_type": convert,
    "dot_general": dot_general,
    "fft": fft,
}
# primitives that do the same to both parts
BY_PART = """
    add sub neg add_any select_n reduce_sum cumsum pad gather dynamic_slice dynamic_update_slice
    reshape transpose squeeze expand_dims broadcast_in_dim slice concatenate rev tile stack
    scatter scatter-add
"""
BY_PART = set(BY_PART.split())


def on_pairs(eqn: JaxprEqn) -> Callable[..., Numbers] | None:
    """The function of an equation on arrays and Pairs; None where there is no rule for it."""
    name = eqn.primitive.name
    if name in RULES:
        return functools.partial(RULES[name], **eqn.params)
    if name not in BY_PART:
        return None

    def by_part(*operands: Numbers) -> Pair:
        parts = [
            [x[i] if isinstance(x, Pair) else x for x in operands] for i in range(len(Pair._fields))
        ]
        return Pair(*(eqn.primitive.bind(*part, **eqn.params) for part in parts))

    return by_part
