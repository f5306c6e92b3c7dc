"""What TensorFlow computes for each op under `@op` and each primitive: {name: function(target, *operands, **parameters)}.

Every op must have a builtin of TFLite behind it. Importing this imports TensorFlow.
"""

from inference.lowering.tf_ops import (
    activations,
    attention,
    bits,
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

WITH_LAYERS = (layers, norms, activations, attention)
WITH_PRIMITIVES = (
    elementwise,
    bits,
    special,
    shapes,
    indexing,
    reductions,
    products,
    windows,
    control,
)
LAYERS = {name: function for module in WITH_LAYERS for name, function in module.LAYERS.items()}
PRIMITIVES = {
    name: function for module in WITH_PRIMITIVES for name, function in module.PRIMITIVES.items()
}
