"""Conversions of numbers to other dtypes."""

import jax
import numpy as np

from inference.lowering.onnx_ops.graph import stored_type, tensor_type


def convert(t, x, *, new_dtype, **_):
    dtype = np.dtype(t.checked(new_dtype))
    if dtype.kind == "b":
        return t.Not(t.Equal(x, np.zeros((), stored_type(x.dtype))))
    if dtype.kind in "iu" and x.dtype.kind not in "biu":
        return to_integer(t, x, dtype)
    return t.cast(x, dtype)


def to_integer(t, x, dtype):
    """Clamps to the range of the integer, and nan to 0; Cast leaves both undefined."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    exact = np.dtype(np.float32 if dtype.itemsize < 4 else np.float64)
    x = t.cast(x, exact)
    x = t.Where(t.IsNaN(x), np.zeros((), exact), x)
    if dtype.itemsize < 8:
        return t.to(t.Min(t.Max(x, exact.type(low)), exact.type(high)), dtype)
    end = exact.type(2.0 ** (63 if dtype.kind == "i" else 64))  # high + 1: high is not a float64
    inside = t.to(t.Min(t.Max(x, exact.type(low)), np.nextafter(end, 0)), dtype)
    # Where is computed in int64, which it supports
    highest = np.asarray(high, dtype).astype(np.int64)
    return t.to(t.Where(t.GreaterOrEqual(x, end), highest, t.to(inside, np.int64)), dtype)


def reduce_precision(t, x, *, exponent_bits, mantissa_bits):
    """Casts to a dtype with these bits and back; subnormal numbers become 0, as in JAX."""
    narrow = {(5, 10): np.float16, (8, 7): jax.numpy.bfloat16}.get((exponent_bits, mantissa_bits))
    if narrow is None:
        t.refuse("reduce_precision", f"to {exponent_bits} and {mantissa_bits} bits")
    rounded = t.to(t.add("Cast", x, to=tensor_type(narrow)), x.dtype)
    if exponent_bits == 8:
        return rounded
    smallest = np.asarray(np.finfo(narrow).tiny, stored_type(x.dtype))
    is_normal = t.GreaterOrEqual(t.Abs(rounded), smallest)
    return t.Where(t.Or(is_normal, t.IsNaN(rounded)), rounded, t.Mul(x, 0.0))


PRIMITIVES = {"convert_element_type": convert, "reduce_precision": reduce_precision}
