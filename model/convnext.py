"""A small ConvNeXt: large depthwise kernels between 1x1 convolutions (Liu et al., 2022)."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from model.base import Model
from model.checks import Depth, check_image, check_widths
from model.layers.activations import gelu
from model.layers.blocks import apply_blocks, blocks_init, check_blocks, equal_runs
from model.layers.conv import conv2d, conv2d_init
from model.layers.linear import linear, linear_init
from model.layers.norm import layer_norm, layer_norm_init
from model.layers.pool import global_avg_pool
from utils.forms import Count, Positive, checked


@checked
def convnext(
    input_shape: tuple[int, ...],
    num_classes: Count,
    dims: tuple[Count, ...] = (8, 16, 32),
    kernel: Count = 7,
    expansion: Count = 2,
    head_dim: Count | None = 64,
    residual: bool = False,
    patch: Count = 4,
    depths: tuple[Depth, ...] | None = None,
    remat: str | None = None,
    scan: bool = False,
    bias: bool = False,
    layer_scale: Positive | None = None,
) -> Model:
    """One stage per width in `dims`; the stem divides the image size by `patch`, later stages by 2.

    `depths` is the number of blocks in each stage, by default one. The head is a linear map in two
    factors with `head_dim` features between them, or a plain one if that is null. `bias` gives the
    convolutions biases; `layer_scale` is the initial value of a learned factor for each feature
    that a block returns. Blocks whose names (`blocks/0` and so on) match the regex `remat` are
    recomputed in the backward pass to save memory. `scan` compiles one block for all blocks of a
    stage.
    """
    check_image(input_shape)
    check_widths("dims", dims)
    smallest = patch * 2 ** (len(dims) - 1)
    if min(input_shape[:2]) < smallest:
        raise ValueError(
            f"input_shape: {tuple(input_shape)} is too small for {len(dims)} widths in dims; "
            f"needs height and width of at least {smallest}, or fewer widths"
        )
    plan = [(stage,) for stage in stages_of(dims, depths)]
    check_blocks(remat, plan, scan)
    apply_block = partial(block_apply, residual=residual)

    def init_block(key: Array, stage: int) -> PyTree:
        return block_init(key, dims[stage], kernel, expansion, bias, layer_scale)

    def init(key: Array) -> tuple[PyTree, PyTree]:
        stem, blocks, downs, hidden, classes = jax.random.split(key, 5)
        keys = jax.random.split(blocks, len(plan))
        widths = zip(jax.random.split(downs, len(dims) - 1), pairwise(dims), strict=True)
        return {
            "stem": {
                "conv": conv2d_init(stem, input_shape[-1], dims[0], patch, bias=bias),
                "norm": layer_norm_init(dims[0]),
            },
            "blocks": blocks_init(keys, plan, init_block, scan),
            "downsample": [
                {"norm": layer_norm_init(a), "conv": conv2d_init(k, a, b, 2, bias=bias)}
                for k, (a, b) in widths
            ],
            "head": head_init(hidden, classes, dims[-1], head_dim, num_classes),
        }, {}

    def apply(
        params: PyTree,
        state: PyTree,
        x: Float[Array, "batch height width channels"],
        *,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Float[Array, "batch classes"], PyTree]:
        stem, head = params["stem"], params["head"]
        x = layer_norm(stem["norm"], conv2d(stem["conv"], x, stride=patch, padding="VALID"))
        for numbers, (stage,) in equal_runs(plan):
            if stage > 0:
                down = params["downsample"][stage - 1]
                x = conv2d(down["conv"], layer_norm(down["norm"], x), stride=2, padding="VALID")
            x, _ = apply_blocks(apply_block, numbers, params["blocks"], x, remat=remat)
        x = layer_norm(head["norm"], global_avg_pool(x))
        x = linear(head["hidden"], x) if "hidden" in head else x
        return linear(head["classes"], x), state

    return Model(init, apply)


def stages_of(dims: tuple[int, ...], depths: tuple[int, ...] | None) -> list[int]:
    """The stage of each block, as an index into `dims`."""
    depths = (1,) * len(dims) if depths is None else tuple(depths)
    if len(depths) != len(dims) or min(depths) < 1:
        raise ValueError(
            f"depths: needs at least one block for each of the {len(dims)} widths in dims, "
            f"got {depths}"
        )
    return [stage for stage, depth in enumerate(depths) for _ in range(depth)]


def head_init(k1: Array, k2: Array, dim: int, head_dim: int | None, num_classes: int) -> PyTree:
    norm = {"norm": layer_norm_init(dim)}
    if head_dim is None:
        return norm | {"classes": linear_init(k2, dim, num_classes)}
    hidden, classes = linear_init(k1, dim, head_dim), linear_init(k2, head_dim, num_classes)
    return norm | {"hidden": hidden, "classes": classes}


def block_init(
    key: Array, dim: int, kernel: int, expansion: int, bias: bool, layer_scale: float | None
) -> PyTree:
    k1, k2, k3 = jax.random.split(key, 3)
    params = {
        "dwconv": conv2d_init(k1, dim, dim, kernel, groups=dim, bias=bias),
        "norm": layer_norm_init(dim),
        "expand": conv2d_init(k2, dim, expansion * dim, 1, bias=bias),
        "project": conv2d_init(k3, expansion * dim, dim, 1, bias=bias),
    }
    return params if layer_scale is None else params | {"scale": jnp.full(dim, layer_scale)}


def block_apply(
    params: PyTree, x: Float[Array, "batch height width channels"], *, residual: bool
) -> tuple[Float[Array, "batch height width channels"], None]:
    """(x, None): the depthwise kernel mixes positions, the 1x1 convolutions mix channels."""
    y = layer_norm(params["norm"], conv2d(params["dwconv"], x))  # (B, H, W, C)
    y = conv2d(params["project"], gelu(conv2d(params["expand"], y)))
    y = y * params["scale"] if "scale" in params else y
    return x + y if residual else y, None
