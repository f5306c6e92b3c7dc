"""MLP-Mixer (Tolstikhin et al., 2021): perceptrons over the patches of an image, then over the
features of each patch."""

from functools import partial

import jax
from jaxtyping import Array, Float, PyTree

from model.base import Model
from model.checks import Depth, check_image
from model.layers.activations import gelu
from model.layers.blocks import apply_blocks, blocks_init, check_blocks
from model.layers.conv import conv2d, conv2d_init
from model.layers.dropout import drop_path as skip
from model.layers.dropout import dropout as drop
from model.layers.dropout import split_key
from model.layers.linear import linear, linear_init
from model.layers.norm import layer_norm, layer_norm_init
from utils.forms import Count, Fraction, Positive, checked


@checked
def mixer(
    input_shape: tuple[int, ...],
    num_classes: Count,
    patch: Count = 4,
    dim: Count = 64,
    depth: Depth = 4,
    token_hidden: Count | None = None,
    hidden: Count | None = None,
    dropout: Fraction = 0.0,
    drop_path: Fraction = 0.0,
    remat: str | None = None,
    scan: bool = False,
    eps: Positive = 1e-6,
) -> Model:
    """`depth` blocks over patches of patch x patch pixels; the head reads their mean.

    `token_hidden` and `hidden` are the widths within the perceptrons over the patches and over the
    features, by default dim / 2 and 4 * dim. The rate of stochastic depth grows from 0 in the first
    block to `drop_path` in the last. Blocks whose names (`blocks/0` and so on) match the regex
    `remat` are recomputed in the backward pass to save memory. `scan` compiles one block for all of
    them.
    """
    check_image(input_shape)
    height, width, channels = input_shape
    if height % patch or width % patch:
        raise ValueError(
            f"patch: {patch} must divide the height and width of input_shape {tuple(input_shape)}"
        )
    tokens = (height // patch) * (width // patch)
    plan = [(dim, tokens, token_hidden or max(1, dim // 2), hidden or 4 * dim)] * depth
    check_blocks(remat, plan, scan)
    path_rates = [drop_path * i / max(depth - 1, 1) for i in range(depth)] if drop_path else None

    def init(key: Array) -> tuple[PyTree, PyTree]:
        k1, k2, *block_keys = jax.random.split(key, depth + 2)
        params = {
            "patches": conv2d_init(k1, channels, dim, patch),
            "blocks": blocks_init(block_keys, plan, block_init, scan),
            "norm": layer_norm_init(dim),
            "head": linear_init(k2, dim, num_classes),
        }
        return params, {}

    def apply(
        params: PyTree,
        state: PyTree,
        x: Float[Array, "batch height width channels"],
        *,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Float[Array, "batch classes"], PyTree]:
        x = conv2d(params["patches"], x, stride=patch, padding="VALID")
        x = x.reshape(x.shape[0], x.shape[1] * x.shape[2], dim)  # (B, T, D)
        block = partial(block_apply, dropout=dropout, eps=eps, train=train)
        keys = split_key(key, depth)
        x, _ = apply_blocks(block, range(depth), params["blocks"], x, keys, path_rates, remat=remat)
        return linear(params["head"], layer_norm(params["norm"], x, eps=eps).mean(1)), state

    return Model(init, apply)


def block_init(key: Array, dim: int, tokens: int, token_hidden: int, hidden: int) -> PyTree:
    k1, k2, k3, k4 = jax.random.split(key, 4)
    return {
        "norm1": layer_norm_init(dim),
        "tokens": perceptron_init(k1, k2, tokens, token_hidden),
        "norm2": layer_norm_init(dim),
        "features": perceptron_init(k3, k4, dim, hidden),
    }


def perceptron_init(k1: Array, k2: Array, width: int, hidden: int) -> PyTree:
    return {"expand": linear_init(k1, width, hidden), "project": linear_init(k2, hidden, width)}


def perceptron(params: PyTree, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    return linear(params["project"], gelu(linear(params["expand"], x)))


def block_apply(
    params: PyTree,
    x: Float[Array, "batch time dim"],
    key: Array | None,
    drop_path: float | Array | None,
    *,
    dropout: float | Array,
    eps: float | Array,
    train: bool,
) -> tuple[Float[Array, "batch time dim"], None]:
    """(x, None): one perceptron mixes the patches, one the features; both are added to x."""
    k1, k2, k3, k4 = split_key(key, 4)
    y = layer_norm(params["norm1"], x, eps=eps).swapaxes(1, 2)  # (B, D, T)
    y = perceptron(params["tokens"], y).swapaxes(1, 2)
    x = x + skip(k2, drop(k1, y, dropout, train=train), drop_path, train=train)
    y = perceptron(params["features"], layer_norm(params["norm2"], x, eps=eps))
    return x + skip(k4, drop(k3, y, dropout, train=train), drop_path, train=train), None
