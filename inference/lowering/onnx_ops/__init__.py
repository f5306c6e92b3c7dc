"""The tables of ONNX, {name: function(target, *operands, **parameters) -> result}: of ops under `@op`, and of JAX's primitives.

To add an op, write its function in one of the files and name it in that file's LAYERS.
"""

from inference.lowering.onnx_ops import (
    activations,
    attention,
    control,
    convolutions,
    cumulative,
    elementwise,
    gathering,
    integers,
    layers,
    products,
    reductions,
    scattering,
    shapes,
    sorting,
    special,
    windows,
)

WITH_LAYERS = [activations, attention, convolutions, layers, reductions, windows]
WITH_PRIMITIVES = [control, convolutions, cumulative, elementwise, gathering, integers]
WITH_PRIMITIVES += [products, reductions, scattering, shapes, sorting, special, windows]
LAYERS = {name: function for file in WITH_LAYERS for name, function in file.LAYERS.items()}
PRIMITIVES = {
    name: function for file in WITH_PRIMITIVES for name, function in file.PRIMITIVES.items()
}
