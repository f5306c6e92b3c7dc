"""The residual network for small images (He et al., 2015, section 4.2), without max pooling."""

from functools import partial
from itertools import pairwise
from operator import itemgetter

import jax

from model.base import Model
from model.checks import Count, Depth, check_image, check_widths, checked
from model.layers.activations import relu
from model.layers.blocks import apply_blocks, blocks_init, check_blocks, equal_runs, joined
from model.layers.conv import conv2d, conv2d_init
from model.layers.initializers import he_normal
from model.layers.linear import linear, linear_init
from model.layers.norm import batch_norm, batch_norm_init
from model.layers.pool import global_avg_pool


@checked
def resnet(
    input_shape: tuple[int, ...],
    num_classes: Count,
    widths: tuple[Count, ...] = (16, 32, 64),
    depth: Depth = 3,
    remat: str | None = None,
    scan: bool = False,
) -> Model:
    """`depth` blocks of two convolutions per width; each later width halves the image size.

    Blocks whose names (`blocks/0` and so on) match the regex `remat` are recomputed in the
    backward pass to save memory. `scan` compiles one block for all blocks of a width that have the
    same shapes.
    """
    check_image(input_shape)
    check_widths("widths", widths)
    plan = []  # (in, out, stride) of each block
    for stage, (a, b) in enumerate(pairwise((widths[0], *widths))):
        plan += [(a, b, 2 if stage > 0 else 1)] + [(b, b, 1)] * (depth - 1)
    check_blocks(remat, plan, scan)

    def init(key):
        stem_key, head_key, *block_keys = jax.random.split(key, len(plan) + 2)
        stem, stem_state = unit_init(stem_key, input_shape[-1], widths[0], 3)
        pairs = blocks_init(block_keys, plan, block_init, scan)
        blocks, block_states = (
            jax.tree.map(itemgetter(i), pairs, is_leaf=lambda pair: isinstance(pair, tuple))
            for i in range(2)
        )
        head = linear_init(head_key, widths[-1], num_classes)
        params = {"stem": stem, "blocks": blocks, "head": head}
        return params, {"stem": stem_state, "blocks": block_states}

    def apply(params, state, x, *, train=False, key=None):
        x, stem_state = unit_apply(params["stem"], state["stem"], x, train=train)
        x, new_states = relu(x), []
        blocks, states = params["blocks"], state["blocks"]
        for numbers, (_, _, stride) in equal_runs(plan):
            block = partial(block_apply, stride=stride, train=train)
            x, new = apply_blocks(block, numbers, blocks, x, states, remat=remat)
            new_states.append(new)
        x = linear(params["head"], global_avg_pool(x))
        return x, {"stem": stem_state, "blocks": joined(new_states)}

    return Model(init, apply)


def block_init(key, in_dim, out_dim, stride):
    k1, k2, k3 = jax.random.split(key, 3)
    units = {
        "first": unit_init(k1, in_dim, out_dim, 3),
        "second": unit_init(k2, out_dim, out_dim, 3),
    }
    if stride != 1 or in_dim != out_dim:
        units["shortcut"] = unit_init(k3, in_dim, out_dim, 1)
    params = {name: unit[0] for name, unit in units.items()}
    return params, {name: unit[1] for name, unit in units.items()}


def block_apply(params, x, state, *, stride, train):
    """(relu(x + two convolutions of x), the statistics). Where the shape changes, x passes a 1x1
    convolution."""
    y, first = unit_apply(params["first"], state["first"], x, stride=stride, train=train)
    y, second = unit_apply(params["second"], state["second"], relu(y), train=train)
    new = {"first": first, "second": second}
    if "shortcut" in params:
        x, new["shortcut"] = unit_apply(
            params["shortcut"], state["shortcut"], x, stride=stride, train=train
        )
    return relu(x + y), new


def unit_init(key, in_dim, out_dim, kernel):
    conv = conv2d_init(key, in_dim, out_dim, kernel, bias=False, init=he_normal)
    norm, state = batch_norm_init(out_dim)
    return {"conv": conv, "norm": norm}, state


def unit_apply(params, state, x, *, train, stride=1):
    """A convolution and its batch norm, which would cancel a bias."""
    return batch_norm(params["norm"], state, conv2d(params["conv"], x, stride=stride), train=train)
