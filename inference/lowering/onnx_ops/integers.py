"""Logic, and the bits of integers."""

import numpy as np


def bitwise(logical, op):
    """Of booleans, or of each bit."""

    def function(t, *operands, **_):
        return t.add(logical if operands[0].dtype == bool else op, *operands)

    return function


def shift(direction):
    """ONNX shifts unsigned numbers alone."""

    def function(t, x, count, **_):
        unsigned = np.dtype(f"uint{max(32, 8 * x.dtype.itemsize)}")
        same_size = np.dtype(f"uint{8 * x.dtype.itemsize}")
        bits = t.cast(t.cast(x, same_size), unsigned)
        return t.to(t.BitShift(bits, t.cast(count, unsigned), direction=direction), t.out[0].dtype)

    return function


def shift_right_arithmetic(t, x, count, **_):
    """A negative number keeps its sign: its complement is shifted."""
    if x.dtype.kind == "u":
        return shift("RIGHT")(t, x, count)
    wider = t.cast(x, np.int64)
    is_negative = t.Less(wider, np.int64(0))
    size = t.Where(is_negative, t.BitwiseNot(wider), wider)
    shifted = t.to(
        t.BitShift(t.to(size, np.uint64), t.cast(count, np.uint64), direction="RIGHT"), np.int64
    )
    return t.to(t.Where(is_negative, t.BitwiseNot(shifted), shifted), t.out[0].dtype)


def population_count(t, x, **_):
    """Each bit, shifted to the lowest place, and their sum."""
    size = 8 * x.dtype.itemsize
    bits = t.to(t.cast(x, np.dtype(f"uint{size}")), np.uint64)
    each = t.BitShift(
        t.Unsqueeze(bits, np.array([-1])), np.arange(size, dtype=np.uint64), direction="RIGHT"
    )
    ones = t.to(t.BitwiseAnd(each, np.uint64(1)), np.int64)
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
