"""The protocol of a model."""

from collections.abc import Callable
from typing import NamedTuple


class Model(NamedTuple):
    """Two functions over two trees: the trained `params` and the running statistics `state`.

    `state` is {} for a model without running statistics.
    """

    init: Callable  # key -> (params, state)
    apply: Callable  # (params, state, x, *, train=False, key=None) -> (out, state)
    # of a decoder of text: (batch size, tokens) -> a state with an empty cache, with which `apply`
    # continues the texts that it has read
    cache: Callable | None = None
