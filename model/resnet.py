"""The residual network (He et al., 2015): for small images as in section 4.2, without max pooling,
or for large ones as in section 3.3."""

from functools import partial
from operator import itemgetter
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, PyTree

from model.base import Model
from model.checks import Depth, check_image, check_widths
from model.layers.activations import relu
from model.layers.blocks import apply_blocks, blocks_init, check_blocks, equal_runs, joined
from model.layers.conv import conv2d, conv2d_init
from model.layers.initializers import he_normal
from model.layers.linear import linear, linear_init
from model.layers.norm import batch_norm, batch_norm_init
from model.layers.pool import global_avg_pool, max_pool
from utils.forms import Count, checked


@checked
def resnet(
    input_shape: tuple[int, ...],
    num_classes: Count,
    widths: tuple[Count, ...] = (16, 32, 64),
    depth: Depth = 3,
    remat: str | None = None,
    scan: bool = False,
    depths: tuple[Depth, ...] | None = None,
    bottleneck: bool = False,
    large_images: bool = False,
) -> Model:
    """`depth` blocks of two convolutions per width; each later width halves the image size.

    `depths` gives each width its own number of blocks. With `bottleneck`, a block has a convolution
    between two of 1x1, and returns 4 times its width. `large_images` begins with a convolution of
    stride 2 and max pooling, and pads both sides alike, as torchvision does. Blocks whose names
    (`blocks/0` and so on) match the regex `remat` are recomputed in the backward pass to save
    memory. `scan` compiles one block for all blocks of a width that have the same shapes.
    """
    check_image(input_shape)
    check_widths("widths", widths)
    plan = plan_of(widths, depths_of(widths, depth, depths), bottleneck)
    check_blocks(remat, plan, scan)
    padding = "torch" if large_images else "SAME"

    def init(key: Array) -> tuple[PyTree, PyTree]:
        stem_key, head_key, *block_keys = jax.random.split(key, len(plan) + 2)
        stem, stem_state = unit_init(stem_key, input_shape[-1], widths[0], 7 if large_images else 3)
        pairs = blocks_init(block_keys, plan, block_init, scan)
        blocks, block_states = (
            jax.tree.map(itemgetter(i), pairs, is_leaf=lambda pair: isinstance(pair, tuple))
            for i in range(2)
        )
        head = linear_init(head_key, plan[-1].out, num_classes)
        params = {"stem": stem, "blocks": blocks, "head": head}
        return params, {"stem": stem_state, "blocks": block_states}

    def apply(
        params: PyTree,
        state: PyTree,
        x: Float[Array, "batch height width channels"],
        *,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Float[Array, "batch classes"], PyTree]:
        options = {"padding": padding, "train": train}
        stride = 2 if large_images else 1
        x, stem_state = unit_apply(params["stem"], state["stem"], x, stride=stride, **options)
        x, new_states = relu(x), []
        x = max_pool(x, 3, stride=2, padding=1) if large_images else x
        blocks, states = params["blocks"], state["blocks"]
        for numbers, shape in equal_runs(plan):
            block = partial(block_apply, stride=shape.stride, **options)
            x, new = apply_blocks(block, numbers, blocks, x, states, remat=remat)
            new_states.append(new)
        x = linear(params["head"], global_avg_pool(x))
        return x, {"stem": stem_state, "blocks": joined(new_states)}

    return Model(init, apply)


class Shape(NamedTuple):
    """One block: its channels, and its stride."""

    input: int
    inner: int
    out: int
    stride: int
    bottleneck: bool


def depths_of(
    widths: tuple[int, ...], depth: int, depths: tuple[int, ...] | None
) -> tuple[int, ...]:
    """The number of blocks of each width."""
    if depths is None:
        return (depth,) * len(widths)
    if len(depths) != len(widths):
        raise ValueError(
            f"depths: needs one number for each of the {len(widths)} widths, got {len(depths)}"
        )
    return depths


def plan_of(widths: tuple[int, ...], depths: tuple[int, ...], bottleneck: bool) -> list[Shape]:
    """The Shape of each block."""
    plan, before, factor = [], widths[0], 4 if bottleneck else 1
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        for i in range(depth):
            stride = 2 if stage > 0 and i == 0 else 1
            plan.append(Shape(before, width, factor * width, stride, bottleneck))
            before = factor * width
    return plan


def block_init(
    key: Array, in_dim: int, inner: int, out_dim: int, stride: int, bottleneck: bool
) -> tuple[PyTree, PyTree]:
    k1, k2, k3 = jax.random.split(key, 3)
    units = {
        "first": unit_init(k1, in_dim, inner, 1 if bottleneck else 3),
        "second": unit_init(k2, inner, inner, 3),
    }
    if bottleneck:
        units["third"] = unit_init(jax.random.fold_in(key, 3), inner, out_dim, 1)
    if stride != 1 or in_dim != out_dim:
        units["shortcut"] = unit_init(k3, in_dim, out_dim, 1)
    params = {name: unit[0] for name, unit in units.items()}
    return params, {name: unit[1] for name, unit in units.items()}


def block_apply(
    params: PyTree,
    x: Float[Array, "batch height width in_dim"],
    state: PyTree,
    *,
    stride: int,
    padding: str | int,
    train: bool,
) -> tuple[Float[Array, "batch out_height out_width out_dim"], PyTree]:
    """(relu(x + two or three convolutions of x), the statistics). Where the shape changes, x passes
    a 1x1 convolution. The first 3x3 convolution has the stride."""
    names = [name for name in ("first", "second", "third") if name in params]
    strided = "second" if "third" in params else "first"
    new, y = {}, x
    for name in names:
        y = relu(y) if new else y
        options = {"stride": stride if name == strided else 1, "padding": padding}
        y, new[name] = unit_apply(params[name], state[name], y, **options, train=train)
    if "shortcut" in params:
        options = {"stride": stride, "padding": padding}
        x, new["shortcut"] = unit_apply(
            params["shortcut"], state["shortcut"], x, **options, train=train
        )
    return relu(x + y), new


def unit_init(key: Array, in_dim: int, out_dim: int, kernel: int) -> tuple[PyTree, PyTree]:
    conv = conv2d_init(key, in_dim, out_dim, kernel, bias=False, init=he_normal)
    norm, state = batch_norm_init(out_dim)
    return {"conv": conv, "norm": norm}, state


def unit_apply(
    params: PyTree,
    state: PyTree,
    x: Float[Array, "batch height width in_dim"],
    *,
    train: bool,
    stride: int = 1,
    padding: str | int = "SAME",
) -> tuple[Float[Array, "batch out_height out_width out_dim"], PyTree]:
    """A convolution and its batch norm, which would cancel a bias."""
    if padding == "torch":
        padding = params["conv"]["weight"].shape[0] // 2
    x = conv2d(params["conv"], x, stride=stride, padding=padding)
    return batch_norm(params["norm"], state, x, train=train)
