"""The form in which a layer computes, where that depends on the platform and on static shapes.

All forms of a layer have the same values and gradients. `python -m benchmarks.forms` measures each
of them against the plain form; the ratios below are times on two CPU cores. Accelerators use the
plain form, but for attention in 16 bits on NVIDIA's (`fused_attention`). What is faster on every
platform is not chosen here but written in the layers: derivatives written by hand, and the one
product for queries, keys and values.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

# Features and rows: with 4 or 8 features and this many rows, means as matrix products take 0.5 to
# 0.7 of the time of sums; with another number of features they take 1.3 to 3.
NARROW, ROWS = (4, 8), 2**12
# Taps: with more of them, the shifted images take too long to compile. A pool counts the rows and
# the columns of its window, which it takes one after the other.
MANY_TAPS = 9 * 9
# Taps: up to this many, the kernel gradient of shifted images is written out. That takes half
# of the time of JAX's derivative, but compiles for 2 seconds at 3x3, and for over 10 at 7x7.
FEW_TAPS = 4 * 4
# Channels: a grouped convolution in dense blocks of this many takes 0.05 of the time of XLA's.
BLOCK = 28
# Channels and phases: a transposed convolution into this many channels is one convolution for each
# phase, which mostly takes 0.5 to 1 of the time of one for all, with its zeros; into fewer, 1 to
# 1.5. More phases compile for too long.
WIDE, MANY_PHASES = 16, 3 * 3
# Queries: causal attention in blocks of this many or more, and in no more than four blocks, takes
# 0.6 of the time for 128 queries, 0.5 for 512; smaller blocks make more products than they save.
QUERIES, QUERY_BLOCKS = 32, 4


def are_free(sizes: Sequence[int]) -> bool:
    """Whether some of the sizes are symbols, as in an export for images of any size.

    Only the plain form is then certain to work.
    """
    return not all(isinstance(size, int) for size in sizes)


def on_cpu(form: Callable[..., Array], plain: Callable[..., Array], *args: Array) -> Array:
    """The value of `form` where the program is compiled for the CPU, of `plain` elsewhere."""
    return lax.platform_dependent(*args, cpu=form, default=plain)


def norm_by_products(shape: tuple[int, ...]) -> bool:
    """Whether the means of a layer norm are matrix products."""
    *rows, features = shape
    return features in NARROW and not are_free(rows) and math.prod(rows) >= ROWS


def pool_in_two_passes(window: tuple[int, ...]) -> bool:
    """Whether a pool takes the rows first, then the columns: 0.03 to 1.3 of the time of one pass,
    but as long or longer for 2x2."""
    return min(window) > 1 and math.prod(window) > 4


def depthwise_form(
    shape: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    pads: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
) -> str:
    """The function in conv_forms.py for a depthwise convolution; XLA's is up to 100x slower."""
    costs = depthwise_costs(shape, kernel, stride, pads, dilation)
    if math.prod(kernel) > MANY_TAPS:
        del costs["shifted"]
    return min(costs, key=lambda form: costs[form])


def depthwise_costs(
    shape: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    pads: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
) -> dict[str, float]:
    """{form: nanoseconds that it is expected to take on two cores, forward and backward}."""
    batch, height, width, channels = shape
    batch = 1 if are_free([batch]) else batch
    rows, columns = (
        (size + sum(pad) - d * (k - 1) - 1) // s + 1
        for size, pad, d, k, s in zip((height, width), pads, dilation, kernel, stride, strict=True)
    )
    inputs, outputs = batch * height * width * channels, batch * rows * columns * channels
    matrices = channels * height * width * rows * columns  # one for each channel
    row_matrices = channels * width * columns  # one for each channel and row of the kernel
    return {
        # Every tap is in three sums over the outputs' pixels: y and the gradients of x and the tap.
        # Fewer than 8 channels do not fill a vector.
        "shifted": math.prod(kernel) * (0.2 * outputs * max(1, 8 / channels) + 3000),
        # x and y with the channels first; the products; the matrices and their gradients.
        "banded": inputs + outputs + (0.02 * batch + 3) * matrices,
        # The same, but one copy of the image and one product for each row of the kernel.
        "banded_rows": kernel[0]
        * (inputs + (0.7 + 0.02 * width) * outputs + 3 * row_matrices + 10_000),
    }


def phases_apart(kernel: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a transposed convolution is one convolution for each phase, not one for all."""
    every_phase_has_taps = all(k >= s for k, s in zip(kernel[:2], stride, strict=True))
    return kernel[3] >= WIDE and math.prod(stride) <= MANY_PHASES and every_phase_has_taps


def joined_groups(groups: int, inputs: int, outputs: int) -> int:
    """How many groups, each from `inputs` channels to `outputs`, one dense block of a grouped
    convolution joins."""

    def misfit(joined: int) -> float:
        excess = math.log(joined * math.sqrt(inputs * outputs) / BLOCK)
        return max(1.5 * excess, -excess)  # a block that is too large multiplies more zeros

    return min((n for n in range(1, groups + 1) if groups % n == 0), key=misfit)


def gradient_transposed(rows: int, inputs: int, outputs: int) -> bool:
    """Whether the gradient of a linear layer's weight is computed as its transpose, (outputs,
    inputs): on the CPU, 0.2 to 1.2 of the time for these sizes, in the median 0.8."""
    return rows >= inputs >= 2 * outputs and jax.default_backend() == "cpu"


def query_blocks(queries: int, keys: int) -> int:
    """In how many blocks of queries causal attention is computed."""
    if not isinstance(queries, int) or queries != keys:  # a free length, or the step of a cache
        return 1
    return max(1, min(QUERY_BLOCKS, queries // QUERIES))


def fused_attention(q: Array, k: Array, mask: Array | None = None) -> bool:
    """Whether attention is one kernel of cuDNN, which never holds a score for each pair of
    positions. It computes in 16 bits, with heads of up to 128 features; its gradient needs even
    lengths. With several seeds in one call, it takes no mask: JAX's rule for vmap fails with most
    of them."""
    if mask is not None and among_replicas():
        return False
    is_half = q.dtype in (jnp.bfloat16, jnp.float16)
    fits = is_half and q.shape[-1] % 8 == 0 < q.shape[-1] <= 128
    even = all(isinstance(n, int) and n % 2 == 0 for n in (q.shape[1], k.shape[1]))
    return fits and even and has_flash_attention()


def among_replicas() -> bool:
    """Whether several seeds are computed in one call, by the vmap of training/engine.py."""
    try:
        lax.axis_size("replicas")
    except NameError:
        return False
    return True


def has_flash_attention() -> bool:
    """Whether the accelerator is one of NVIDIA's for which cuDNN has this kernel: Ampere or
    later."""
    if jax.default_backend() != "gpu":
        return False
    device = jax.local_devices()[0]
    return "cuda" in device.client.platform_version and float(device.compute_capability) >= 8
