"""What flows through the walk: constants that are known while exporting, and what the target will compute."""

import numpy as np


class Value:
    """`shape` and `dtype` are the jaxpr's, symbolic dimensions included; `data` is an array, or the target's own handle.

    The data may have 1 where the shape has more, until somebody needs it written out: nothing is broadcast but where it must be.
    """

    def __init__(self, data, shape, dtype, *, name="", held=None, origin=None):
        self.data, self.shape, self.dtype = data, tuple(shape), np.dtype(dtype)
        self.name = name  # of a weight: its tree path
        self.held = self.shape if held is None else tuple(held)  # the shape of the data
        self.origin = origin  # the equation that made it, and its operands
        self.uses = 0  # equations that read it, counted as soon as it is there: what others read, too, is not folded away

    @property
    def constant(self):
        return isinstance(self.data, np.ndarray)

    def __repr__(self):
        return f"Value({self.name or self.data}, {self.dtype}{list(self.shape)})"


def constant(array, name=""):
    """A value that is known; a weight has a name."""
    array = np.asarray(array)
    return Value(array, array.shape, array.dtype, name=name)


def joined(shapes):
    """The shape that arrays of these shapes, of one rank and with 1 where they differ, have together."""
    return tuple(next((d for d in dims if not is_one(d)), 1) for dims in zip(*shapes, strict=True))


def is_one(dimension):
    return isinstance(dimension, int) and dimension == 1
