"""Products of arrays over any of their axes."""

import numpy as np

from inference.lowering.onnx_ops.dims import product


def dot_general(t, x, y, *, dimension_numbers, preferred_element_type=None, **_):
    """One matrix product per index of the axes that both operands share."""
    (x_sums, y_sums), (x_shared, y_shared) = dimension_numbers
    dtype = t.out[0].dtype
    x, y = t.cast(x, computed(dtype)), t.cast(y, computed(dtype))
    x_free = [axis for axis in range(len(x.shape)) if axis not in (*x_sums, *x_shared)]
    y_free = [axis for axis in range(len(y.shape)) if axis not in (*y_sums, *y_shared)]
    if is_plain(x, y, dimension_numbers):
        result = t.MatMul(x, y)  # (..., K) times (K, N)
    else:
        left = matrices(t, x, x_shared, x_free, x_sums)  # (shared..., M, K)
        right = matrices(t, y, y_shared, y_sums, y_free)  # (shared..., K, N)
        result = t.MatMul(left, right)
        if len(x_free) != 1 or len(y_free) != 1:
            result = t.reshape(result, t.out[0].shape)
    return result if computed(dtype) == dtype else t.to(result, dtype)


def computed(dtype):
    """The dtype of a product in ONNX Runtime, which has none for small integers."""
    return np.dtype(np.int32) if dtype.kind in "biu" and dtype.itemsize < 4 else dtype


def is_plain(x, y, dimension_numbers):
    """Whether the product is over the last axis of x and the first axis of a matrix y."""
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
    """x as one matrix per index of the shared axes."""
    matrix = t.transpose(x, (*shared, *rows, *columns))
    if len(rows) == len(columns) == 1:
        return matrix
    shape = [x.shape[axis] for axis in shared]
    shape += [product(x.shape[axis] for axis in axes) for axes in (rows, columns)]
    return t.reshape(matrix, shape)


PRIMITIVES = {"dot_general": dot_general}
