"""Multi-head attention of a sequence to itself or to a context."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from model.layers.activations import softmax
from model.layers.forms import are_free
from model.layers.initializers import lecun_normal
from model.layers.linear import linear, linear_init
from model.layers.op import op


def attention_init(key, dim, *, context_dim=None, bias=True, init=lecun_normal):
    source = dim if context_dim is None else context_dim
    k1, k2, k3, k4 = jax.random.split(key, 4)
    return {
        "query": linear_init(k1, dim, dim, bias=bias, init=init),
        # No bias: it would add the same number to a whole row of scores, which softmax ignores.
        "key": linear_init(k2, source, dim, bias=False, init=init),
        "value": linear_init(k3, source, dim, bias=bias, init=init),
        "out": linear_init(k4, dim, dim, bias=bias, init=init),
    }


@op
def attention(params, x, context=None, *, heads, causal=False, mask=None):
    """Each position of x gets the mean of the context's values, weighted by softmax(query . key).

    The context defaults to x. `mask` is True where a query may attend and broadcasts to
    (B, heads, T, S).
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)  # a bfloat16 softmax loses small probabilities
    # q: (B, H, T, D / H); k and v: (B, H, S, D / H)
    q, k, v = (split_heads(y, heads) for y in projections(params, x, context))
    q = q / math.sqrt(q.shape[-1])  # scaled before the product: q is smaller than the scores
    scores = jnp.matmul(q, k.swapaxes(-1, -2), preferred_element_type=wide)  # (B, H, T, S)
    if causal:
        past = jnp.tril(jnp.ones(scores.shape[-2:], bool))  # (T, S)
        mask = past if mask is None else past & mask
    if mask is not None:
        # Not -inf: a row that may attend to nothing would be NaN.
        scores = jnp.where(mask, scores, jnp.finfo(wide).min)
    y = softmax(scores).astype(x.dtype) @ v  # (B, H, T, D / H)
    return linear(params["out"], y.swapaxes(-2, -3).reshape(x.shape))


def projections(params, x, context):
    """Queries, keys and values.

    In self-attention they are one product; a transformer's step then takes 0.95 of the time.
    """
    layers = query, key, value = [params[name] for name in ("query", "key", "value")]
    if context is not None or are_free(x.shape):
        context = x if context is None else context
        return linear(query, x), linear(key, context), linear(value, context)
    # Stacked along an axis of their own, so that the feature axis can be sharded over devices.
    weight = jnp.stack([p["weight"] for p in layers], axis=1)  # (D, 3, D)
    y = lax.dot_general(x.reshape(-1, x.shape[-1]), weight, (((1,), (0,)), ((), ())))
    if any("bias" in p for p in layers):  # keys have none
        y += jnp.stack([p.get("bias", jnp.zeros_like(p["weight"][0])) for p in layers])
    return [y[:, i].reshape(x.shape) for i in range(3)]  # y: (B * T, 3, D)


def split_heads(x, heads):
    """(B, T, D) -> (B, H, T, D / H): with the heads in front, every product is a plain matmul."""
    if x.shape[-1] % heads:
        raise ValueError(f"heads: {heads} must divide the width {x.shape[-1]}")
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).swapaxes(-2, -3)
