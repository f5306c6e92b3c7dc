"""A decoder of text (Radford et al., 2019), with the options of its successors.

With `feed_forward="gelu_tanh"` it is GPT-2. Llama is `positions="rotary"`, `norm="rms"`,
`feed_forward="swiglu"`, `bias=False` and `tied=False`.
"""

import math
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer, PyTree

from model.base import Model
from model.checks import Depth
from model.layers.activations import gelu, gelu_tanh, silu
from model.layers.attention import (
    Angles,
    Entry,
    attend,
    empty_cache,
    rotary,
    rotation,
    split_heads,
    visible,
    written,
)
from model.layers.blocks import apply_blocks, blocks_init, check_blocks, unrolled
from model.layers.dropout import dropout as drop
from model.layers.dropout import split_key
from model.layers.embedding import embedding, embedding_init, unembedding
from model.layers.forms import are_free
from model.layers.initializers import normal
from model.layers.linear import linear, linear_init, linears
from model.layers.norm import layer_norm, layer_norm_init, rms_norm, rms_norm_init
from utils.forms import Count, Fraction, Positive, checked

NORMS = {"layer": (layer_norm_init, layer_norm), "rms": (rms_norm_init, rms_norm)}


class Form(NamedTuple):
    """The arguments of `gpt`."""

    vocab_size: int
    length: int
    dim: int
    depth: int
    heads: int
    kv_heads: int
    positions: str
    norm: str
    feed_forward: str
    hidden: int
    qk_norm: bool
    tied: bool
    bias: bool
    eps: float
    rotary_base: float
    dropout: float
    remat: str | None
    scan: bool


