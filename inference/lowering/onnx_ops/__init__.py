"""The table of ONNX: {name of an op under `@op`, or of a primitive: function(target, *operands, **parameters) -> result}.

To add an op, write its function in one of the files and name it in that file's TABLE.
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

FILES = [activations, attention, control, convolutions, cumulative, elementwise, gathering, integers]
FILES += [layers, products, reductions, scattering, shapes, sorting, special, windows]
TABLE = {name: function for file in FILES for name, function in file.TABLE.items()}
