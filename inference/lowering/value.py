"""What flows through the walk: constants that are known while exporting, and what the target will compute."""

import jax
import numpy as np


class Value:
    """`shape` and `dtype` are the jaxpr's, symbolic dimensions included; `data` is an array, or the target's own handle.

    The data may have 1 where the shape has more, until somebody needs it written out: nothing is broadcast but where it must be.
    """

    def __init__(self, data, shape, dtype, *, name="", held=None, origin=None):
        self.data, self.shape, self.dtype = (
            data,
            tuple(shape),
            dtype if is_key(dtype) else np.dtype(dtype),
        )
        self.name = name  # of a weight: its tree path
        self.held = self.shape if held is None else tuple(held)  # the shape of the data
        self.origin = origin  # the equation that made it, and its operands
        self.uses = 0  # equations that read it, counted as soon as it is there: what others read, too, is not folded away

    @property
    def constant(self):
        return isinstance(self.data, np.ndarray) or (
            isinstance(self.data, jax.Array) and is_key(self.dtype)
        )

    def __repr__(self):
        return f"Value({self.name or self.data}, {self.dtype}{list(self.shape)})"


def constant(array, name=""):
    """A value that is known; a weight has a name."""
    array = known(array)
    return Value(array, array.shape, array.dtype, name=name)


def joined(shapes):
    """The shape that arrays of these shapes, of one rank and with 1 where they differ, have together."""
    return tuple(next((d for d in dims if not is_one(d)), 1) for dims in zip(*shapes, strict=True))


def is_one(dimension):
    return isinstance(dimension, int) and dimension == 1


def known(array):
    """An array on the host; keys of random numbers, which NumPy does not know, stay JAX's."""
    return array if is_key(getattr(array, "dtype", None)) else np.asarray(array)


def is_key(dtype):
    return jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def spread(array, shape):
    """A known array with its whole shape."""
    return (
        jax.numpy.broadcast_to(array, shape)
        if is_key(array.dtype)
        else np.broadcast_to(array, shape)
    )