@checked
def gpt(
    input_shape: tuple[int, ...],
    vocab_size: Count,
    length: Count | None = None,
    dim: Count = 128,
    depth: Depth = 4,
    heads: Count = 4,
    kv_heads: Count | None = None,
    positions: Literal["learned", "rotary"] = "learned",
    norm: Literal["layer", "rms"] = "layer",
    feed_forward: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu",
    hidden: Count | None = None,
    qk_norm: bool = False,
    tied: bool = True,
    bias: bool = True,
    eps: Positive = 1e-5,
    rotary_base: Positive = 10_000.0,
    dropout: Fraction = 0.0,
    remat: str | None = None,
    scan: bool = False,
) -> Model:
    """`depth` pre-norm blocks: tokens (B, T) -> logits of the next tokens (B, T, vocab_size).

    `length` is the longest text, by default that of the examples. `kv_heads` heads of keys and
    values are shared by `heads` heads of queries. `hidden` is the width within the feed-forward
    layers, by default 4 * dim, or 8 / 3 * dim with swiglu. `tied` uses the embedding as the head,
    too. Blocks whose names (`blocks/0` and so on) match the regex `remat` are recomputed in the
    backward pass to save memory. `scan` compiles one block for all of them. Packed documents are
    {"tokens": ..., "segments": ...}: a token sees only those of its own segment.
    """
    kv_heads = kv_heads or heads
    if dim % heads:
        raise ValueError(f"heads: {heads} must divide dim ({dim})")
    if heads % kv_heads:
        raise ValueError(f"kv_heads: {kv_heads} must divide heads ({heads})")
    if positions == "rotary" and dim // heads % 2:
        raise ValueError(f"heads: rotary positions need an even width of a head, got {dim}/{heads}")
    check_blocks(remat, [()] * depth, scan)
    hidden = hidden or (-(-8 * dim // 24) * 8 if feed_forward == "swiglu" else 4 * dim)
    form = Form(
        vocab_size,
        length or input_shape[0],
        dim,
        depth,
        heads,
        kv_heads,
        positions,
        norm,
        feed_forward,
        hidden,
        qk_norm,
        tied,
        bias,
        eps,
        rotary_base,
        dropout,
        remat,
        scan,
    )
    return Model(partial(init, form), partial(apply, form), partial(cache, form))


def init(form: Form, key: Array) -> tuple[PyTree, PyTree]:
    k1, k2, k3, *block_keys = jax.random.split(key, form.depth + 3)
    norm_init, _ = NORMS[form.norm]
    plan = [()] * form.depth  # equal blocks
    params = {
        "tokens": embedding_init(k1, form.vocab_size, form.dim),
        "blocks": blocks_init(block_keys, plan, partial(block_init, form), form.scan),
        "norm": norm_init(form.dim, form.bias),
    }
    if form.positions == "learned":
        params["positions"] = embedding_init(k2, form.length, form.dim)
    if not form.tied:
        params["head"] = linear_init(k3, form.dim, form.vocab_size, bias=False, init=normal(0.02))
    return params, {}


def apply(
    form: Form,
    params: PyTree,
    state: PyTree,
    x: Integer[Array, "batch time"] | dict[str, Integer[Array, "batch time"]],
    *,
    train: bool = False,
    key: Array | None = None,
) -> tuple[Float[Array, "batch time vocab"], PyTree]:
    tokens, segments = (x["tokens"], x["segments"]) if isinstance(x, dict) else (x, None)
    length = tokens.shape[1]
    if isinstance(length, int) and length > form.length:
        raise ValueError(
            f"length: the model takes texts of up to {form.length} tokens, got {length}"
        )
    first, *keys = split_key(key, form.depth + 1)
    cached = state.get("cache")
    where = token_positions(tokens, segments, cached)  # (T,) or (B, T)
    y = embedding(params["tokens"], tokens)  # (B, T, C)
    if form.positions == "learned":
        y, angles = y + positions_at(params["positions"], where), None
    else:
        angles = rotation(where, form.dim // form.heads, form.rotary_base)
    mask = visible(cached, where) if cached else None
    if segments is not None and not cached:  # a token sees those of its own segment
        mask = segments[:, None, :, None] == segments[:, None, None, :]
    block = partial(block_apply, form, angles=angles, mask=mask, where=where, train=train)
    entries = cached["blocks"] if cached else None
    y = drop(first, y, form.dropout, train=train)
    blocks, numbers = params["blocks"], range(form.depth)
    y, entries = apply_blocks(block, numbers, blocks, y, keys, entries, remat=form.remat)
    if cached:
        position = cached["position"] + tokens.shape[1]
        state = state | {"cache": {"position": position, "blocks": unrolled(entries)}}
    y = NORMS[form.norm][1](params["norm"], y, eps=form.eps)
    return unembedding(params["tokens"], y) if form.tied else linear(params["head"], y), state


def cache(form: Form, batch_size: int, size: int | None = None) -> PyTree:
    """A state with an empty cache, with room for `size` tokens, by default the longest text."""
    head_dim = form.dim // form.heads
    return {
        "cache": empty_cache(batch_size, size or form.length, form.kv_heads, head_dim, form.depth)
    }


def token_positions(
    tokens: Integer[Array, "batch time"],
    segments: Integer[Array, "batch time"] | None,
    cache: PyTree,
) -> Int[Array, "*rows time"]:
    """The position of each token in its text: (T,), or (B, T) where the rows differ."""
    steps = jnp.arange(tokens.shape[1])
    if cache:
        return cache["position"][:, None] + steps
    if segments is None:
        return steps
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    starts = jnp.where(begins, steps, 0)
    if are_free(tokens.shape[1:]):  # exported formats have no cumulative maximum of a free size
        return steps - jnp.where(steps[:, None] >= steps, starts[:, None], 0).max(-1)
    return steps - lax.cummax(starts, axis=1)


def positions_at(
    params: PyTree, where: Int[Array, "*batch time"]
) -> Float[Array, "*batch time dim"]:
    """The learned vectors of positions."""
    if where.ndim == 1:  # the first positions: a slice, whose gradient is not a scatter
        return lax.slice_in_dim(params["weight"], 0, where.shape[0])
    return embedding(params, where)


def block_init(form: Form, key: Array) -> PyTree:
    k1, k2, k3, k4, k5, k6, k7 = jax.random.split(key, 7)
    head_dim, layer = form.dim // form.heads, partial(linear_init, bias=form.bias)
    keys = form.kv_heads * head_dim
    small = normal(0.02)
    # Smaller where a block adds to x, so that the sum of all blocks has the size of one.
    last = normal(0.02 / math.sqrt(2 * form.depth))
    attention = {
        "query": layer(k1, form.dim, form.dim, init=small),
        "key": linear_init(k2, form.dim, keys, bias=False, init=small),
        "value": layer(k3, form.dim, keys, init=small),
        "out": layer(k4, form.dim, form.dim, init=last),
    }
    if form.qk_norm:
        attention |= {name: rms_norm_init(head_dim) for name in ("query_norm", "key_norm")}
    perceptron = {
        "expand": layer(k5, form.dim, form.hidden, init=small),
        "project": layer(k6, form.hidden, form.dim, init=last),
    }
    if form.feed_forward == "swiglu":
        perceptron["gate"] = layer(k7, form.dim, form.hidden, init=small)
    norm_init, _ = NORMS[form.norm]
    norms = {name: norm_init(form.dim, form.bias) for name in ("norm1", "norm2")}
    return {"attention": attention, "perceptron": perceptron} | norms


def block_apply(
    form: Form,
    params: PyTree,
    x: Float[Array, "batch time dim"],
    key: Array | None,
    entry: Entry | None,
    *,
    angles: Angles | None,
    mask: Bool[Array, "batch 1 time keys"] | None,
    where: Int[Array, "*rows time"],
    train: bool,
) -> tuple[Float[Array, "batch time dim"], Entry | None]:
    """(x, the block's entry in the cache): attention mixes the tokens, a perceptron the features of
    each token; both are added to x."""
    k1, k2 = split_key(key, 2)
    _, normalize = NORMS[form.norm]
    y = normalize(params["norm1"], x, eps=form.eps)
    y, entry = self_attention(form, params["attention"], y, entry, angles, mask, where)
    x = x + drop(k1, y, form.dropout, train=train)
    y = normalize(params["norm2"], x, eps=form.eps)
    y = perceptron(form.feed_forward, params["perceptron"], y)
    return x + drop(k2, y, form.dropout, train=train), entry


def self_attention(
    form: Form,
    params: PyTree,
    x: Float[Array, "batch time dim"],
    entry: Entry | None,
    angles: Angles | None,
    mask: Bool[Array, "batch 1 time keys"] | None,
    where: Int[Array, "*rows time"],
) -> tuple[Float[Array, "batch time dim"], Entry | None]:
    """Causal attention among the tokens of x, or from them to all tokens in the cache's entry."""
    q, k, v = linears([params[name] for name in ("query", "key", "value")], x)
    q, k, v = (
        split_heads(a, count)
        for a, count in ((q, form.heads), (k, form.kv_heads), (v, form.kv_heads))
    )
    if form.qk_norm:
        q = rms_norm(params["query_norm"], q, eps=form.eps)
        k = rms_norm(params["key_norm"], k, eps=form.eps)
    if angles is not None:
        q, k = rotary(q, angles), rotary(k, angles)
    if entry is not None:
        entry = written(entry, (k, v), where)
        k, v = (a.astype(q.dtype).swapaxes(1, 2) for a in entry)
    y = attend(q, k, v, mask, causal=entry is None)
    return linear(params["out"], y.reshape(x.shape)), entry


def perceptron(
    feed_forward: str, params: PyTree, x: Float[Array, "batch time dim"]
) -> Float[Array, "batch time dim"]:
    if feed_forward == "swiglu":
        gate, y = linears([params["gate"], params["expand"]], x)
        return linear(params["project"], silu(gate) * y)
    activation = gelu if feed_forward == "gelu" else gelu_tanh
    return linear(params["project"], activation(linear(params["expand"], x)))
