"""Smaller kernels with the same results: taps of a convolution that never read anything but its padding."""


def trimmed(weight, size, stride, pads, dilation):
    """(weight, pads) of a convolution of images of this size, without the taps that never meet a pixel.

    A 7x7 kernel over 3x3 pixels is one of 5x5, and over a single pixel one of 1x1.
    """
    kept = []
    for axis, geometry in enumerate(zip(size, stride, pads, dilation, strict=True)):
        first, end, pair = kept_taps(weight.shape[axis], *geometry)
        weight = weight[first:end] if axis == 0 else weight[:, first:end]
        kept.append(pair)
    return weight, tuple(kept)


def kept_taps(kernel, size, stride, pads, dilation):
    """(first, end, pads) of the taps along one axis that read a pixel for some output."""
    out = (sum(pads) + size - dilation * (kernel - 1) - 1) // stride + 1
    reads = [
        any(0 <= o * stride + k * dilation - pads[0] < size for o in range(out))
        for k in range(kernel)
    ]
    if not any(reads):
        return 0, kernel, pads
    first, last = reads.index(True), kernel - 1 - reads[::-1].index(True)
    first, after = (
        min(first, pads[0] // dilation),
        min(kernel - 1 - last, pads[1] // dilation),
    )  # no padding below 0
    return first, kernel - after, (pads[0] - first * dilation, pads[1] - after * dilation)
