"""Normalization over features (layer, rms), groups of features, or the batch.

All compute in at least float32, since a bfloat16 variance has two digits, and return x's dtype.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from model.layers.forms import norm_by_products, on_cpu
from model.layers.linear import add_bias, matmul
from model.layers.op import op


def layer_norm_init(dim: int, bias: bool = True) -> dict[str, Array]:
    return {"scale": jnp.ones(dim)} | ({"bias": jnp.zeros(dim)} if bias else {})


@op(any_rank=True)
def layer_norm(
    params: PyTree, x: Float[Array, "*batch dim"], *, eps: float | Array = 1e-6
) -> Float[Array, "*batch dim"]:
    """Mean 0 and variance 1 over the last axis, then a learned scale and bias."""
    wide = widen(x)
    if norm_by_products(x.shape):
        y = on_cpu(lambda x: standardize_narrow(eps, x), lambda x: standardize(x, -1, eps), wide)
    else:
        y = standardize(wide, -1, eps)
    return add_bias(params, y * params["scale"]).astype(x.dtype)


def rms_norm_init(dim: int, bias: bool = False) -> dict[str, Array]:
    """`bias` has no effect: it is here so that both norms can be called alike."""
    return {"scale": jnp.ones(dim)}


@op(any_rank=True)
def rms_norm(
    params: PyTree, x: Float[Array, "*batch dim"], *, eps: float | Array = 1e-6
) -> Float[Array, "*batch dim"]:
    """Mean square 1 over the last axis, then a learned scale."""
    wide = widen(x)
    y = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return (y * params["scale"]).astype(x.dtype)


def group_norm_init(dim: int) -> dict[str, Array]:
    return {"scale": jnp.ones(dim), "bias": jnp.zeros(dim)}


@op
def group_norm(
    params: PyTree, x: Float[Array, "batch *space dim"], *, groups: int, eps: float | Array = 1e-6
) -> Float[Array, "batch *space dim"]:
    """Mean 0 and variance 1 over all pixels of each group of channels, then a scale and bias."""
    if x.shape[-1] % groups:
        raise ValueError(f"groups: {groups} must divide the {x.shape[-1]} channels")
    grouped = widen(x).reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    y = standardize(grouped, (1, 3), eps).reshape(x.shape)
    return (y * params["scale"] + params["bias"]).astype(x.dtype)


def batch_norm_init(dim: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """(params, running statistics)."""
    params = {"scale": jnp.ones(dim), "bias": jnp.zeros(dim)}
    return params, {"mean": jnp.zeros(dim), "var": jnp.ones(dim)}


def batch_norm(
    params: PyTree,
    state: PyTree,
    x: Float[Array, "*batch dim"],
    *,
    train: bool,
    momentum: float | Array = 0.9,
    eps: float | Array = 1e-5,
) -> tuple[Float[Array, "*batch dim"], PyTree]:
    """(y, state): standardizes by the batch's statistics in training, else by the running ones."""
    if not train:
        return by_statistics(params, state, x, eps=eps), state
    y, batch = by_own_statistics(eps, params, widen(x))
    state = {name: momentum * state[name] + (1 - momentum) * batch[name] for name in batch}
    return y.astype(x.dtype), state


def plain_batch_norm(
    eps: float | Array, params: PyTree, x: Float[Array, "*batch dim"]
) -> tuple[Float[Array, "*batch dim"], dict[str, Float[Array, "dim"]]]:
    """`by_statistics` with the statistics of x, and these statistics, which have no gradient."""
    axes = tuple(range(x.ndim - 1))
    batch = {"mean": x.mean(axes), "var": x.var(axes)}
    return by_statistics(params, batch, x, eps=eps), batch


by_own_statistics = jax.custom_vjp(plain_batch_norm, nondiff_argnums=(0,))


def by_own_statistics_fwd(
    eps: float | Array, params: PyTree, x: Float[Array, "*batch dim"]
) -> tuple[PyTree, PyTree]:
    y, batch = plain_batch_norm(eps, params, x)
    return (y, batch), (params["scale"], batch, x)


def by_own_statistics_bwd(
    eps: float | Array, residuals: PyTree, cotangents: PyTree
) -> tuple[dict[str, Float[Array, "dim"]], Float[Array, "*batch dim"]]:
    """Written by hand: 0.8 of the time of the derivative by JAX."""
    (scale, batch, x), (g, _) = residuals, cotangents
    axes, count = tuple(range(x.ndim - 1)), x.size // x.shape[-1]
    centred, inverse = x - batch["mean"], lax.rsqrt(batch["var"] + eps)
    g_sum, g_centred = g.sum(axes), (g * centred).sum(axes)
    dx = (
        g * (inverse * scale)
        - (inverse * scale * g_sum / count)
        - centred * (inverse**3 * scale * g_centred / count)
    )
    grads = jax.tree.map(
        lambda a: a.astype(scale.dtype), {"scale": g_centred * inverse, "bias": g_sum}
    )
    return grads, dx


by_own_statistics.defvjp(by_own_statistics_fwd, by_own_statistics_bwd)


@op(any_rank=True)
def by_statistics(
    params: PyTree, statistics: PyTree, x: Float[Array, "*batch dim"], *, eps: float | Array
) -> Float[Array, "*batch dim"]:
    """Standardizes the last axis by a given mean and variance, then a learned scale and bias."""
    factor = lax.rsqrt(statistics["var"] + eps) * params["scale"]
    return ((widen(x) - statistics["mean"]) * factor + params["bias"]).astype(x.dtype)


def standardize(
    x: Float[Array, "*shape"], axes: int | tuple[int, ...], eps: float | Array
) -> Float[Array, "*shape"]:
    centred = x - x.mean(axes, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(axes, keepdims=True) + eps)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def standardize_narrow(
    eps: float | Array, x: Float[Array, "*batch dim"]
) -> Float[Array, "*batch dim"]:
    """`standardize` over few features: means by a constant matrix, the derivative by hand."""
    return narrow_parts(eps, x)[0]


@standardize_narrow.defjvp
def standardize_narrow_jvp(
    eps: float | Array,
    primals: tuple[Float[Array, "*batch dim"]],
    tangents: tuple[Float[Array, "*batch dim"]],
) -> tuple[Float[Array, "*batch dim"], Float[Array, "*batch dim"]]:
    y, scale = narrow_parts(eps, *primals)
    t = tangents[0] - means(tangents[0])
    return y, scale * (t - y * means(y * t))


def narrow_parts(
    eps: float | Array, x: Float[Array, "*batch dim"]
) -> tuple[Float[Array, "*batch dim"], Float[Array, "*batch dim"]]:
    """(x standardized, one over its standard deviation)."""
    centred = x - means(x)
    scale = lax.rsqrt(means(jnp.square(centred)) + eps)
    return centred * scale, scale


def means(x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """The mean over the last axis, repeated along it."""
    return matmul(x, jnp.full((x.shape[-1], x.shape[-1]), 1 / x.shape[-1], x.dtype))


def widen(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
