"""A small ConvNeXt: large depthwise kernels between 1x1 convolutions (Liu et al., 2022)."""

from functools import partial
from itertools import pairwise

import jax

from model.base import Model
from model.checks import Count, Depth, check_image, check_widths, checked
from model.layers.activations import gelu
from model.layers.blocks import apply_blocks, blocks_init, check_blocks, equal_runs
from model.layers.conv import conv2d, conv2d_init
from model.layers.linear import linear, linear_init
from model.layers.norm import layer_norm, layer_norm_init
from model.layers.pool import global_avg_pool


@checked
def convnext(
    input_shape: tuple[int, ...],
    num_classes: Count,
    dims: tuple[Count, ...] = (8, 16, 32),
    kernel: Count = 7,
    expansion: Count = 2,
    head_dim: Count = 64,
    residual: bool = False,
    patch: Count = 4,
    depths: tuple[Depth, ...] | None = None,
    remat: str | None = None,
    scan: bool = False,
) -> Model:
    """One stage per width in `dims`; the stem divides the image size by `patch`, later stages by 2.

    `depths` is the number of blocks in each stage, by default one. The head is a linear map in two
    factors with `head_dim` features between them. Blocks whose names (`blocks/0` and so on) match
    the regex `remat` are recomputed in the backward pass to save memory. `scan` compiles one block
    for all blocks of a stage.
    """
    check_image(input_shape)
    check_widths("dims", dims)
    check_size(input_shape, patch, dims)
    plan = [(stage,) for stage in stages_of(dims, depths)]
    check_blocks(remat, plan, scan)
    apply_block = partial(block_apply, residual=residual)

    def init_block(key, stage):
        return block_init(key, dims[stage], kernel, expansion)

    def init(key):
        stem, blocks, downs, hidden, classes = jax.random.split(key, 5)
        keys = jax.random.split(blocks, len(plan))
        downs = zip(jax.random.split(downs, len(dims) - 1), pairwise(dims), strict=True)
        return {
            "stem": {
                "conv": conv2d_init(stem, input_shape[-1], dims[0], patch, bias=False),
                "norm": layer_norm_init(dims[0]),
            },
            "blocks": blocks_init(keys, plan, init_block, scan),
            "downsample": [down_init(k, *widths) for k, widths in downs],
            "head": {
                "norm": layer_norm_init(dims[-1]),
                "hidden": linear_init(hidden, dims[-1], head_dim),
                "classes": linear_init(classes, head_dim, num_classes),
            },
        }, {}

    def apply(params, state, x, *, train=False, key=None):
        stem, head = params["stem"], params["head"]
        x = layer_norm(stem["norm"], conv2d(stem["conv"], x, stride=patch, padding="VALID"))
        for numbers, (stage,) in equal_runs(plan):
            if stage > 0:
                down = params["downsample"][stage - 1]
                x = conv2d(down["conv"], layer_norm(down["norm"], x), stride=2, padding="VALID")
            x, _ = apply_blocks(apply_block, numbers, params["blocks"], x, remat=remat)
        x = layer_norm(head["norm"], global_avg_pool(x))
        return linear(head["classes"], linear(head["hidden"], x)), state

    return Model(init, apply)


def check_size(input_shape, patch, dims):
    smallest = patch * 2 ** (len(dims) - 1)
    if min(input_shape[:2]) < smallest:
        raise ValueError(
            f"input_shape: {tuple(input_shape)} is too small for {len(dims)} widths in dims; "
            f"needs height and width of at least {smallest}, or fewer widths"
        )


def stages_of(dims, depths):
    """The stage of each block, as an index into `dims`."""
    depths = (1,) * len(dims) if depths is None else tuple(depths)
    if len(depths) != len(dims) or min(depths) < 1:
        raise ValueError(
            f"depths: needs at least one block for each of the {len(dims)} widths in dims, "
            f"got {depths}"
        )
    return [stage for stage, depth in enumerate(depths) for _ in range(depth)]


def down_init(key, in_dim, out_dim):
    return {
        "norm": layer_norm_init(in_dim),
        "conv": conv2d_init(key, in_dim, out_dim, 2, bias=False),
    }


def block_init(key, dim, kernel, expansion):
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "dwconv": conv2d_init(k1, dim, dim, kernel, groups=dim, bias=False),
        "norm": layer_norm_init(dim),
        "expand": conv2d_init(k2, dim, expansion * dim, 1, bias=False),
        "project": conv2d_init(k3, expansion * dim, dim, 1, bias=False),
    }


def block_apply(params, x, *, residual):
    """(x, None): the depthwise kernel mixes positions, the 1x1 convolutions mix channels."""
    y = layer_norm(params["norm"], conv2d(params["dwconv"], x))  # (B, H, W, C)
    y = conv2d(params["project"], gelu(conv2d(params["expand"], y)))
    return x + y if residual else y, None
