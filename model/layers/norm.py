"""Normalization over features (layer, rms), groups of features, or the batch.

All compute in at least float32, since a bfloat16 variance has two digits, and return the type of x.
"""

import jax.numpy as jnp
from jax import lax


def layer_norm_init(dim):
    return {"scale": jnp.ones(dim), "bias": jnp.zeros(dim)}


def layer_norm(params, x, *, eps=1e-6):
    """Mean 0 and variance 1 over the last axis, then a learned scale and bias."""
    return (standardize(widen(x), -1, eps) * params["scale"] + params["bias"]).astype(x.dtype)


def rms_norm_init(dim):
    return {"scale": jnp.ones(dim)}


def rms_norm(params, x, *, eps=1e-6):
    """Mean square 1 over the last axis, then a learned scale."""
    wide = widen(x)
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps) * params["scale"]).astype(x.dtype)


def group_norm_init(dim):
    return {"scale": jnp.ones(dim), "bias": jnp.zeros(dim)}


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
    wide, axes = widen(x), tuple(range(x.ndim - 1))
    mean, var = (wide.mean(axes), wide.var(axes)) if train else (state["mean"], state["var"])
    y = (wide - mean) * (lax.rsqrt(var + eps) * params["scale"]) + params["bias"]
    if train:
        state = {"mean": blend(state["mean"], mean, momentum), "var": blend(state["var"], var, momentum)}
    return y.astype(x.dtype), state


def blend(old, new, momentum):
    return momentum * old + (1 - momentum) * lax.stop_gradient(new)


def standardize(x, axes, eps):
    centred = x - x.mean(axes, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(axes, keepdims=True) + eps)


def widen(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
