"""What the walk asks of TensorFlow: tensors of the running tf.function, with a batch whose size the graph seldom needs."""

import operator

import jax
import numpy as np
import tensorflow as tf

from inference.lowering.dims import evaluate
from inference.lowering.tf_ops.elementwise import NARROW
from inference.lowering.tf_ops.pending import Pending, solid
from inference.lowering.walk import Missing
from utils import first_line

TYPES = {"float32", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "bool"}

SIZES = {
    name: getattr(operator, name) for name in ("neg", "add", "sub", "mul", "pow", "floordiv", "mod")
}
SIZES |= {"number": np.int32, "max": tf.maximum, "min": tf.minimum}


class Target:
    """Computes with tensors; constants stay arrays until an op takes them.

    What JAX holds in float16 or bfloat16 is held in float32 here, as most ops of TFLite take nothing narrower; it is rounded
    where the model asks for it by a conversion.
    `products`: means over few channels as products, which is faster, but not fit for int8.
    """

    def __init__(self, layers, table, inputs, products=True):
        self.layers = {name: self.guarded(name, function) for name, function in layers.items()}
        self.table = {name: self.guarded(name, function) for name, function in table.items()}
        self.inputs = inputs  # (shape, tensor), of which the graph reads the size of the batch where it must know it
        self.products = products

    def operand(self, value):
        if isinstance(value.data, Pending) and value.uses > 1 and not value.data.shared:
            value.data = value.data.tensor()
        return (
            value.data.astype(np.float32)
            if value.constant and value.dtype.name in NARROW
            else value.data
        )

    def whole(self, value):
        """A tensor of all numbers of a Value, nothing pending, nothing left to broadcast."""
        return solid(self.walk.whole(value))

    def expanded(self, value):
        return tf.broadcast_to(solid(self.operand(value)), self.sizes(value.shape))

    def held(self, avals):
        """Shapes and types as they are held here."""
        return [
            jax.ShapeDtypeStruct(aval.shape, np.float32) if aval.dtype.name in NARROW else aval
            for aval in avals
        ]

    def new_sizes(self, shape):
        """A shape for tf.reshape: -1 for the one dimension that is free, so that nothing is computed for it."""
        free = [d for d in shape if not isinstance(d, int)]
        return (
            [d if isinstance(d, int) else -1 for d in shape]
            if len(free) <= 1
            else self.sizes(shape)
        )

    def sizes(self, shape):
        """A shape for the ops that take no -1."""
        if all(isinstance(d, int) for d in shape):
            return np.array(shape, np.int32)
        return tf.stack([self.size(d) for d in shape])

    def size(self, dimension):
        """A dimension as a number, or a tensor of one."""
        if isinstance(dimension, int):
            return np.int32(dimension)
        return evaluate(dimension, lambda _: self.batch(), SIZES)

    def batch(self):
        """The size of the batch, the one symbol there is, read from an input."""
        return next(
            tf.shape(tensor)[0]
            for shape, tensor in self.inputs
            if shape and not isinstance(shape[0], int)
        )

    def guarded(self, name, function):
        """A function of the table; what TensorFlow refuses of it, as a rank that an op has not, is as good as missing."""

        def call(target, *operands, **params):
            for aval in self.out:
                if aval.dtype.name not in TYPES | NARROW:
                    self.refuse(name, f"of {aval.dtype}")
            self.out = self.held(self.out)
            if not getattr(function, "folds", False):
                operands, params = jax.tree.map(
                    solid, (operands, params), is_leaf=lambda x: isinstance(x, Pending)
                )
            try:
                return function(target, *operands, **params)
            except (TypeError, ValueError, tf.errors.OpError) as error:
                if not is_refusal(error):
                    raise
                raise Missing(f"{name}: {first_line(error)}", self.walk.place) from error

        return call

    def refuse(self, name, what):
        """Of a primitive that the table has, a kind that it has not."""
        raise Missing(f"{name} {what}", self.walk.place)


def is_refusal(error):
    """Whether it is TensorFlow that raised the error; others are bugs of ours."""
    if isinstance(error, tf.errors.OpError):
        return True
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__", "").startswith("tensorflow.")
