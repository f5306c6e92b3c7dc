"""Ops of the tables for which model/layers has no layer."""

import jax
import jax.numpy as jnp

from model.layers.op import op


@op(any_rank=True)
def relu6(x):
    return jax.nn.relu6(x)


@op(any_rank=True)
def selu(x):
    return jax.nn.selu(x)


@op(any_rank=True)
def soft_sign(x):
    return jax.nn.soft_sign(x)


@op(any_rank=True)
def hard_tanh(x):
    return jax.nn.hard_tanh(x)


@op
def logsumexp(x, *, axis):
    return jax.nn.logsumexp(x, axis)


@op
def softmax_along(x, *, axis):
    return jax.nn.softmax(x, axis)


@op
def log_softmax_along(x, *, axis):
    return jax.nn.log_softmax(x, axis)


@op
def weighted_mean(q, k, v, mask=None, bias=None, *, causal, scale, lowest):
    """Attention without its projections, for arrays of (batch, position, head, feature).

    The mask and the bias broadcast to (batch, head, position of q, position of k); the score of a
    masked position is `lowest`.
    """
    scores = scale * jnp.einsum("bthc,bshc->bhts", q, k)
    if bias is not None:
        scores = scores + bias
    if causal:
        past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mask = past if mask is None else past & mask
    if mask is not None:
        scores = jnp.where(mask, scores, lowest)
    return jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(scores), v)
