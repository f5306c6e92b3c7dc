"""The protocol of a model."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Array, PyTree


class Apply(Protocol):
    """The forward pass of a model: (output, state)."""

    def __call__(
        self,
        params: PyTree,
        state: PyTree,
        x: PyTree,
        *,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[PyTree, PyTree]: ...


class Model(NamedTuple):
    """Two functions over two trees: the trained `params` and the running statistics `state`.

    `state` is {} for a model without running statistics. What is in state["frozen"], if there is
    such a key, is changed by no step and held by no checkpoint: it comes from
    `training.pretrained`, also when a run is resumed.
    """

    init: Callable[[Array], tuple[PyTree, PyTree]]  # key -> (params, state)
    apply: Apply
    # for a decoder of text: (batch size, tokens) -> a state with an empty cache, with which `apply`
    # continues the texts that it has read
    cache: Callable[..., PyTree] | None = None
    # for a model that adds to a frozen one, as `lora` does: the plain model, and
    # merge(params, state) -> (params, state) of the plain model that computes the same
    base: "Model | None" = None
    merge: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] | None = None
    # for such a model: (params, state with the weights of training.pretrained) -> the params with
    # which a new run begins; None if they do not depend on these weights
    start: Callable[[PyTree, PyTree], PyTree] | None = None
    # for a model whose x is not that of the data, such as `unet`: () -> the shapes of one example
    inputs: Callable[[], PyTree] | None = None
    # for a model whose first weights depend on the data, as in `airbench`: (params, state, NumPy
    # array of preprocessed training inputs) -> (params, state) with which a new run begins
    fit: Callable[[PyTree, PyTree, np.ndarray], tuple[PyTree, PyTree]] | None = None
    # for a model whose inputs hold codes that lower precision would round to others, as in
    # `tabular`: a run in bfloat16 passes them unchanged, and the model casts the other inputs
    exact_inputs: bool = False
