"""Products of arrays along any of their axes."""

import numpy as np


def dot_general(t, x, y, *, dimension_numbers, preferred_element_type=None, **_):
    """One product of matrices for each index that both operands share."""
    (x_sums, y_sums), (x_shared, y_shared) = dimension_numbers
    dtype = t.out[0].dtype
    x, y = t.cast(x, computed(dtype)), t.cast(y, computed(dtype))
    x_free = [axis for axis in range(len(x.shape)) if axis not in (*x_sums, *x_shared)]
    y_free = [axis for axis in range(len(y.shape)) if axis not in (*y_sums, *y_shared)]
    if is_plain(x, y, dimension_numbers):
        product = t.MatMul(x, y)  # (..., K) times (K, N) needs no other form
    else:
        left = matrices(t, x, x_shared, x_free, x_sums)  # (shared..., M, K)
        right = matrices(t, y, y_shared, y_sums, y_free)  # (shared..., K, N)
        product = t.MatMul(left, right)
        if len(x_free) != 1 or len(y_free) != 1:
            product = t.reshape(product, t.out[0].shape)
    return product if computed(dtype) == dtype else t.to(product, dtype)


def computed(dtype):
    """The type of a product in ONNX Runtime; it knows no small integers."""
    return np.dtype(np.int32) if dtype.kind in "biu" and dtype.itemsize < 4 else dtype


def is_plain(x, y, dimension_numbers):
    """Whether it is a product over the last axis of x and the first of a matrix y."""
    (x_sums, y_sums), (shared, _) = dimension_numbers
    last = (len(x.shape) - 1,)
    return (
        not shared
        and tuple(x_sums) == last
        and tuple(y_sums) == (0,)
        and len(y.shape) == 2
        and len(x.shape) > 1
    )


def matrices(t, x, shared, rows, columns):
    """x as one matrix for each index of the shared axes."""
    turned = t.transpose(x, (*shared, *rows, *columns))
    if len(rows) == len(columns) == 1:
        return turned
    sizes = [x.shape[axis] for axis in shared]
    return t.reshape(turned, (*sizes, merged(x, rows), merged(x, columns)))


def merged(x, axes):
    size = 1
    for axis in axes:
        size = size * x.shape[axis]
    return size


PRIMITIVES = {"dot_general": dot_general}
