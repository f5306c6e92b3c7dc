"""MobileNet v3 (Howard et al., 2019): an image network of few operations, for phones."""

from typing import Literal, NamedTuple

import jax
from jaxtyping import Array, Float, PyTree

from model.base import Model
from model.checks import check_image
from model.layers.activations import hard_sigmoid, hard_swish, relu
from model.layers.conv import conv2d, conv2d_init
from model.layers.dropout import dropout as drop
from model.layers.initializers import he_normal
from model.layers.linear import linear, linear_init
from model.layers.norm import batch_norm, batch_norm_init
from model.layers.pool import global_avg_pool
from utils.forms import Count, Fraction, Positive, checked

STEM = 16  # channels


class Block(NamedTuple):
    """One inverted residual: its kernel, the channels inside and after it, whether it weighs its
    channels (squeeze and excite), whether it has hard swish instead of relu, and its stride."""

    kernel: int
    inner: int
    out: int
    weighs: bool
    hard: bool
    stride: int


# Tables 1 and 2 of the paper.
LARGE = (
    Block(3, 16, 16, False, False, 1),
    Block(3, 64, 24, False, False, 2),
    Block(3, 72, 24, False, False, 1),
    Block(5, 72, 40, True, False, 2),
    *[Block(5, 120, 40, True, False, 1)] * 2,
    Block(3, 240, 80, False, True, 2),
    Block(3, 200, 80, False, True, 1),
    *[Block(3, 184, 80, False, True, 1)] * 2,
    Block(3, 480, 112, True, True, 1),
    Block(3, 672, 112, True, True, 1),
    Block(5, 672, 160, True, True, 2),
    *[Block(5, 960, 160, True, True, 1)] * 2,
)
SMALL = (
    Block(3, 16, 16, True, False, 2),
    Block(3, 72, 24, False, False, 2),
    Block(3, 88, 24, False, False, 1),
    Block(5, 96, 40, True, True, 2),
    *[Block(5, 240, 40, True, True, 1)] * 2,
    Block(5, 120, 48, True, True, 1),
    Block(5, 144, 48, True, True, 1),
    Block(5, 288, 96, True, True, 2),
    *[Block(5, 576, 96, True, True, 1)] * 2,
)
SIZES = {"small": (SMALL, 1024), "large": (LARGE, 1280)}  # and the width of the hidden layer


@checked
def mobilenet(
    input_shape: tuple[int, ...],
    num_classes: Count,
    size: Literal["small", "large"] = "small",
    width: Positive = 1.0,
    large_images: bool = False,
    dropout: Fraction = 0.0,
) -> Model:
    """The small or the large version, with `width` times as many channels everywhere.

    `large_images` halves the size of the image five times, as the paper does. Without it, the first
    two of these strides are left out, so that an image of 32 x 32 pixels ends as 4 x 4.
    """
    check_image(input_shape)
    plan, hidden = plan_of(size, width, large_images)
    stem_width = rounded(STEM * width)
    last = 6 * plan[-1].out

    def init(key: Array) -> tuple[PyTree, PyTree]:
        stem_key, last_key, hidden_key, head_key, *keys = jax.random.split(key, len(plan) + 4)
        stem, stem_state = unit_init(stem_key, input_shape[-1], stem_width, 3)
        before = [stem_width, *(block.out for block in plan)]
        pairs = [block_init(*args) for args in zip(keys, before, plan, strict=False)]
        final, final_state = unit_init(last_key, plan[-1].out, last, 1)
        params = {
            "stem": stem,
            "blocks": [params for params, _ in pairs],
            "last": final,
            "hidden": linear_init(hidden_key, last, hidden),
            "head": linear_init(head_key, hidden, num_classes),
        }
        states = [state for _, state in pairs]
        return params, {"stem": stem_state, "blocks": states, "last": final_state}

    def apply(
        params: PyTree,
        state: PyTree,
        x: Float[Array, "batch height width channels"],
        *,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Float[Array, "batch classes"], PyTree]:
        new, stride = {"blocks": []}, 2 if large_images else 1
        x, new["stem"] = unit(params["stem"], state["stem"], x, stride=stride, train=train)
        x = hard_swish(x)
        for own, own_state, block in zip(params["blocks"], state["blocks"], plan, strict=True):
            x, own_state = block_apply(own, own_state, x, block, train=train)
            new["blocks"].append(own_state)
        x, new["last"] = unit(params["last"], state["last"], x, train=train)
        x = hard_swish(linear(params["hidden"], global_avg_pool(hard_swish(x))))
        return linear(params["head"], drop(key, x, dropout, train=train)), new

    return Model(init, apply)


