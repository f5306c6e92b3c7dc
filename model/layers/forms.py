"""In which form a layer computes, where that depends on the platform and on static shapes.

All forms of a layer have the same values and gradients. `python -m benchmarks.forms` measures each against the plain one; the
ratios below are what it found on two cores. Accelerators take the plain ones. What is better everywhere is no choice, and stands
in the layers: gradients that are written out, the one product for queries, keys and values.
"""

from jax import lax

NARROW = 8  # features: a mean as a product takes 0.6 to 0.75 of the time of a sum at 8, 1.5 at 16, 2 at 32
SMALL_MAP = (
    16 * 16
)  # pixels: one banded matrix a channel takes 0.2 to 0.4 of the time of one for each row of the kernel, 1.1
# at 14x14 with kernels of 3x3; 7 at 32x32
MATRICES = (
    2**22
)  # numbers of them all, at most: for 384 channels of 14x14 pixels they take 20 times as long as rows do
WIDE_MAP = 96  # columns: up to here a banded matrix for each row of the kernel; at 128 taps take 0.4 to 0.7 of its time
MANY_TAPS = 8 * 8  # beyond, so many moved images take too long to compile
BLOCK = (
    32  # channels: a grouped convolution in dense blocks of as many takes 0.05 of the time of XLA's
)


def on_cpu(form, plain, *args):
    """A form of a layer where the program is compiled for the CPU, the plain one elsewhere."""
    return lax.platform_dependent(*args, cpu=form, default=plain)


def depthwise(height, width, channels, taps):
    """Which of the forms in conv_forms.py a depthwise convolution takes: XLA's own is up to 100 times slower."""
    if height * width <= SMALL_MAP and channels * (height * width) ** 2 <= MATRICES:
        return "banded"
    return "banded_rows" if width <= WIDE_MAP or taps > MANY_TAPS else "shifted"


def moves(taps):
    """Whether a pool compares moved images: XLA's gradient of a sliding maximum is 9 times slower over tiles, 3 over others."""
    return taps <= MANY_TAPS


def joined_groups(groups, channels):
    """How many groups, of so many channels each, one dense block of a grouped convolution joins."""
    return max(
        n for n in range(1, groups + 1) if groups % n == 0 and (n == 1 or n * channels <= BLOCK)
    )
