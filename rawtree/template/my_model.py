"""The model: a network with two hidden layers."""

import jax
from rawtree.model.base import Model
from rawtree.model.layers.activations import gelu
from rawtree.model.layers.linear import linear, linear_init


def small_net(input_shape: tuple[int, ...], num_classes: int, width: int = 64) -> Model:
    """Two hidden layers of one width. The data gives the arguments without a default."""

    def init(key):
        first_key, second_key, head_key = jax.random.split(key, 3)
        params = {
            "first": linear_init(first_key, input_shape[0], width),
            "second": linear_init(second_key, width, width),
            "head": linear_init(head_key, width, num_classes),
        }
        return params, {}  # the weights, and no running statistics

    def apply(params, state, x, *, train=False, key=None):
        x = gelu(linear(params["first"], x))  # (batch, 2) -> (batch, width)
        x = gelu(linear(params["second"], x))
        return linear(params["head"], x), state

    return Model(init, apply)