def plan_of(size: str, width: float, large_images: bool) -> tuple[list[Block], int]:
    """(the blocks, the width of the hidden layer)."""
    blocks, hidden = SIZES[size]
    plan, first = [], next(i for i, block in enumerate(blocks) if block.stride == 2)
    for i, block in enumerate(blocks):
        stride = 1 if i == first and not large_images else block.stride
        inner, out = rounded(block.inner * width), rounded(block.out * width)
        plan.append(block._replace(inner=inner, out=out, stride=stride))
    return plan, rounded(hidden * width)


def rounded(channels: float) -> int:
    """The multiple of 8 that is nearest, but not less than nine tenths."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest


def block_init(key: Array, in_dim: int, block: Block) -> tuple[PyTree, PyTree]:
    k1, k2, k3, k4, k5 = jax.random.split(key, 5)
    units = {
        "depthwise": unit_init(k2, block.inner, block.inner, block.kernel, groups=block.inner),
        "project": unit_init(k3, block.inner, block.out, 1),
    }
    if block.inner != in_dim:
        units["expand"] = unit_init(k1, in_dim, block.inner, 1)
    params = {name: params for name, (params, _) in units.items()}
    if block.weighs:
        few = rounded(block.inner // 4)
        params["reduce"] = linear_init(k4, block.inner, few)
        params["restore"] = linear_init(k5, few, block.inner)
    return params, {name: state for name, (_, state) in units.items()}


def block_apply(
    params: PyTree,
    state: PyTree,
    x: Float[Array, "batch height width in_dim"],
    block: Block,
    *,
    train: bool,
) -> tuple[Float[Array, "batch out_height out_width out_dim"], PyTree]:
    """(x after an inverted residual, the statistics): more channels, a convolution within each of
    them, weights of the channels, fewer channels; x is added where the shape is the same."""
    act, new, y = hard_swish if block.hard else relu, {}, x
    if "expand" in params:
        y, new["expand"] = unit(params["expand"], state["expand"], y, train=train)
        y = act(y)
    y, new["depthwise"] = unit(
        params["depthwise"], state["depthwise"], y, stride=block.stride, train=train
    )
    y = act(y)
    if block.weighs:
        weight = linear(params["restore"], relu(linear(params["reduce"], global_avg_pool(y))))
        y = y * hard_sigmoid(weight)[:, None, None]
    y, new["project"] = unit(params["project"], state["project"], y, train=train)
    return (x + y if x.shape == y.shape else y), new


def unit_init(
    key: Array, in_dim: int, out_dim: int, kernel: int, groups: int = 1
) -> tuple[PyTree, PyTree]:
    conv = conv2d_init(key, in_dim, out_dim, kernel, groups=groups, bias=False, init=he_normal)
    norm, state = batch_norm_init(out_dim)
    return {"conv": conv, "norm": norm}, state


def unit(
    params: PyTree,
    state: PyTree,
    x: Float[Array, "batch height width in_dim"],
    *,
    stride: int = 1,
    train: bool,
) -> tuple[Float[Array, "batch out_height out_width out_dim"], PyTree]:
    """A convolution, padded alike on both sides, and its batch norm, which would cancel a bias."""
    padding = params["conv"]["weight"].shape[0] // 2
    x = conv2d(params["conv"], x, stride=stride, padding=padding)
    return batch_norm(params["norm"], state, x, train=train, eps=1e-3)
