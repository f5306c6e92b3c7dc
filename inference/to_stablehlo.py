"""Write a model as StableHLO: the file that `jax.export.deserialize` reads, on any platform.

    import jax
    call = jax.export.deserialize(open("model.stablehlo", "rb").read()).call
    logits = call(images)

Its input is an array, or a dict of arrays where there are several; so is its output.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import PyTree

from inference.lowering.trace import of_batch, place, symbol
from training.checkpoint.probe import host
from utils import UserError, first_line
from utils.files import atomic_write

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def write_stablehlo(
    function: Callable[[PyTree, PyTree], PyTree],
    weights: PyTree,
    inputs: PyTree,
    batch: int | None,
    path: Path,
) -> None:
    """Write (weights, inputs) -> outputs with the weights as constants; see `trace`."""
    with jax.default_device(host()):
        weights = jax.tree.map(jnp.asarray, weights)  # a traced number cannot index NumPy arrays

    def serialized(size: Any) -> bytearray:
        shapes = of_batch(inputs, size)
        if isinstance(shapes, dict):  # JAX serializes no other kind of mapping
            shapes = dict(shapes)
        return export.export(jax.jit(call), platforms=PLATFORMS)(shapes).serialize()

    def call(inputs: PyTree) -> PyTree:
        outputs = function(weights, inputs)
        return dict(outputs) if isinstance(outputs, dict) else outputs

    try:
        data = serialized(symbol(inputs) if batch is None else batch)
    except Exception as error:  # the user's code may raise anything
        message = f"JAX cannot export the model: {first_line(error)} ({place(error)})"
        if batch is None:
            with suppress(Exception):
                serialized(2)
                message += "; set the batch size with --batch N"
        raise UserError(message) from error
    atomic_write(path, data)
