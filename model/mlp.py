"""A multilayer perceptron over the flattened input."""

import inspect
import math
from collections.abc import Callable
from itertools import pairwise

import jax
from jaxtyping import Array, Float, Num, PyTree

from model.base import Model
from model.checks import check_widths
from model.layers import activations
from model.layers.dropout import dropout as drop
from model.layers.dropout import split_key
from model.layers.linear import linear, linear_init
from utils.forms import Count, Fraction, checked


@checked
def mlp(
    input_shape: tuple[Count, ...],
    num_classes: Count,
    dims: tuple[Count, ...] = (128, 128),
    activation: str = "relu",
    dropout: Fraction = 0.0,
) -> Model:
    """Hidden layers of the widths `dims`, each with activation and dropout, then a linear layer."""
    check_widths("input_shape", input_shape)
    check_widths("dims", dims)
    act = activation_named(activation)

    def init(key: Array) -> tuple[PyTree, PyTree]:
        *hidden, head = jax.random.split(key, len(dims) + 1)
        shapes = pairwise((math.prod(input_shape), *dims))
        params = {
            "hidden": [linear_init(k, a, b) for k, (a, b) in zip(hidden, shapes, strict=True)],
            "head": linear_init(head, dims[-1], num_classes),
        }
        return params, {}

    def apply(
        params: PyTree,
        state: PyTree,
        x: Num[Array, "batch *shape"],
        *,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Float[Array, "batch classes"], PyTree]:
        x = x.reshape(x.shape[0], -1)
        for layer, k in zip(params["hidden"], split_key(key, len(dims)), strict=True):
            x = drop(k, act(linear(layer, x)), dropout, train=train)
        return linear(params["head"], x), state

    return Model(init, apply)


def activation_named(name: str) -> Callable[[Array], Array]:
    """The public function of this name in model/layers/activations.py."""
    by_name = {
        n: f
        for n, f in vars(activations).items()
        if inspect.isfunction(f) and f.__module__ == activations.__name__ and not n.startswith("_")
    }
    if name not in by_name:
        raise ValueError(f"activation: no activation {name!r}; choose from: {', '.join(by_name)}")
    return by_name[name]
