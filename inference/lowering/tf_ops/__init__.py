"""The tables of TFLite: {name: function(target, *operands, **params) -> result in TensorFlow}.

LAYERS holds the ops marked `@op`, PRIMITIVES those of JAX. Every TensorFlow op used here must have
a TFLite builtin. Importing this package imports TensorFlow.
"""

from inference.lowering.tf_ops import (
    activations,
    attention,
    bits,
    comparisons,
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

WITH_LAYERS = [layers, norms, activations, attention]
WITH_PRIMITIVES = [elementwise, comparisons, bits, special, shapes, indexing]
WITH_PRIMITIVES += [reductions, products, windows, control]
LAYERS = {name: function for file in WITH_LAYERS for name, function in file.LAYERS.items()}
PRIMITIVES = {
    name: function for file in WITH_PRIMITIVES for name, function in file.PRIMITIVES.items()
}
