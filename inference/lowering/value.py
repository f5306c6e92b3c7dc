"""Values of the walk: constants, and handles of what the target will compute."""

import jax
import numpy as np


class Value:
    """An array of the jaxpr: `shape` and `dtype` as the jaxpr has them, symbolic sizes included.

    `data` is an array (a constant) or the target's own handle. Its shape, `data_shape`, may have 1
    where `shape` has more: a broadcast is only carried out where an op needs it.
    """

    def __init__(self, data, shape, dtype, *, name="", data_shape=None, origin=None):
        self.data, self.shape = data, tuple(shape)
        self.dtype = dtype if is_key(dtype) else np.dtype(dtype)
        self.name = name  # the tree path of a weight
        self.data_shape = self.shape if data_shape is None else tuple(data_shape)
        self.origin = origin  # (the equation that computed it, its operands)
        self.uses = 0  # how many equations read it; a value with other readers is not folded away

    @property
    def constant(self):
        is_key_array = isinstance(self.data, jax.Array) and is_key(self.dtype)
        return isinstance(self.data, np.ndarray) or is_key_array

    def __repr__(self):
        return f"Value({self.name or self.data}, {self.dtype}{list(self.shape)})"


def constant(array, name=""):
    """A Value for an array that is known now; a weight has a name."""
    array = on_host(array)
    return Value(array, array.shape, array.dtype, name=name)


def joint_shape(shapes):
    """The broadcast of shapes of the same rank."""
    return tuple(next((d for d in dims if not is_one(d)), 1) for dims in zip(*shapes, strict=True))


def is_one(dimension):
    return isinstance(dimension, int) and dimension == 1


def on_host(array):
    """A NumPy array; random keys, which NumPy does not support, stay JAX arrays."""
    return array if is_key(getattr(array, "dtype", None)) else np.asarray(array)


def is_key(dtype):
    return jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def broadcast(array, shape):
    """A constant array broadcast to a shape."""
    return (jax.numpy if is_key(array.dtype) else np).broadcast_to(array, shape)
