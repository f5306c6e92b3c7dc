"""Special functions that ONNX lacks, by the polynomials that XLA computes them with."""

import numpy as np

# erfc(x) = exp(-x^2) / x * polynomial of 1 / x^2, for x from 1 to 2, and from 2 on
ERFC_BELOW_2 = [2.326819970068386e-2, -1.387039388740657e-1, 3.687424674597105e-1, -5.824733027278666e-1]
ERFC_BELOW_2 += [6.210004621745983e-1, -4.944515323274145e-1, 3.404879937665872e-1, -2.741127028184656e-1, 5.638259427386472e-1]
ERFC_ABOVE_2 = [-1.047766399936249e1, 1.297719955372516e1, -7.495518717768503, 2.921019019210786, -1.015265279202700]
ERFC_ABOVE_2 += [4.218463358204948e-1, -2.820767439740514e-1, 5.641895067754075e-1]

# erf_inv(x) = x * polynomial of w = -log(1 - x^2), of w - 2.5 for w below 5, else of sqrt(w) - 3
ERF_INV_BELOW_5 = [2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087]
ERF_INV_BELOW_5 += [-0.00125372503, -0.00417768164, 0.246640727, 1.50140941]
ERF_INV_ABOVE_5 = [-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773]
ERF_INV_ABOVE_5 += [-0.0076224613, 0.00943887047, 1.00167406, 2.83297682]


def polynomial(t, x, coefficients):
    """By Horner's rule, the highest power first."""
    total = t.number(coefficients[0])
    for coefficient in coefficients[1:]:
        total = t.Add(t.Mul(total, x), t.number(coefficient))
    return total


def erfc(t, x, **_):
    """1 - erf(x), which would leave nothing of a small result."""
    size = t.Max(t.Abs(x), t.number(1))
    inverse = t.Reciprocal(size)
    y = t.Mul(inverse, inverse)
    series = t.Where(t.Less(size, t.number(2)), polynomial(t, y, ERFC_BELOW_2), polynomial(t, y, ERFC_ABOVE_2))
    tail = t.Mul(t.Mul(t.Exp(t.Neg(t.Mul(size, size))), inverse), series)
    far = t.Where(t.Less(x, t.number(0)), t.Sub(t.number(2), tail), tail)
    return t.Where(t.Less(t.Abs(x), t.number(1)), t.Sub(t.number(1), t.Erf(x)), far)


def erf_inv(t, x, **_):
    w = t.Neg(t.Log(t.Mul(t.Sub(t.number(1), x), t.Add(t.number(1), x))))
    below = polynomial(t, t.Sub(w, t.number(2.5)), ERF_INV_BELOW_5)
    above = polynomial(t, t.Sub(t.Sqrt(t.Max(w, t.number(5))), t.number(3)), ERF_INV_ABOVE_5)
    found = t.Mul(x, t.Where(t.Less(w, t.number(5)), below, above))
    return t.Where(t.Equal(t.Abs(x), t.number(1)), t.Mul(x, t.number(np.inf)), found)


PRIMITIVES = {"erfc": erfc, "erf_inv": erf_inv}
