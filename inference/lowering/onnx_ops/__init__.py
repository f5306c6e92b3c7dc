"""The tables of ONNX: {name: function(target, *operands, **params) -> result}.

LAYERS holds the ops marked `@op`, PRIMITIVES those of JAX. To add an op, write its function in one
of the files and add it to the LAYERS of that file.
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
    recurrent,
    reductions,
    scattering,
    shapes,
    sorting,
    special,
    windows,
)

WITH_LAYERS = [activations, attention, convolutions, layers, recurrent, reductions, windows]
WITH_PRIMITIVES = [control, convolutions, cumulative, elementwise, gathering, integers]
WITH_PRIMITIVES += [products, reductions, scattering, shapes, sorting, special, windows]
LAYERS = {name: function for file in WITH_LAYERS for name, function in file.LAYERS.items()}
PRIMITIVES = {
    name: function for file in WITH_PRIMITIVES for name, function in file.PRIMITIVES.items()
}
