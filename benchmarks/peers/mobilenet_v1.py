"""MobileNet v1 (Howard et al., 2017) for small images, as a user of Rawtree's layers writes it."""

import jax

from model.base import Model
from model.layers.activations import relu
from model.layers.conv import conv2d, conv2d_init
from model.layers.initializers import he_normal
from model.layers.linear import linear, linear_init
from model.layers.norm import batch_norm, batch_norm_init
from model.layers.pool import global_avg_pool


def mobilenet_v1(input_shape, num_classes, plan) -> Model:
    """A 3x3 convolution of the first width, then one block per (width, stride) of the plan: a
    depthwise 3x3 and a 1x1 convolution. Each has its batch norm and relu."""
    width = plan[0][0]
    units = [(input_shape[-1], width, 3, 1, 1)]  # in, out, kernel, groups, stride
    for out, stride in plan:
        units += [(width, width, 3, width, stride), (width, out, 1, 1, 1)]
        width = out

    def init(key):
        *keys, head_key = jax.random.split(key, len(units) + 1)
        params, state = [], []
        for k, (in_dim, out_dim, kernel, groups, _) in zip(keys, units, strict=True):
            options = {"groups": groups, "bias": False, "init": he_normal}
            norm, statistics = batch_norm_init(out_dim)
            params.append(
                {"conv": conv2d_init(k, in_dim, out_dim, kernel, **options), "norm": norm}
            )
            state.append(statistics)
        return {"units": params, "head": linear_init(head_key, width, num_classes)}, {
            "units": state
        }

    def apply(params, state, x, *, train=False, key=None):
        new = []
        for unit, before, (*_, stride) in zip(params["units"], state["units"], units, strict=True):
            x = conv2d(unit["conv"], x, stride=stride)
            x, after = batch_norm(unit["norm"], before, x, train=train)
            x = relu(x)
            new.append(after)
        return linear(params["head"], global_avg_pool(x)), {"units": new}

    return Model(init, apply)
