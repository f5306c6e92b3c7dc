"""Attention: each query gets a mean of values, weighted by how well it fits their keys. The result
for a query that may attend to no key is meaningless, so leave it out of the loss.

Rotary positions (Su et al., 2021) turn pairs of features by an angle that grows with the position,
so that a product of a query and a key depends on their distance only.

A cache holds the keys and values of the tokens that a decoder has read, so that the next one costs
one step. It has room for a fixed number of tokens, since its shapes are compiled. Each row of a
batch has its own position, the number of tokens that were read in it; places after it are masked.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from model.layers.activations import softmax
from model.layers.forms import fused_attention, query_blocks
from model.layers.initializers import Initializer, lecun_normal
from model.layers.linear import linear, linear_init, linears
from model.layers.op import op

# (cosines, sines)
Angles = tuple[Float[Array, "*batch time 1 pairs"], Float[Array, "*batch time 1 pairs"]]


def attention_init(
    key: Array,
    dim: int,
    *,
    context_dim: int | None = None,
    bias: bool = True,
    init: Initializer = lecun_normal,
) -> dict[str, dict[str, Array]]:
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
def attention(
    params: PyTree,
    x: Float[Array, "batch time dim"],
    context: Float[Array, "batch source context_dim"] | None = None,
    *,
    heads: int,
    causal: bool = False,
    mask: Bool[Array, "..."] | None = None,
) -> Float[Array, "batch time dim"]:
    """Multi-head attention of the positions of x, (B, T, C), to a context, which defaults to x.

    `mask` is True where a query may attend and broadcasts to (B, heads, T, S).
    """
    layers = query, key, value = [params[name] for name in ("query", "key", "value")]
    if context is None:
        q, k, v = linears(layers, x)
    else:
        q, k, v = linear(query, x), linear(key, context), linear(value, context)
    y = attend(*(split_heads(a, heads) for a in (q, k, v)), mask, causal=causal)
    return linear(params["out"], y.reshape(x.shape))


def split_heads(x: Float[Array, "*batch dim"], heads: int) -> Float[Array, "*batch heads head_dim"]:
    """(B, T, C) -> (B, T, H, C / H)."""
    if x.shape[-1] % heads:
        raise ValueError(f"heads: {heads} must divide the width {x.shape[-1]}")
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


@op
def attend(
    q: Float[Array, "batch time heads dim"],
    k: Float[Array, "batch source kv_heads dim"],
    v: Float[Array, "batch source kv_heads dim"],
    mask: Shaped[Array, "..."] | None = None,
    *,
    causal: bool = False,
) -> Float[Array, "batch time heads dim"]:
    """The mean of the values for each query, weighted by softmax(query . key).

    q is (B, T, H, D), k and v are (B, S, K, D): H / K heads of queries share one head of keys.
    With `causal`, query t sees the first t + 1 keys. `mask` is True where a query may attend, and
    broadcasts to (B, H, T, S). For a query that may attend to no key, the result is finite, but
    differs between the forms below and may depend on all keys, later ones too.
    """
    if mask is not None:
        if mask.dtype != bool:
            fix = "write scores > -inf for one that is added to scores, mask != 0 for integers"
            raise ValueError(
                f"mask: must be True where a query may attend, got {mask.dtype}; {fix}"
            )
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    forms = {"default": partial(whole, causal)}
    if causal and (blocks := query_blocks(q.shape[1], k.shape[1])) > 1:
        forms["cpu"] = partial(in_blocks, blocks)
    if fused_attention(q, k, mask):
        forms["cuda"] = partial(fused, causal)
    arrays = [q, k, v] if mask is None else [q, k, v, mask]
    return whole(causal, *arrays) if len(forms) == 1 else lax.platform_dependent(*arrays, **forms)


def fused(
    causal: bool,
    q: Float[Array, "batch time heads dim"],
    k: Float[Array, "batch source kv_heads dim"],
    v: Float[Array, "batch source kv_heads dim"],
    mask: Bool[Array, "#batch #heads #time #source"] | None = None,
) -> Float[Array, "batch time heads dim"]:
    """cuDNN's kernel, whose mask must have a row for each query and a column for each key."""
    if mask is not None:
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], q.shape[1], k.shape[1]))
    options = {"mask": mask, "is_causal": causal, "implementation": "cudnn"}
    return jax.nn.dot_product_attention(q, k, v, **options)


def whole(
    causal: bool,
    q: Float[Array, "batch time heads dim"],
    k: Float[Array, "batch source kv_heads dim"],
    v: Float[Array, "batch source kv_heads dim"],
    mask: Bool[Array, "#batch #heads #time #source"] | None = None,
) -> Float[Array, "batch time heads dim"]:
    """All queries at once."""
    if causal:
        past = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))  # (T, S)
        mask = past if mask is None else past & mask
    return weighted_values(q, k, v, mask)


