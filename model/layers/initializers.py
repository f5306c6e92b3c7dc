"""Initial weights: `init(key, shape)` in the default float type, float64 under jax_enable_x64."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

# init(key, shape) -> weights
Initializer = Callable[[Array, tuple[int, ...]], Array]


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """(fan_in, fan_out) of a weight; all axes but the last two are the receptive field."""
    receptive = math.prod(shape[:-2])
    return receptive * shape[-2], receptive * shape[-1]


def cut_normal(key: Array, shape: tuple[int, ...]) -> Array:
    """A standard normal truncated to [-2, 2], sampled by its inverse cumulative distribution."""
    edge = math.erf(math.sqrt(2))
    return math.sqrt(2) * lax.erf_inv(jax.random.uniform(key, shape, minval=-edge, maxval=edge))


def normal_with_variance(key: Array, shape: tuple[int, ...], variance: float) -> Array:
    # 0.8796 is the standard deviation of a standard normal truncated to [-2, 2].
    return cut_normal(key, shape) * (math.sqrt(variance) / 0.87962566103423978)


def uniform_with_variance(key: Array, shape: tuple[int, ...], variance: float) -> Array:
    return jax.random.uniform(key, shape, minval=-1) * math.sqrt(3 * variance)


def lecun_normal(key: Array, shape: tuple[int, ...]) -> Array:
    """Variance 1 / fan_in: a linear layer keeps the variance of its input."""
    return normal_with_variance(key, shape, 1 / fans(shape)[0])


def lecun_uniform(key: Array, shape: tuple[int, ...]) -> Array:
    """Uniform with the variance of lecun_normal."""
    return uniform_with_variance(key, shape, 1 / fans(shape)[0])


def he_normal(key: Array, shape: tuple[int, ...]) -> Array:
    """Variance 2 / fan_in: compensates for a relu, which drops half of the signal."""
    return normal_with_variance(key, shape, 2 / fans(shape)[0])


def he_uniform(key: Array, shape: tuple[int, ...]) -> Array:
    """Uniform with the variance of he_normal."""
    return uniform_with_variance(key, shape, 2 / fans(shape)[0])


def glorot_normal(key: Array, shape: tuple[int, ...]) -> Array:
    """Variance 2 / (fan_in + fan_out): a compromise between the forward signal and the gradient."""
    return normal_with_variance(key, shape, 2 / sum(fans(shape)))


def glorot_uniform(key: Array, shape: tuple[int, ...]) -> Array:
    """Uniform with the variance of glorot_normal."""
    return uniform_with_variance(key, shape, 2 / sum(fans(shape)))


def truncated_normal(stddev: float) -> Initializer:
    """An initializer: a normal of this standard deviation, truncated at two standard deviations."""

    def init(key: Array, shape: tuple[int, ...]) -> Array:
        return cut_normal(key, shape) * stddev

    return init


def normal(stddev: float) -> Initializer:
    """An initializer: a normal of this standard deviation."""

    def init(key: Array, shape: tuple[int, ...]) -> Array:
        return jax.random.normal(key, shape) * stddev

    return init


def orthogonal(key: Array, shape: tuple[int, ...]) -> Array:
    """Orthonormal columns, or rows where these are fewer; all axes but the last count as rows."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    q, r = jnp.linalg.qr(jax.random.normal(key, (max(rows, columns), min(rows, columns))))
    # This makes the factorization unique, so that q is uniform over all orthogonal matrices.
    q = q * jnp.sign(jnp.diag(r))
    return (q if rows >= columns else q.T).reshape(shape)


def zeros(key: Array, shape: tuple[int, ...]) -> Array:
    return jnp.zeros(shape)


def ones(key: Array, shape: tuple[int, ...]) -> Array:
    return jnp.ones(shape)
