"""Logical ops and bitwise ops."""

import numpy as np


def bitwise(logical, op):
    """`logical` for booleans, `op` for integers."""

    def function(t, *operands, **_):
        return t.add(logical if operands[0].dtype == bool else op, *operands)

    return function


def shift(direction):
    """ONNX shifts unsigned integers only."""

    def function(t, x, count, **_):
        unsigned = np.dtype(f"uint{max(32, 8 * x.dtype.itemsize)}")
        same_size = np.dtype(f"uint{8 * x.dtype.itemsize}")
        bits = t.cast(t.cast(x, same_size), unsigned)
        return t.to(t.BitShift(bits, t.cast(count, unsigned), direction=direction), t.out[0].dtype)

    return function


def shift_right_arithmetic(t, x, count, **_):
    """Shifts the complement of a negative number, so that it keeps its sign."""
    if x.dtype.kind == "u":
        return shift("RIGHT")(t, x, count)
    wider = t.cast(x, np.int64)
    is_negative = t.Less(wider, np.int64(0))
    positive = t.Where(is_negative, t.BitwiseNot(wider), wider)
    bits = t.to(positive, np.uint64)
    shifted = t.to(t.BitShift(bits, t.cast(count, np.uint64), direction="RIGHT"), np.int64)
    return t.to(t.Where(is_negative, t.BitwiseNot(shifted), shifted), t.out[0].dtype)


def population_count(t, x, **_):
    """The sum of all bits, each shifted to the lowest position."""
    size = 8 * x.dtype.itemsize
    bits = t.to(t.cast(x, np.dtype(f"uint{size}")), np.uint64)
    bits = t.Unsqueeze(bits, np.array([-1]))
    shifted = t.BitShift(bits, np.arange(size, dtype=np.uint64), direction="RIGHT")
    ones = t.to(t.BitwiseAnd(shifted, np.uint64(1)), np.int64)
    return t.to(t.ReduceSum(ones, np.array([-1]), keepdims=0), t.out[0].dtype)


PRIMITIVES = {
    "and": bitwise("And", "BitwiseAnd"),
    "or": bitwise("Or", "BitwiseOr"),
    "xor": bitwise("Xor", "BitwiseXor"),
    "not": bitwise("Not", "BitwiseNot"),
    "shift_left": shift("LEFT"),
    "shift_right_logical": shift("RIGHT"),
    "shift_right_arithmetic": shift_right_arithmetic,
    "population_count": population_count,
}
