"""Normalization over features (layer, rms), groups of features, or the batch.

All compute in at least float32, since a bfloat16 variance has two digits, and return the type of x.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from model.layers.forms import NARROW, on_cpu
from model.layers.linear import matmul
from model.layers.op import op


def layer_norm_init(dim):
    return {"scale": jnp.ones(dim), "bias": jnp.zeros(dim)}


@op(any_rank=True)
def layer_norm(params, x, *, eps=1e-6):
    """Mean 0 and variance 1 over the last axis, then a learned scale and bias."""
    wide = widen(x)
    if x.shape[-1] > NARROW:
        y = standardize(wide, -1, eps)
    else:
        y = on_cpu(lambda x: standardize_narrow(eps, x), lambda x: standardize(x, -1, eps), wide)
    return (y * params["scale"] + params["bias"]).astype(x.dtype)


def rms_norm_init(dim):
    return {"scale": jnp.ones(dim)}


@op(any_rank=True)
def rms_norm(params, x, *, eps=1e-6):
    """Mean square 1 over the last axis, then a learned scale."""
    wide = widen(x)
    return (
        wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps) * params["scale"]
    ).astype(x.dtype)


def group_norm_init(dim):
    return {"scale": jnp.ones(dim), "bias": jnp.zeros(dim)}


@op
def group_norm(params, x, *, groups, eps=1e-6):
    """Mean 0 and variance 1 over each example's space and each group of channels, then a learned scale and bias."""
    if x.shape[-1] % groups:
        raise ValueError(f"groups: {groups} must divide the {x.shape[-1]} channels")
    grouped = widen(x).reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    y = standardize(grouped, (1, 3), eps).reshape(x.shape)
    return (y * params["scale"] + params["bias"]).astype(x.dtype)


def batch_norm_init(dim):
    """Parameters and running statistics."""
    return {"scale": jnp.ones(dim), "bias": jnp.zeros(dim)}, {
        "mean": jnp.zeros(dim),
        "var": jnp.ones(dim),
    }


def batch_norm(params, state, x, *, train, momentum=0.9, eps=1e-5):
    """Standardizes by the batch's statistics in training, by the running ones otherwise; returns (y, state)."""
    if not train:
        return by_statistics(params, state, x, eps=eps), state
    y, batch = by_own_statistics(eps, params, widen(x))
    state = {name: blend(state[name], lax.stop_gradient(batch[name]), momentum) for name in batch}
    return y.astype(x.dtype), state


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_own_statistics(eps, params, x):
    """`by_statistics` of x itself, and those statistics, which no gradient is taken of."""
    return plain_batch_norm(eps, params, x)


def plain_batch_norm(eps, params, x):
    """The same without a gradient of its own, as the gradient's gradient needs it."""
    axes = tuple(range(x.ndim - 1))
    batch = {"mean": x.mean(axes), "var": x.var(axes)}
    return by_statistics(params, batch, x, eps=eps), batch


def by_own_statistics_fwd(eps, params, x):
    y, batch = plain_batch_norm(eps, params, x)
    return (y, batch), (params["scale"], batch, x)


def by_own_statistics_bwd(eps, residuals, cotangents):
    """Written out it takes 0.8 of the time of what JAX derives."""
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
def by_statistics(params, statistics, x, *, eps):
    """Standardizes the last axis by a given mean and variance, then a learned scale and bias."""
    y = (widen(x) - statistics["mean"]) * (
        lax.rsqrt(statistics["var"] + eps) * params["scale"]
    ) + params["bias"]
    return y.astype(x.dtype)


def blend(old, new, momentum):
    return momentum * old + (1 - momentum) * new


def standardize(x, axes, eps):
    centred = x - x.mean(axes, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(axes, keepdims=True) + eps)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def standardize_narrow(eps, x):
    """`standardize` over few features: means by a constant matrix, and a gradient written out, which needs two of them."""
    return narrow_parts(eps, x)[0]


@standardize_narrow.defjvp
def standardize_narrow_jvp(eps, x, t):
    y, scale = narrow_parts(eps, *x)
    t = t[0] - means(t[0])
    return y, scale * (t - y * means(y * t))


def narrow_parts(eps, x):
    """(x standardized, what its distance from the mean was multiplied by)."""
    centred = x - means(x)
    scale = lax.rsqrt(means(jnp.square(centred)) + eps)
    return centred * scale, scale


def means(x):
    """The mean of the last axis, in each of its places."""
    return matmul(x, jnp.full((x.shape[-1], x.shape[-1]), 1 / x.shape[-1], x.dtype))


def widen(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
