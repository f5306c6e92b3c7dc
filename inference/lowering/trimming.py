"""Smaller kernels with the same results: without the taps that only read padding."""

from collections.abc import Sequence
from typing import Any, TypeAlias

Pads: TypeAlias = Sequence[Sequence[Any]]  # numbers before and after, along each axis
Padding: TypeAlias = str | int | Sequence[Any]  # of a layer: "SAME", "VALID", or numbers


def trimmed(
    weight: Any,
    size: Sequence[Any],
    stride: Sequence[int],
    pads: Pads,
    dilation: Sequence[int],
) -> tuple[Any, Pads]:
    """(weight, pads) of a convolution over images of this size, without taps that read no pixel.

    A 7x7 kernel over 3x3 pixels becomes 5x5, and over a single pixel 1x1.
    """
    if not all(isinstance(n, int) for n in size):  # a free size may be large
        return weight, pads
    trimmed_pads = []
    for axis, geometry in enumerate(zip(size, stride, pads, dilation, strict=True)):
        first, end, pair = used_taps(weight.shape[axis], *geometry)
        weight = weight[first:end] if axis == 0 else weight[:, first:end]
        trimmed_pads.append(pair)
    return weight, tuple(trimmed_pads)


def used_taps(
    kernel: int, size: int, stride: int, pads: Sequence[int], dilation: int
) -> tuple[int, int, Sequence[int]]:
    """(first, end, pads) of the taps along one axis that read a pixel for at least one output."""
    out = (sum(pads) + size - dilation * (kernel - 1) - 1) // stride + 1
    reads = [
        any(0 <= o * stride + k * dilation - pads[0] < size for o in range(out))
        for k in range(kernel)
    ]
    if not any(reads):
        return 0, kernel, pads
    # remove no more taps than there is padding for them: padding must not become negative
    before = min(reads.index(True), max(pads[0], 0) // dilation)
    after = min(reads[::-1].index(True), max(pads[1], 0) // dilation)
    return before, kernel - after, (pads[0] - before * dilation, pads[1] - after * dilation)
