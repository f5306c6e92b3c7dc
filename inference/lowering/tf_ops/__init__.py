"""What TensorFlow computes for each op of a layer and each primitive: {name: function(target, *operands, **parameters)}.

Every op must have a builtin of TFLite behind it. Importing this imports TensorFlow.
"""

from inference.lowering.tf_ops import (
    activations,
    attention,
    control,
    elementwise,
    indexing,
    layers,
    norms,
    products,
    reductions,
    shapes,
    special,
    windows,
)

LAYERS = (layers, norms, activations, attention)
PRIMITIVES = (elementwise, special, shapes, indexing, reductions, products, windows, control)
TABLE = {name: function for module in (*PRIMITIVES, *LAYERS) for name, function in module.TABLE.items()}