def in_blocks(
    count: int,
    q: Float[Array, "batch time heads dim"],
    k: Float[Array, "batch source kv_heads dim"],
    v: Float[Array, "batch source kv_heads dim"],
    mask: Bool[Array, "#batch #heads #time #source"] | None = None,
) -> Float[Array, "batch time heads dim"]:
    """Causal attention, block by block of queries, without the keys that are later than all of
    a block."""
    length = q.shape[1]
    ends = [length * (i + 1) // count for i in range(count)]
    results = []
    for start, end in zip([0, *ends], ends, strict=False):
        seen = jnp.arange(start, end)[:, None] >= jnp.arange(end)
        if mask is not None:
            rows = mask[:, :, start:end] if mask.shape[2] > 1 else mask
            seen = seen & (rows[..., :end] if mask.shape[3] > 1 else rows)
        results.append(weighted_values(q[:, start:end], k[:, :end], v[:, :end], seen))
    return jnp.concatenate(results, axis=1)


def weighted_values(
    q: Float[Array, "batch time heads dim"],
    k: Float[Array, "batch source kv_heads dim"],
    v: Float[Array, "batch source kv_heads dim"],
    mask: Bool[Array, "..."] | None,
) -> Float[Array, "batch time heads dim"]:
    """`attend` in its plain form: products of matrices, one for each head of keys."""
    (batch, length, heads, dim), groups = q.shape, k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)  # a bfloat16 softmax loses small probabilities
    shared = heads // groups  # heads of queries for each head of keys
    q = q / math.sqrt(dim)  # scaled before the product: q is smaller than the scores
    # With the heads in front, every product is one of plain matrices.
    q = q.reshape(batch, length, groups, shared, dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, groups, shared * length, dim)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)  # (B, K, S, D)
    scores = jnp.matmul(q, k.swapaxes(-1, -2), preferred_element_type=wide)
    if mask is not None:
        scores = scores.reshape(batch, heads, length, -1)
        # Not -inf: a row that may attend to nothing would be NaN.
        scores = jnp.where(mask, scores, jnp.finfo(wide).min)
        scores = scores.reshape(batch, groups, shared * length, -1)
    y = softmax(scores).astype(q.dtype) @ v  # (B, K, H / K * T, D)
    y = y.reshape(batch, groups, shared, length, dim).transpose(0, 3, 1, 2, 4)
    return y.reshape(batch, length, heads, dim)


def rotation(
    positions: Int[Array, "*batch time"], dim: int, base: float | Array = 10_000.0
) -> Angles:
    """(cosines, sines) of the angles of positions, (..., T), for heads of `dim` features; both are
    (..., T, 1, dim / 2)."""
    speeds = base ** (-jnp.arange(0, dim, 2) / dim)
    angles = positions[..., None, None] * speeds
    return jnp.cos(angles), jnp.sin(angles)


def rotary(
    x: Float[Array, "batch time heads dim"], angles: Angles
) -> Float[Array, "batch time heads dim"]:
    """x, (B, T, H, D), turned by `rotation`; feature i is paired with feature i + D / 2."""
    cos, sin = angles
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Entry(NamedTuple):
    """What one block keeps: arrays (B, K, S, D), so that no step transposes them."""

    keys: jax.Array
    values: jax.Array


def empty_cache(batch: int, size: int, heads: int, dim: int, depth: int) -> dict[str, Any]:
    """Room for `size` tokens of each of `batch` texts, in `depth` blocks."""

    def entry() -> Entry:
        return Entry(*(jnp.zeros((batch, heads, size, dim)) for _ in Entry._fields))

    return {"position": jnp.zeros(batch, jnp.int32), "blocks": [entry() for _ in range(depth)]}


def written(
    entry: Entry,
    new: tuple[Float[Array, "batch time heads dim"], Float[Array, "batch time heads dim"]],
    where: Int[Array, "batch time"],
) -> Entry:
    """The keys and values of one block, (B, K, S, D), with those of T new tokens, (B, T, K, D), at
    the positions `where`, (B, T), which follow each other."""
    return Entry(*(write(cache, x, where) for cache, x in zip(entry, new, strict=True)))


@op
def write(
    cache: Float[Array, "batch heads size dim"],
    new: Float[Array, "batch time heads dim"],
    where: Int[Array, "batch time"],
) -> Float[Array, "batch heads size dim"]:
    """`written` for one array."""
    # One row for each head of each text: so XLA's CPU compiler changes the cache in place. With a
    # row for each text it copies the cache, and for one text attention takes twice as long.
    _, heads, size, dim = cache.shape
    new = new.astype(cache.dtype).swapaxes(1, 2).reshape(-1, new.shape[1], dim)
    place = lambda row, new, start: lax.dynamic_update_slice(row, new, (start, 0))  # noqa: E731
    rows = cache.reshape(-1, size, dim)
    return jax.vmap(place)(rows, new, jnp.repeat(where[:, 0], heads)).reshape(cache.shape)


def visible(cache: PyTree, where: Int[Array, "batch time"]) -> Bool[Array, "batch 1 time size"]:
    """Whether a token at `where`, (B, T), sees each place of the cache: (B, 1, T, S)."""
    keys = jax.tree.leaves(cache["blocks"])[0]
    return (jnp.arange(keys.shape[-2]) <= where[..., None])[:, None]
