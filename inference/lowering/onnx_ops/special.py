"""Special functions that ONNX lacks, computed with the polynomials of XLA."""

import numpy as np

from inference.lowering.approximations import (
    ERF_INV_ABOVE_5,
    ERF_INV_BELOW_5,
    ERFC_ABOVE_2,
    ERFC_BELOW_2,
)
from inference.lowering.onnx_ops.dims import is_number
from inference.lowering.onnx_ops.elementwise import never_in_float64


def polynomial(t, x, coefficients):
    """Horner's rule; the highest power comes first."""
    total = coefficients[0]
    for coefficient in coefficients[1:]:
        total = t.Add(t.Mul(total, x), coefficient)
    return total


def erfc(t, x, **_):
    """Not computed as 1 - erf(x) for a large x, where the difference would be rounded to 0."""
    size = t.Max(t.Abs(x), 1.0)
    inverse = t.Reciprocal(size)
    y = t.Mul(inverse, inverse)
    series = t.Where(
        t.Less(size, 2.0), polynomial(t, y, ERFC_BELOW_2), polynomial(t, y, ERFC_ABOVE_2)
    )
    tail = t.Mul(t.Mul(t.Exp(t.Neg(t.Mul(size, size))), inverse), series)
    far = t.Where(t.Less(x, 0.0), t.Sub(2.0, tail), tail)
    return t.Where(t.Less(t.Abs(x), 1.0), t.Sub(1.0, t.Erf(x)), far)


def erf_inv(t, x, **_):
    w = t.Neg(t.Log(t.Mul(t.Sub(1.0, x), t.Add(1.0, x))))
    below = polynomial(t, t.Sub(w, 2.5), ERF_INV_BELOW_5)
    above = polynomial(t, t.Sub(t.Sqrt(t.Max(w, 5.0)), 3.0), ERF_INV_ABOVE_5)
    result = t.Mul(x, t.Where(t.Less(w, 5.0), below, above))
    return t.Where(t.Equal(t.Abs(x), 1.0), t.Mul(x, np.inf), result)


def real_dft(t, x, **_):
    """A DFT node, whose numbers have their two parts in the last axis and at least one axis before
    the one that it transforms."""
    if not is_number(x.shape[-1]):
        t.refuse("fft", "over a free axis")
    axes = np.array([0, -1] if len(x.shape) == 1 else [-1], np.int64)
    numbers = t.Unsqueeze(x, axes)
    if t.opset >= 20:
        y = t.DFT(numbers, None, np.int64(-2), onesided=1)
    else:
        y = t.DFT(numbers, axis=max(len(x.shape) - 1, 1), onesided=1)
    return t.Squeeze(y, axes[:1]) if len(x.shape) == 1 else y


PRIMITIVES = {"erfc": erfc, "erf_inv": erf_inv, "real_dft": never_in_float64(real_dft)}
