"""A vision transformer (Dosovitskiy et al., 2020), with mean pooling as in Beyer et al., 2022, or
a class token."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from model.base import Model
from model.checks import Depth, check_image
from model.layers.activations import gelu
from model.layers.attention import attention, attention_init
from model.layers.blocks import apply_blocks, blocks_init, check_blocks
from model.layers.conv import conv2d, conv2d_init
from model.layers.dropout import drop_path as skip
from model.layers.dropout import dropout as drop
from model.layers.dropout import split_key
from model.layers.embedding import embedding_init
from model.layers.linear import linear, linear_init
from model.layers.norm import layer_norm, layer_norm_init
from utils.forms import Count, Fraction, Positive, checked


@checked
def vit(
    input_shape: tuple[int, ...],
    num_classes: Count,
    patch: Count = 4,
    dim: Count = 64,
    depth: Depth = 4,
    heads: Count = 4,
    expansion: Count = 4,
    dropout: Fraction = 0.0,
    drop_path: Fraction = 0.0,
    remat: str | None = None,
    scan: bool = False,
    pool: Literal["mean", "token"] = "mean",
    eps: Positive = 1e-6,
) -> Model:
    """`depth` pre-norm blocks over patches of patch x patch pixels.

    The head reads the mean of all patches, or, with `pool="token"`, a learned token before them.
    The rate of stochastic depth grows from 0 in the first block to `drop_path` in the last. Blocks
    whose names (`blocks/0` and so on) match the regex `remat` are recomputed in the backward pass
    to save memory. `scan` compiles one block for all of them.
    """
    check_image(input_shape)
    height, width, channels = input_shape
    if height % patch or width % patch:
        raise ValueError(
            f"patch: {patch} must divide the height and width of input_shape {tuple(input_shape)}"
        )
    if dim % heads:
        raise ValueError(f"heads: {heads} must divide dim ({dim})")
    plan = [(dim, expansion)] * depth
    check_blocks(remat, plan, scan)
    tokens = (height // patch) * (width // patch)
    path_rates = [drop_path * i / max(depth - 1, 1) for i in range(depth)] if drop_path else None

    def init(key: Array) -> tuple[PyTree, PyTree]:
        k1, k2, k3, *block_keys = jax.random.split(key, depth + 3)
        params = {
            "patches": conv2d_init(k1, channels, dim, patch),
            "positions": embedding_init(k2, tokens + (pool == "token"), dim),
            "blocks": blocks_init(block_keys, plan, block_init, scan),
            "norm": layer_norm_init(dim),
            "head": linear_init(k3, dim, num_classes),
        }
        if pool == "token":
            params["token"] = jnp.zeros(dim)
        return params, {}

    def apply(
        params: PyTree,
        state: PyTree,
        x: Float[Array, "batch height width channels"],
        *,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Float[Array, "batch classes"], PyTree]:
        first, *keys = split_key(key, depth + 1)
        x = embed(params, x, patch)
        x = drop(first, x, dropout, train=train)
        block = partial(block_apply, heads=heads, dropout=dropout, eps=eps, train=train)
        blocks, numbers = params["blocks"], range(depth)
        x, _ = apply_blocks(block, numbers, blocks, x, keys, path_rates, remat=remat)
        x = layer_norm(params["norm"], x[:, :1] if pool == "token" else x, eps=eps)
        return linear(params["head"], x.mean(1)), state

    return Model(init, apply)


def embed(
    params: PyTree, x: Float[Array, "batch height width channels"], patch: int
) -> Float[Array, "batch time dim"]:
    """(B, H, W, channels) -> (B, T, D): the patches, after the class token if there is one."""
    x = conv2d(params["patches"], x, stride=patch, padding="VALID")
    x = x.reshape(x.shape[0], x.shape[1] * x.shape[2], x.shape[3])
    if "token" in params:
        token = jnp.broadcast_to(params["token"].astype(x.dtype), (x.shape[0], 1, x.shape[2]))
        x = jnp.concatenate([token, x], axis=1)
    return x + params["positions"]["weight"]


def block_init(key: Array, dim: int, expansion: int) -> PyTree:
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "norm1": layer_norm_init(dim),
        "attention": attention_init(k1, dim),
        "norm2": layer_norm_init(dim),
        "expand": linear_init(k2, dim, expansion * dim),
        "project": linear_init(k3, expansion * dim, dim),
    }


def block_apply(
    params: PyTree,
    x: Float[Array, "batch time dim"],
    key: Array | None,
    drop_path: float | Array | None,
    *,
    heads: int,
    dropout: float | Array,
    eps: float | Array,
    train: bool,
) -> tuple[Float[Array, "batch time dim"], None]:
    """(x, None): attention mixes the tokens, a perceptron the features of each token; both are
    added to x."""
    k1, k2, k3, k4 = split_key(key, 4)
    y = attention(params["attention"], layer_norm(params["norm1"], x, eps=eps), heads=heads)
    x = x + skip(k2, drop(k1, y, dropout, train=train), drop_path, train=train)
    y = layer_norm(params["norm2"], x, eps=eps)
    y = linear(params["project"], gelu(linear(params["expand"], y)))
    return x + skip(k4, drop(k3, y, dropout, train=train), drop_path, train=train), None
