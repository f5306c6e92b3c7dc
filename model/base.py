"""The protocol of a model."""

from collections.abc import Callable
from typing import NamedTuple


class Model(NamedTuple):
    """Two functions over two trees: `params` are trained, `state` holds running statistics ({} without any)."""

    init: Callable  # key -> (params, state)
    apply: Callable  # (params, state, x, *, train=False, key=None) -> (out, state)
