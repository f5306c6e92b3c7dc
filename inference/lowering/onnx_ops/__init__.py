"""The tables of ONNX: {name: function(target, *operands, **params) -> result}.

LAYERS holds the ops marked `@op`, PRIMITIVES those of JAX. To add an op, write its function in one
of the files and add it to the LAYERS of that file.
"""

from inference.lowering.onnx_ops import (
    control,
    elementwise,
    layers,
    products,
    reductions,
    shapes,
)

WITH_LAYERS = [elementwise, layers, products, reductions]
WITH_PRIMITIVES = [control, elementwise, products, reductions, shapes]
LAYERS = {name: function for file in WITH_LAYERS for name, function in file.LAYERS.items()}
PRIMITIVES = {
    name: function for file in WITH_PRIMITIVES for name, function in file.PRIMITIVES.items()
}
# uint64 is computed in int64, whose order and quotients are others from 2**63 on
ORDERED = """
    lt le gt ge max min clamp div rem sort top_k argmax argmin reduce_max reduce_min cummax cummin
    reduce_window_max reduce_window_min
"""
PRIMITIVES |= {
    name: elementwise.never_of_uint64(name, PRIMITIVES[name]) for name in ORDERED.split()
}
