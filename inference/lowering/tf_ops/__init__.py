"""The tables of TFLite: {name: function(target, *operands, **params) -> result in TensorFlow}.

LAYERS holds the ops marked `@op`, PRIMITIVES those of JAX. Every TensorFlow op used here must have
a TFLite builtin. Importing this package imports TensorFlow.
"""

from inference.lowering.tf_ops import (
    control,
    elementwise,
    layers,
    products,
    reductions,
    shapes,
)

WITH_LAYERS = [elementwise, layers]
WITH_PRIMITIVES = [control, elementwise, products, reductions, shapes]
LAYERS = {name: function for file in WITH_LAYERS for name, function in file.LAYERS.items()}
PRIMITIVES = {
    name: function for file in WITH_PRIMITIVES for name, function in file.PRIMITIVES.items()
}
