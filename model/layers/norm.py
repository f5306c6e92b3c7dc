"""Normalization over features (layer, rms), groups of features, or the batch.

All compute in at least float32, since a bfloat16 variance has two digits, and return the type of x.
"""

import jax.numpy as jnp
from jax import lax

from model.layers.op import op


def layer_norm_init(dim):
    return {"scale": jnp.ones(dim), "bias": jnp.zeros(dim)}


@op(any_rank=True)
def layer_norm(params, x, *, eps=1e-6):
    """Mean 0 and variance 1 over the last axis, then a learned scale and bias."""
    return (standardize(widen(x), -1, eps) * params["scale"] + params["bias"]).astype(x.dtype)


def rms_norm_init(dim):
    return {"scale": jnp.ones(dim)}


@op(any_rank=True)
def rms_norm(params, x, *, eps=1e-6):
    """Mean square 1 over the last axis, then a learned scale."""
    wide = widen(x)
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps) * params["scale"]).astype(x.dtype)


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
    return {"scale": jnp.ones(dim), "bias": jnp.zeros(dim)}, {"mean": jnp.zeros(dim), "var": jnp.ones(dim)}


def batch_norm(params, state, x, *, train, momentum=0.9, eps=1e-5):
    """Standardizes by the batch's statistics in training, by the running ones otherwise; returns (y, state)."""
    if not train:
        return by_statistics(params, state, x, eps=eps), state
    wide, axes = widen(x), tuple(range(x.ndim - 1))
    batch = {"mean": wide.mean(axes), "var": wide.var(axes)}
    state = {name: blend(state[name], batch[name], momentum) for name in batch}
    return by_statistics(params, batch, x, eps=eps), state


@op(any_rank=True)
def by_statistics(params, statistics, x, *, eps):
    """Standardizes the last axis by a given mean and variance, then a learned scale and bias."""
    y = (widen(x) - statistics["mean"]) * (lax.rsqrt(statistics["var"] + eps) * params["scale"]) + params["bias"]
    return y.astype(x.dtype)


def blend(old, new, momentum):
    return momentum * old + (1 - momentum) * lax.stop_gradient(new)


def standardize(x, axes, eps):
    centred = x - x.mean(axes, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(axes, keepdims=True) + eps)


def widen(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
