"""Write a model as StableHLO: the file that `jax.export.deserialize` reads, on any platform.

    import jax
    call = jax.export.deserialize(open("model.stablehlo", "rb").read()).call
    logits = call(images)

Its input is an array, or a dict of arrays where there are several; so is its output.
"""

import jax
from jax import export

from file_io import atomic_write
from inference.lowering.trace import of_batch, place, symbol
from utils import UserError, first_line

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def write_stablehlo(function, weights, inputs, batch, path):
    """Write (weights, inputs) -> outputs with the weights as constants; see `trace`."""
    shapes = of_batch(inputs, symbol(inputs) if batch is None else batch)
    if isinstance(shapes, dict):  # JAX serializes no other kind of mapping
        shapes = dict(shapes)

    def call(inputs):
        outputs = function(weights, inputs)
        return dict(outputs) if isinstance(outputs, dict) else outputs

    try:
        exported = export.export(jax.jit(call), platforms=PLATFORMS)(shapes)
        data = exported.serialize()
    except Exception as error:  # the user's code may raise anything
        fix = "; set the batch size with --batch N" if batch is None else ""
        message = f"JAX cannot export the model: {first_line(error)} ({place(error)}){fix}"
        raise UserError(message) from error
    atomic_write(path, data)
